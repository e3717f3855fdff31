"""Which requests failed, and why: a line each in the log, so that a client's request id leads to its cause.

Only where the log is read by programs (`serve --log-format json`): a person's terminal would drown in what clients do
wrong. No more lines than a log can take, either: who sends nonsense as fast as he can fills no disk with it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.triton.environment import LOG_FORMAT_VARIABLE

_log = logging.getLogger("graphkiln.triton")

_MOST_A_SECOND = 50


class Identified(Protocol):
    """What is used of a `pb_utils.InferenceRequest`."""

    def request_id(self) -> str:
        """What its client calls it; empty where it has no name."""
        ...


def request_prefix(request_id: str) -> str:
    """What stands before a message that is about a request; nothing where it has no id.

    The form is that of Triton's own messages, with the id as a JSON string: nothing in it can end it.
    """
    return f"[request id: {json.dumps(request_id)}] " if request_id else ""


class FailureLog:
    """Counts requests that failed, and logs at most `_MOST_A_SECOND` of a second.

    How many were left out is said once the second is over.

    Args:
        clock: Seconds.

    Attributes:
        counts: Code of Triton -> how many so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._is_on = os.environ.get(LOG_FORMAT_VARIABLE) == "json"
        self._second = 0.0
        self._told = 0

    def tell(self, request: Identified | None, error: GraphkilnError) -> None:
        """Counts a request that has no outputs, and logs why.

        Args:
            request: The request; None where nobody knows it.
            error: The cause.
        """
        self.counts[error.triton_code] += 1
        if self._is_on and self._count() <= _MOST_A_SECOND:
            name = request.request_id() if request else ""
            _log.warning("request failed: %s: %s", error.triton_code, error, extra={"request_id": name})

    def _count(self) -> int:
        """Which failure of this second it is."""
        now = self._clock()
        if now - self._second >= 1:
            self._tell_left_out()
            self._second, self._told = now, 0
        self._told += 1
        return self._told

    def _tell_left_out(self) -> None:
        if self._told > _MOST_A_SECOND:
            _log.warning("%d more requests failed, which are not listed", self._told - _MOST_A_SECOND)
