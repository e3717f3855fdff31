"""Fuzz a server: each generated request gets a response or an error in time, each valid one the correct answer.

Hypothesis generates requests from the models' signatures and mutates them. Ordinary clients (neighbors) send requests
at the same time and must get correct answers, except while the supervisor restarts a crashed server. A request that
crashes the server is reported by its kind and the seed, never by its content.
"""

from __future__ import annotations

import copy
import http.client
import json
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import numpy as np
import tritonclient.grpc as triton_grpc
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from soaking.faults import LIMIT_FLAGS, STORE, is_gone
from soaking.guard import guarded_folder
from soaking.models import MODELS, Arrays, SoakModel, build_store, difference
from soaking.service import Service, every_model_answers
from soaking.soak import start_service
from soaking.traffic import (
    DEADLINE_S,
    HEADER_LENGTH,
    Ledger,
    Outcome,
    Traffic,
    WrongAnswer,
    http_request,
    read_response,
)

_NEIGHBORS = 2
_RECOVERY_LIMIT_S = 90.0
_AFTERMATH_S = 3.0  # errors of neighbors so soon after a restart belong to it
_SERVICE_S = 6.0  # pause after each restart, so that the supervisor does not give up
_INFER = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A generated request.

    Attributes:
        kind: Name of the strategy.
        model: The model.
        body: HTTP body, or serialized gRPC message.
        headers: HTTP headers; None for gRPC.
        feeds: Inputs of a valid request; None for a mutated one.
    """

    kind: str
    model: SoakModel
    body: bytes
    headers: dict[str, str] | None = None
    feeds: Arrays | None = None

    def check(self, outputs: Arrays, version: int | None) -> None:
        """Compare the answer to a valid request with the reference of its version.

        Raises:
            WrongAnswer: They differ, or the response has no version.
        """
        if version is None:
            raise WrongAnswer(f"{self.kind}: the response has no version")
        if differs := difference(self.model.reference(version, self.feeds or {}), outputs):
            raise WrongAnswer(f"{self.kind}: {differs}")


@dataclass
class FuzzResult:
    """Results of a run.

    Attributes:
        seed: Random seed.
        sent: Number of cases by kind.
        statuses: Number of responses by kind and status.
        restarts: Kind of each case that crashed the server, and seconds until recovery.
        refused: Kinds of valid cases that got an error while the server was up.
        bad: Wrong answers and unanswered requests, including those of neighbors.
        neighbors: Errors of neighbors while the server was up.
        gave_up: Number of exits of the supervisor.
        sound: Whether every version answered correctly at the end.
        seconds: Duration.
    """

    seed: int
    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    restarts: list[tuple[str, float]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    bad: list[Outcome] = field(default_factory=list)
    neighbors: list[Outcome] = field(default_factory=list)
    gave_up: int = 0
    sound: bool = False
    seconds: float = 0.0


@st.composite
def requests(draw: st.DrawFn) -> tuple[SoakModel, Arrays]:
    """A model with valid inputs."""
    model = draw(st.sampled_from([each for each in MODELS if each.name != "looped"]))  # it may compute forever
    rows = draw(st.integers(1, min(4, model.largest_batch)))
    return model, model.feeds(np.random.default_rng(draw(st.integers(0, 2**16))), rows)


_scalars = (
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
_flat = _scalars | st.lists(_scalars, max_size=4) | st.dictionaries(st.text(max_size=9), _scalars, max_size=4)
_json_values = _flat | st.lists(_flat, max_size=4) | st.dictionaries(st.text(max_size=9), _flat, max_size=4)


@st.composite
def http_cases(draw: st.DrawFn) -> Case:
    """HTTP requests: valid, with one to three changed JSON values, or with changed bytes."""
    model, feeds = draw(requests())
    body, headers = http_request(model, feeds, binary=draw(st.booleans()))
    kind = draw(st.sampled_from(("valid", "changed JSON", "changed bytes")))
    if kind == "valid":
        return Case(kind="HTTP valid", model=model, body=body, headers=headers, feeds=feeds)
    if kind == "changed bytes":
        return Case(kind=f"HTTP {kind}", model=model, body=draw(damaged(body)), headers=headers)
    length = int(headers.get(HEADER_LENGTH, len(body)))
    header = json.dumps(draw(mutated(json.loads(body[:length])))).encode()
    headers = headers | ({HEADER_LENGTH: str(len(header))} if HEADER_LENGTH in headers else {})
    return Case(kind=f"HTTP {kind}", model=model, body=header + body[length:], headers=headers)


@st.composite
def grpc_cases(draw: st.DrawFn) -> Case:
    """GRPC requests: valid, with changed fields, or with changed bytes."""
    model, feeds = draw(requests())
    request = service_pb2.ModelInferRequest(model_name=model.name)
    for name, array in feeds.items():
        request.inputs.add(name=name, datatype=model.inputs[name][0], shape=array.shape)
        content = serialize_byte_tensor(array).item() if array.dtype.kind == "O" else array.tobytes()
        request.raw_input_contents.append(content)
    kind = draw(st.sampled_from(("valid", "changed fields", "changed bytes")))
    if kind == "changed fields":
        tensor = draw(st.sampled_from(list(request.inputs)))
        change = draw(st.sampled_from(("shape", "datatype", "name", "content", "model")))
        if change == "shape":
            tensor.shape[:] = draw(st.lists(st.integers(-3, 300), max_size=4))
        elif change == "content":
            request.raw_input_contents[0] = draw(damaged(request.raw_input_contents[0]))
        elif change == "model":
            request.model_name = draw(st.text(max_size=9))
        else:
            setattr(tensor, change, draw(st.text(max_size=9)))
    body = request.SerializeToString()
    if kind == "changed bytes":
        body = draw(damaged(body))
    return Case(kind=f"gRPC {kind}", model=model, body=body, feeds=feeds if kind == "valid" else None)


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """A JSON document with one to three values replaced or removed."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        parent, key = draw(st.sampled_from(_places(changed)))
        if draw(st.booleans()):
            parent[key] = draw(_json_values)
        else:
            del parent[key]
        if not _places(changed):
            break
    return changed


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Containers of a document with their keys; of long lists only the first three."""
    keys: list[Any] = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = list(range(min(3, len(value))))
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with one to four changes, or truncated."""
    result = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        if result:
            result[draw(st.integers(0, len(result) - 1))] = draw(st.integers(0, 255))
    return bytes(result[: draw(st.integers(0, len(result)))] if draw(st.booleans()) else result)


