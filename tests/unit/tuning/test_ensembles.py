"""Ensembles that a model is a step of."""

from __future__ import annotations

from pathlib import Path

from graphkiln.tuning.subject import ensembles_of

ENSEMBLE = """platform: "ensemble"
max_batch_size: {batch}
ensemble_scheduling {{ step [ {{ model_name: "first" model_version: -1 }}, {{ model_name: "last" }} ] }}
"""


def test_those_of_the_same_store_are_found_with_their_batches(tmp_path: Path) -> None:
    configs = {
        "first": "max_batch_size: 8\n",
        "pipeline": ENSEMBLE.format(batch=4),
        "single": ENSEMBLE.format(batch=0),
        ".hidden": ENSEMBLE.format(batch=64),
        "broken": "max_batch_size: ???\n",
    }
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(text)
    (tmp_path / "bare").mkdir()
    assert ensembles_of(tmp_path / "first") == {"pipeline": 4, "single": 0}
    assert ensembles_of(tmp_path / "pipeline") == {}
