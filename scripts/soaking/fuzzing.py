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
import numpy as np
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from graphkiln_backend.graph.closing import Closeable
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_client.results import Classification
from soaking.fuzz_grpc import GrpcCase, any_calls, damaged_calls, nearly_valid_calls, valid_calls
from soaking.fuzz_http import HttpCase, http_cases
from soaking.ledger import DEADLINE_S, Ledger, NoAnswer, Outcome, WrongAnswer
from soaking.models import DIGIT_LABELS, TOLERANCE, difference
from soaking.readiness import every_model_answers
from soaking.senders import from_bytes, read_response
from soaking.service import Service

_log = logging.getLogger("graphkiln.soak")

Case = HttpCase | GrpcCase

_RECOVERY_LIMIT_S = 90.0
_AFTERMATH_S = 3.0
_ALIKE = 160
_SERVICE_S = 6.0
"""Of undisturbed service after each restart: one that is ended more often gives up, as it says."""

cases: st.SearchStrategy[Case] = st.one_of(
    http_cases, http_cases, valid_calls(), nearly_valid_calls(), nearly_valid_calls(), any_calls(), damaged_calls()
)


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
        self._http: http.client.HTTPConnection | None = None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}")
        self._server = self._server_pid()
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
                status = self._ask(case)
            except Exception as error:
                status = _status(error)
                if isinstance(error, WrongAnswer | NoAnswer):
                    _log.warning("%s\n  %s", error, case)
                self._note_refusal(case, status, begun, error)
                raise
            finally:
                self.log.statuses[case.kind, status] += 1

    def _ask(self, case: Case) -> str:
        return self._ask_http(case) if isinstance(case, HttpCase) else self._ask_grpc(case)

    def _note_refusal(self, case: Case, status: str, begun: float, error: Exception) -> None:
        if isinstance(error, WrongAnswer):
            return
        restarted = self._bring_back(case, begun) if _may_be_dead(status) else False
        if case.model is not None and not restarted:
            self.log.refused.append(f"{error}: {case}"[:600])

    def _ask_http(self, case: HttpCase) -> str:
        if self._http is None:
            self._http = http.client.HTTPConnection("127.0.0.1", self._service.http_port, timeout=DEADLINE_S)
        try:
            self._http.request(case.method, case.path, case.body, dict(case.headers))
            response = self._http.getresponse()
            content = response.read()
        except TimeoutError as error:
            self._hang_up()
            raise NoAnswer(f"within {DEADLINE_S:.0f} s") from error
        except BaseException:
            self._hang_up()
            raise
        if response.will_close:
            self._hang_up()
        if case.model is None:
            return str(response.status)
        if response.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"HTTP {response.status} {content[:200]!r}")
        check_http(case, response, content)
        return "200"

    def _ask_grpc(self, case: GrpcCase) -> str:
        call = self._channel.unary_unary(case.method)
        content = call(case.body, timeout=DEADLINE_S)
        if case.model is not None:
            check_grpc(case, content)
        return "OK"

    def _hang_up(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    def _server_pid(self) -> int:
        servers = self._service.servers()
        return servers[0].pid if servers else 0

    def _bring_back(self, case: Case, begun: float) -> bool:
        """Waits until the server is back, if the case has ended it; whether it has."""
        time.sleep(0.2)
        if self._server_pid() == self._server and self._service.ready_status() == http.HTTPStatus.OK:
            return False
        self.log.killers.append(str(case))
        self._deadly.add(_likeness(case))
        _log.info("the server ended after %s", case)
        self._wait_back()
        self._server = self._server_pid()
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
        self._hang_up()
        self._channel.close()


def check_http(case: HttpCase, response: http.client.HTTPResponse, content: bytes) -> None:
    """Compares the answer to a valid HTTP request with the reference.

    Raises:
        WrongAnswer: It is another one.
    """
    outputs, told = read_response(response, content)
    if case.class_count:
        check_classes(case, outputs)
    else:
        _check(case, outputs, told)


def check_grpc(case: GrpcCase, content: bytes) -> None:
    """Compares the answer to a valid gRPC request with the reference.

    Raises:
        WrongAnswer: It is another one.
    """
    response = service_pb2.ModelInferResponse.FromString(content)
    outputs = {
        output.name: from_bytes(output.datatype, list(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    _check(case, outputs, int(response.model_version))


def _check(case: Case, outputs: dict[str, AnyArray], told: int | None) -> None:
    assert case.model is not None
    version = int(case.version or told or 0)
    if version != told:
        raise WrongAnswer(f"version {told} answered in place of {version}")
    if text := difference(case.model.reference(version, case.feeds), outputs):
        raise WrongAnswer(f"{case.model.name} version {version}: {text}")


def check_classes(case: HttpCase, outputs: dict[str, AnyArray]) -> None:
    """Compares rankings `score:index:label` with the reference.

    Raises:
        WrongAnswer: A class or score is another one.
    """
    assert case.model is not None
    expected = case.model.reference(1, case.feeds)["OUTPUT_0"]
    for scores, texts in zip(expected, outputs["OUTPUT_0"], strict=True):
        best = np.argsort(-scores, kind="stable")[: case.class_count]
        got = [Classification.parse(text.decode()) for text in texts]
        named = [(int(index), DIGIT_LABELS[index]) for index in best]
        if [(entry.index, entry.label) for entry in got] != named:
            raise WrongAnswer(f"classes {got} instead of {named}")
        if not np.allclose([entry.score for entry in got], scores[best], TOLERANCE, TOLERANCE):
            raise WrongAnswer(f"scores {got} instead of {scores[best]}")


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
