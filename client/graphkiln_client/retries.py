"""Which failures are worth another attempt, and how long to wait before it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, ModelNotReady, Overloaded
from graphkiln_client.deadline import Deadline

_BASE_S, _CAP_S = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a client tries again.

    Connection failures, 429, 502, 503, 504 and gRPC's UNAVAILABLE and RESOURCE_EXHAUSTED are retried; every other
    error of the server is final, and so is a deadline.

    Attributes:
        max_retries: Further attempts after the first.

    Source: M. Brooker, "Exponential Backoff And Jitter" (full jitter); RFC 9110, "Retry-After".
    """

    max_retries: int

    def delay_s(self, error: ClientError, attempt: int, deadline: Deadline) -> float | None:
        """Seconds to wait before the next attempt; None when the error is final.

        Args:
            error: What the attempt ended with.
            attempt: How many attempts were made before it.
            deadline: Of the whole call; a delay that would pass it is not begun.
        """
        if attempt >= self.max_retries or not isinstance(error, ConnectionFailed | ModelNotReady | Overloaded):
            return None
        delay = error.retry_after_s
        if delay is None:
            delay = random.uniform(0, min(_CAP_S, _BASE_S * 2**attempt))  # noqa: S311 - spreads load, guards nothing
        return delay if delay < deadline.remaining_s else None
