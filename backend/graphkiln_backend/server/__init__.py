"""Run tritonserver for `graphkiln serve` and supervise it.

`supervisor.py` tells the life of a server from its start to its end: `launch.py` starts it in a `run_folder.py`,
`version_control.py` loads and unloads models, `watchdog.py` finds faults, `drain.py` ends it. `edge.py` is HAProxy in
front of it. What these need: the user's flags and key (`flags.py`, `access.py`, `tls.py`), the installed Triton
(`installation.py`, `advisories.py`), the models shown to it (`store_copies.py`, `managed_stores.py`, `mirror.py`,
`image_models.py`, `admission.py`), limits of the machine (`limits.py`, `ports.py`), its API (`repository_control.py`,
`model_states.py`) and its output (`log.py`).
"""
