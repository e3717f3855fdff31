"""What cannot be known of a server that somebody else started, nor changed there."""

from __future__ import annotations

from graphkiln.tuning.target import Objective
from graphkiln_backend.graph.errors import InvalidInput

NOT_THERE = (
    "what the server was started with (--set, --enable-*, its cores and memory) stays as it is",
    "what really serves cannot be read back over the client's protocols: only answers and times are measured",
    "memory and CPU time of the server are not known here",
    "other models and other clients of the server take their part of its cores from what is measured",
    "sessions alone are timed on this machine: what they rule out holds for a server on it, or on one like it",
    "a response cache of the model is off meanwhile: samples that come again would be answered by it alone",
)
"""A line each."""


def check_knowable(objective: Objective) -> None:
    """Refuses to look for what nobody can tell of a server that somebody else started.

    Raises:
        InvalidInput: It is about memory or CPU time.
    """
    if objective in (Objective.MEMORY, Objective.COST):
        raise InvalidInput(
            f"--objective {objective}: neither memory nor CPU time of a running server is known here",
            hint="leave --url out, so that servers are started for it; or --objective latency",
        )
