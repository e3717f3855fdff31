"""What stands in for the executor of an instance that has computed wrong outputs: an error for every request."""

from __future__ import annotations

from collections.abc import Sequence

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.triton.executor import InferenceRequest, Result


class InstanceFault(GraphkilnError):
    """The instance computes wrongly and serves no more."""

    triton_code = "UNAVAILABLE"


class Refusal:
    """Refuses requests; see `Executor`.

    Args:
        reason: What differed.
    """

    def __init__(self, reason: str) -> None:
        self._error = InstanceFault(
            f"this instance computes wrongly and serves no more: {reason}", hint="try again: it is being restarted"
        )

    def execute(self, request: InferenceRequest) -> Result:
        """Refuses a single request."""
        return self.execute_batch([request])[0]

    def execute_batch(self, requests: Sequence[InferenceRequest]) -> list[Result]:
        """Refuses requests."""
        return [self._error for _ in requests]
