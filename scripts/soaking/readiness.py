"""Whether the service is ready, looked at again and again; and whether every model answers rightly."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.system.closing import Closeable
from graphkiln_client import Client
from soaking.models import MODELS, difference
from soaking.service import Service

_PERIOD_S = 0.1
_GAP_S = 0.5
"""Between two failures in a row; more than that, and it was ready in between."""
_PROBE_LIMIT_S = 5.0
_PROBE_ROWS = 2
_LOG_BYTES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Lapse:
    """Readiness was asked for, and was not there.

    Attributes:
        begun: When it was asked for; monotonic seconds.
        ended: When that was known.
        status: The HTTP status, or None where nobody answered.
        models: Which models were not ready, where the server said so of itself.
        log: The last line of the service's log.
    """

    begun: float
    ended: float
    status: int | None
    models: tuple[str, ...] = ()
    log: str = ""

    def describe(self, since: float) -> str:
        """What happened, in a line.

        Args:
            since: The moment from which seconds count.
        """
        who = f", not ready: {', '.join(self.models)}" if self.models else ""
        return f"{self.begun - since:.1f} s: {self.status or 'no answer'}{who}; the log said: {self.log}"


class Readiness(Closeable):
    """A thread that asks for readiness ten times a second, as a load balancer does.

    Args:
        service: What it asks.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lapses: list[Lapse] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            begun = time.monotonic()
            status = self._service.ready_status()
            if status != http.HTTPStatus.OK:
                self._lapses.append(self._examine(begun, time.monotonic(), status))

    def _examine(self, begun: float, ended: float, status: int | None) -> Lapse:
        models = self._service.unready_models() if status == http.HTTPStatus.BAD_REQUEST else ()
        log = self._service.log_tail(_LOG_BYTES).rstrip().rpartition("\n")[2]
        return Lapse(begun=begun, ended=ended, status=status, models=models, log=log)

    def last_failure(self, begin: float, end: float) -> float | None:
        """When readiness was last seen to fail between two moments."""
        return max((lapse.ended for lapse in self._between(begin, end)), default=None)

    def longest_s(self, begin: float, end: float) -> float:
        """Seconds of the longest time without readiness between two moments."""
        longest = since = 0.0
        last = -_GAP_S
        for lapse in self._between(begin, end):
            since = since if lapse.begun - last < _GAP_S else lapse.begun
            last = lapse.ended
            longest = max(longest, last - since)
        return longest

    def statuses(self, begin: float, end: float) -> dict[str, int]:
        """How often readiness failed between two moments, by HTTP status."""
        return dict(Counter(str(lapse.status or "no answer") for lapse in self._between(begin, end)))

    def _between(self, begin: float, end: float) -> list[Lapse]:
        return [lapse for lapse in list(self._lapses) if lapse.ended >= begin and lapse.begun <= end]

    def lapses_outside(self, windows: list[tuple[float, float]]) -> list[Lapse]:
        """The failures in none of these intervals."""
        return [
            lapse
            for lapse in list(self._lapses)
            if all(lapse.ended < begin or lapse.begun > end for begin, end in windows)
        ]

    def close(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self._thread.join(10)


def every_model_answers(service: Service) -> bool:
    """Whether the service is ready, and each version of the first store answers rightly over both protocols."""
    if service.ready_status() != http.HTTPStatus.OK:
        return False
    try:
        return all(_answers(service, url) for url in (service.reach.http_url, service.reach.grpc_url))
    except (GraphkilnError, OSError):
        return False


def _answers(service: Service, url: str) -> bool:
    random = np.random.default_rng()
    with Client(url, timeout_s=_PROBE_LIMIT_S, max_retries=0, **service.reach.security) as client:
        for model in MODELS:
            feeds = model.feeds(random, min(_PROBE_ROWS, model.largest_batch))
            for version in model.versions:
                answer = client.model(model.name, str(version)).infer(feeds)
                if difference(model.reference(version, feeds), answer):
                    return False
    return True
