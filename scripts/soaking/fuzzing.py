"""The fuzzer: thousands of requests made from the models' signatures and Triton's messages, to a supervised server.

Each must get a response or a clean error by its deadline; each valid one must get the right answer; and the neighbors,
ordinary clients beside it, must always get theirs, but for the moments in which the supervisor brings the server back.
"""

from __future__ import annotations

import http.client
import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import hypothesis
import psutil
from hypothesis import strategies as st

from graphkiln_backend.system.closing import Closeable
from soaking.fuzz_asking import Asker, Case
from soaking.fuzz_grpc import any_calls, damaged_calls, nearly_valid_calls, valid_calls
from soaking.fuzz_http import http_cases
from soaking.fuzz_raw import broken_http, broken_http2
from soaking.fuzz_streams import mixed_streams, valid_streams
from soaking.ledger import Ledger, NoAnswer, Outcome, WrongAnswer
from soaking.process_faults import is_gone
from soaking.readiness import every_model_answers
from soaking.service import Service

_log = logging.getLogger("graphkiln.soak")

_RECOVERY_LIMIT_S = 90.0
_AFTERMATH_S = 3.0
_ALIKE = 160
_SERVICE_S = 6.0
"""Of undisturbed service after each restart: one that is ended more often gives up, as it says."""

cases: st.SearchStrategy[Case] = st.one_of(
    http_cases, http_cases, http_cases, broken_http(), valid_calls(), nearly_valid_calls(), nearly_valid_calls(),
    any_calls(), damaged_calls(), valid_streams(), mixed_streams(), broken_http2(),
)  # fmt: skip


@dataclass
class FuzzLog:
    """What was seen.

    Attributes:
        sent: Number of cases by kind.
        statuses: Number of responses by kind and status.
        killers: Cases after which the server had to be brought back.
        refused: Valid cases that got an error while the server was up.
        windows: Intervals in which it was brought back.
        recoveries: Seconds until it was back.
        gave_up: How often the supervisor itself ended.
    """

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    killers: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    windows: list[tuple[float, float]] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    gave_up: int = 0


class Fuzzer(Closeable):
    """Sends cases and judges what comes back.

    Args:
        service: A supervised server of the soak's models.
        ledger: Where outcomes are counted.
    """

    def __init__(self, service: Service, ledger: Ledger) -> None:
        self.log = FuzzLog()
        self._service = service
        self._ledger = ledger
        self._asker = Asker(service.reach)
        self._server = self._find_server()
        self._deadly: set[str] = set()

    def run(self, count: int, seed: int) -> None:
        """Sends cases.

        Args:
            count: How many.
            seed: Of their choice.
        """
        while (left := count - sum(self.log.sent.values())) > 0:
            self._run_round(left, seed)
            seed += 1

    def _run_round(self, count: int, seed: int) -> None:
        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(cases)
        def send(case: Case) -> None:
            if _likeness(case) not in self._deadly:
                self._send(case)

        send()

    def _send(self, case: Case) -> None:
        self.log.sent[case.kind] += 1
        begun = time.monotonic()
        with self._ledger.request(case.kind):
            try:
                status = self._asker.ask(case)
            except Exception as error:
                status = _status(error)
                if isinstance(error, WrongAnswer | NoAnswer):
                    _log.warning("%s\n  %s", error, case)
                self._note_refusal(case, status, begun, error)
                raise
            else:
                if self._server is None or is_gone(self._server):  # some cases end it and get an ordinary answer before
                    self._bring_back(case, begun)
            finally:
                self.log.statuses[case.kind, status] += 1

    def _note_refusal(self, case: Case, status: str, begun: float, error: Exception) -> None:
        if isinstance(error, WrongAnswer):
            return
        restarted = self._bring_back(case, begun) if _may_be_dead(status) else False
        if case.model is not None and not restarted:
            self.log.refused.append(f"{error}: {case}"[:600])

    def _find_server(self) -> psutil.Process | None:
        return next(iter(self._service.servers()), None)

    def _bring_back(self, case: Case, begun: float) -> bool:
        """Waits until the server is back, if the case has ended it; whether it has."""
        time.sleep(0.2)
        if self._find_server() == self._server and self._service.ready_status() == http.HTTPStatus.OK:
            return False
        self.log.killers.append(str(case))
        self._deadly.add(_likeness(case))
        _log.info("the server ended after %s", case)
        self._wait_back()
        self._server = self._find_server()
        now = time.monotonic()
        self.log.recoveries.append(now - begun)
        self.log.windows.append((begun, now + _AFTERMATH_S))
        time.sleep(_SERVICE_S)
        return True

    def _wait_back(self) -> None:
        limit = time.monotonic() + _RECOVERY_LIMIT_S
        while not every_model_answers(self._service):
            if not self._service.is_running() or time.monotonic() > limit:
                self.log.gave_up += 1
                self._service.end()
                self._service.start()
                self._service.wait_ready()
                limit = time.monotonic() + _RECOVERY_LIMIT_S
            time.sleep(0.1)

    def close(self) -> None:
        """Closes its connections."""
        self._asker.close()


def neighbors_failed(outcomes: list[Outcome], windows: list[tuple[float, float]]) -> list[Outcome]:
    """The failures of neighbors outside of the moments in which the server was brought back."""
    return [
        outcome
        for outcome in outcomes
        if not outcome.sender.startswith(("HTTP ", "gRPC "))
        and all(outcome.ended < begin or outcome.begun > end for begin, end in windows)
    ]


def _likeness(case: Case) -> str:
    """What variations of a case have in common: hypothesis varies what it has found, and a restart takes seconds."""
    return str(case)[:_ALIKE]


def _status(error: Exception) -> str:
    if isinstance(error, grpc.RpcError):
        with suppress(AttributeError):
            return str(error.code().name)
    text = str(error)
    return text[:8] if text.startswith("HTTP ") else type(error).__name__


def _may_be_dead(status: str) -> bool:
    """Whether a server that ended gives this error: not those with which it tells what is wrong."""
    told = ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "ALREADY_EXISTS", "HTTP 4")
    return not status.startswith(told)
