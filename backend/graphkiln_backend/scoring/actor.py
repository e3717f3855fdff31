"""What Ray runs on a node: the keeper of one worker process.

Nothing that a row may do happens in the actor itself. When the actor is gone, its node or somebody outside ended it,
and no row is to blame; when its process ends, it says how.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphkiln_backend.scoring.attempts import Attempt
from graphkiln_backend.scoring.outcomes import Outcome
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.worker_process import WorkerProcess


class WorkerActor:
    """Keeps a worker process; see `WorkerProcess`.

    Args:
        name: Of the worker.
        request: The run.
        memory_bytes: The worker's share of the node's memory.
    """

    def __init__(self, name: str, request: ScoreRequest, memory_bytes: float) -> None:
        self._process = WorkerProcess(name, request, memory_bytes)

    def assign(self, number: int, attempt: Attempt) -> None:
        """Sends an attempt to the process."""
        self._process.assign(number, attempt)

    def poll(self, timeout_s: float) -> Sequence[Outcome]:
        """What has happened since the last call."""
        return self._process.poll(timeout_s)

    def close(self) -> None:
        """Ends the process."""
        self._process.close()