def fuzz(count: int, seed: int, keep_log: Path | None = None) -> FuzzResult:
    """Send generated requests to a new server.

    Raises:
        MeasurementError: The service could not be started.
    """
    ledger, result, begun = Ledger(), FuzzResult(seed=seed), time.monotonic()
    windows: list[tuple[float, float]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(guarded_folder("soak-"))
        build_store(folder / STORE)
        service = Service(folder, folder / STORE, *LIMIT_FLAGS)
        stack.callback(service.end)
        if keep_log:
            keep_log.write_bytes(b"")
            stack.callback(service.append_log, keep_log)
        start_service(service)
        neighbors = Traffic(service, ledger, seed, senders=_NEIGHBORS)
        neighbors.start()
        sender = _Sender(service, ledger, result, windows)

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(http_cases() | grpc_cases())
        def send(case: Case) -> None:
            sender.send(case)

        send()
        sender.close()
        neighbors.stop()
        result.sound = every_model_answers(service)
    result.bad = ledger.failures("wrong", "lost")
    result.neighbors = [
        outcome
        for outcome in ledger.failures("refused")
        if not outcome.sender.startswith(("HTTP ", "gRPC "))
        and all(outcome.ended < begin or outcome.begun > end for begin, end in windows)
    ]
    result.seconds = time.monotonic() - begun
    return result


class _Sender:
    """Send cases, check their answers, and wait for recovery after a crash."""

    def __init__(
        self, service: Service, ledger: Ledger, result: FuzzResult, windows: list[tuple[float, float]]
    ) -> None:
        self._service, self._ledger, self._result, self._windows = service, ledger, result, windows
        self._channel = grpc.insecure_channel(f"127.0.0.1:{service.reach.grpc_port}")
        self._server = next(iter(service.servers()), None)

    def send(self, case: Case) -> None:
        self._result.sent[case.kind] += 1
        begun = time.monotonic()
        with self._ledger.request(case.kind):
            status = "?"
            try:
                status = self._ask_grpc(case) if case.headers is None else self._ask_http(case)
            finally:
                self._result.statuses[case.kind, status] += 1
                restarted = self._bring_back(case, begun)
                if case.feeds is not None and status not in ("200", "OK") and not restarted:
                    self._result.refused.append(case.kind)

    def _ask_http(self, case: Case) -> str:
        connection = self._service.reach.connect_http(DEADLINE_S)
        try:
            connection.request("POST", f"/v2/models/{case.model.name}/infer", case.body, case.headers or {})
            response = connection.getresponse()
            content = response.read()
        except (http.client.HTTPException, ConnectionError):
            return "closed"
        finally:
            connection.close()
        if response.status == http.HTTPStatus.OK and case.feeds is not None:
            case.check(*read_response(response, content))
        return str(response.status)

    def _ask_grpc(self, case: Case) -> str:
        infer = self._channel.unary_unary(_INFER)
        try:
            answer = infer(case.body, timeout=DEADLINE_S, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return str(error.code().name)
        if case.feeds is not None:
            response = service_pb2.ModelInferResponse.FromString(answer)
            result = triton_grpc.InferResult(response)
            outputs = {each.name: result.as_numpy(each.name) for each in response.outputs}
            case.check(outputs, int(response.model_version))
        return "OK"

    def _bring_back(self, case: Case, begun: float) -> bool:
        """Wait for recovery if the case crashed the server; return whether it did."""
        if self._server is not None and not is_gone(self._server):
            return False
        limit = time.monotonic() + _RECOVERY_LIMIT_S
        while not every_model_answers(self._service):
            if not self._service.is_running() or time.monotonic() > limit:
                self._result.gave_up += 1
                self._service.end()
                self._service.start()
                self._service.wait_ready()
                limit = time.monotonic() + _RECOVERY_LIMIT_S
            time.sleep(0.1)
        self._server = next(iter(self._service.servers()), None)
        now = time.monotonic()
        self._result.restarts.append((case.kind, round(now - begun, 1)))
        self._windows.append((begun, now + _AFTERMATH_S))
        time.sleep(_SERVICE_S)
        return True

    def close(self) -> None:
        self._channel.close()


def fuzz_failures(result: FuzzResult) -> list[str]:
    """Reasons of a failure; empty for a passed run."""
    checks = {
        f"{len(result.bad)} wrong answers or requests without an answer": result.bad,
        f"{len(result.neighbors)} requests of neighbors failed while the server was up": result.neighbors,
        f"{len(result.refused)} valid requests were refused": result.refused,
        "not every version answers rightly at the end": not result.sound,
        f"the supervisor gave up {result.gave_up} times": result.gave_up,
    }
    return [text for text, failed in checks.items() if failed]


def fuzz_to_json(result: FuzzResult) -> dict[str, Any]:
    """Convert to plain data."""
    statuses = {f"{kind}: {status}": count for (kind, status), count in sorted(result.statuses.items())}
    return {**asdict(result), "statuses": statuses, "failures": fuzz_failures(result)}


def fuzz_to_text(result: FuzzResult) -> str:
    """Format for a terminal of 80 columns."""
    lines = [f"fuzzer: {result.sent.total()} cases in {result.seconds:.0f} s, seed {result.seed}", ""]
    for kind, count in sorted(result.sent.items()):
        statuses = Counter({status: n for (of, status), n in result.statuses.items() if of == kind})
        lines.append(f"{kind:<20}{count:>7}: {', '.join(f'{n} {status}' for status, n in statuses.most_common(5))}")
    lines += ["", f"the server was restarted {len(result.restarts)} times: {result.restarts[:8]}"]
    lines += [f"refused: {', '.join(result.refused[:8])}"] if result.refused else []
    lines += [f"bad: {outcome.sender}: {outcome.detail}" for outcome in (*result.bad[:8], *result.neighbors[:8])]
    failed = [f"FAILED: {text}" for text in fuzz_failures(result)]
    return "\n".join([*lines, "", *(failed or ["passed"])])
