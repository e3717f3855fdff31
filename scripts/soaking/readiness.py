"""Whether the service is ready, looked at again and again; and whether every model answers rightly."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter

import numpy as np

from graphkiln_backend.graph.closing import Closeable
from graphkiln_client import Client
from soaking.models import MODELS, difference
from soaking.service import Service

_PERIOD_S = 0.1
_GAP_S = 0.5
"""Between two failures in a row; more than that, and it was ready in between."""
_PROBE_LIMIT_S = 5.0
_PROBE_ROWS = 2


class Readiness(Closeable):
    """A thread that asks for readiness ten times a second, as a load balancer does.

    Args:
        service: What it asks.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._not_ready: list[tuple[float, float, int | None]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            begun = time.monotonic()
            status = self._service.ready_status()
            if status != http.HTTPStatus.OK:
                self._not_ready.append((begun, time.monotonic(), status))

    def last_failure(self, begin: float, end: float) -> float | None:
        """When readiness was last seen to fail between two moments."""
        return max((ended for _, ended, _ in self._between(begin, end)), default=None)

    def longest_s(self, begin: float, end: float) -> float:
        """Seconds of the longest time without readiness between two moments."""
        longest = since = 0.0
        last = -_GAP_S
        for begun, ended, _ in self._between(begin, end):
            since = since if begun - last < _GAP_S else begun
            last = ended
            longest = max(longest, last - since)
        return longest

    def statuses(self, begin: float, end: float) -> dict[str, int]:
        """How often readiness failed between two moments, by HTTP status."""
        return dict(Counter(str(status or "no answer") for *_, status in self._between(begin, end)))

    def _between(self, begin: float, end: float) -> list[tuple[float, float, int | None]]:
        return [each for each in list(self._not_ready) if each[1] >= begin and each[0] <= end]

    def failures_outside(self, windows: list[tuple[float, float]]) -> int:
        """How often it failed in none of these intervals."""
        return sum(
            all(ended < begin or begun > end for begin, end in windows) for begun, ended, _ in list(self._not_ready)
        )

    def close(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self._thread.join(10)


def every_model_answers(service: Service) -> bool:
    """Whether the service is ready, and each version of the first store answers rightly over both protocols."""
    if service.ready_status() != http.HTTPStatus.OK:
        return False
    try:
        return all(_answers(url) for url in (service.http_url, service.grpc_url))
    except Exception:
        return False


def _answers(url: str) -> bool:
    random = np.random.default_rng()
    with Client(url, timeout_s=_PROBE_LIMIT_S, max_retries=0) as client:
        for model in MODELS:
            feeds = model.feeds(random, min(_PROBE_ROWS, model.largest_batch))
            for version in model.versions:
                answer = client.model(model.name, str(version)).infer(feeds)
                if difference(model.reference(version, feeds), answer):
                    return False
    return True
