"""Which failures are worth another attempt, and how long to wait before it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, ModelNotReady, Overloaded
from graphkiln_client.deadline import Deadline

_BASE_S, _CAP_S = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class Retries:
    """The policy of a client.

    Connection failures, 429, 502, 503, 504 and gRPC's UNAVAILABLE and RESOURCE_EXHAUSTED are tried again; whatever
    else the server answered is final, and so is a deadline.

    Attributes:
        most: Further attempts after the first.

    Source: M. Brooker, "Exponential Backoff And Jitter" (full jitter); RFC 9110, "Retry-After".
    """

    most: int

    def delay_s(self, error: ClientError, attempt: int, deadline: Deadline) -> float | None:
        """Seconds to wait before the next attempt; None when the error is final.

        Args:
            error: What the attempt ended with.
            attempt: How many attempts were made before it.
            deadline: Of the whole call: waiting beyond it would help nobody.
        """
        if attempt >= self.most or not isinstance(error, ConnectionFailed | ModelNotReady | Overloaded):
            return None
        delay = error.retry_after_s
        if delay is None:
            delay = random.uniform(0, min(_CAP_S, _BASE_S * 2**attempt))  # noqa: S311 - spreads load, guards nothing
        return delay if delay < deadline.remaining_s else None
