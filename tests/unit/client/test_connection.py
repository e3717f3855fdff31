"""Deadlines and retries of calls, with a fake transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from canned import INFERRED, CannedHttp, http
from fake_transport import FakeTransport, echo
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import (
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidInput,
    ModelNotReady,
    Overloaded,
    ProtocolError,
)
from graphkiln_client.client import run
from graphkiln_client.connection import Connection, retry_delay_s
from graphkiln_client.transports.base import Deadline, InferRequest

X = InferRequest(model="m", version="", inputs={"X": np.arange(3)})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


class TestCall:
    def test_transient_errors_are_retried_after_a_delay(self) -> None:
        transport = FakeTransport({"ready": [ConnectionFailed("gone"), Overloaded("busy", retry_after_s=0.25), True]})
        assert run(Connection(transport, 30.0, 2).call(transport.wire.ready())) is True
        assert len(transport.sent("ready")) == 3
        assert transport.delays_s[0] <= 0.1
        assert transport.delays_s[1] == 0.25

    @pytest.mark.parametrize("error", [InvalidInput("no"), DeadlineExceeded("late"), ProtocolError("what")])
    def test_permanent_errors_are_not_retried(self, error: ClientError) -> None:
        transport = FakeTransport({"ready": [error, True]})
        with pytest.raises(type(error)):
            run(Connection(transport, 30.0, 5).call(transport.wire.ready()))
        assert transport.delays_s == []

    def test_retries_share_one_deadline(self, clock: list[float]) -> None:
        transport = FakeTransport()

        def busy() -> None:
            clock[0] += 3
            raise Overloaded("busy", retry_after_s=1)

        transport.responses["ready"] = busy
        with pytest.raises(Overloaded):
            run(Connection(transport, 10.0, 9).call(transport.wire.ready()))
        assert {deadline.at for deadline in transport.deadlines} == {110.0}
        assert len(transport.requests) == 3, "after 9 of 10 seconds, a delay of one is not begun"


class TestInfer:
    def test_attempts_send_remaining_time(self, clock: list[float]) -> None:
        transport = FakeTransport()

        def slow(request: InferRequest, timeout_s: float) -> Any:
            clock[0] += 4
            if len(transport.sent("infer")) < 3:
                raise ModelNotReady("later", retry_after_s=0)
            return echo(request, timeout_s)

        transport.responses["infer"] = slow
        run(Connection(transport, 10.0, 5).infer(X))
        assert [request.arguments[1] for request in transport.sent("infer")] == [10.0, 6.0, 2.0]

    @pytest.mark.parametrize(
        ("extensions", "binary"), [(["binary_tensor_data"], True), ([], False), (["classification"], False)]
    )
    def test_binary_extension_is_used(self, extensions: list[str], binary: bool) -> None:
        transport = FakeTransport({"server_metadata": {"extensions": extensions}, "infer": echo})
        run(Connection(transport, 10.0, 0).infer(X))
        assert transport.sent("infer")[0].options == {"binary": binary}

    @pytest.mark.parametrize("extensions", [None, 7, "binary_tensor_data", {"binary_tensor_data": 1}])
    def test_malformed_extensions(self, extensions: Any) -> None:
        transport = FakeTransport({"server_metadata": {"extensions": extensions}})
        with pytest.raises(ProtocolError, match="list of extensions"):
            run(Connection(transport, 10.0, 0).extensions())


class TestEncodeOnce:
    def test_encoded_request_is_sent_repeatedly(self, clock: list[float]) -> None:
        transport = FakeTransport({"infer": echo})
        connection = Connection(transport, 10.0, 3)
        send = run(connection.encode_once(X))
        assert transport.sent("infer") == []
        run(send())
        clock[0] += 5
        run(send())
        first, second = transport.sent("infer")
        assert first is second, "the same encoded request"
        assert [deadline.at for deadline in transport.deadlines[1:]] == [110.0, 115.0]

    def test_encoded_request_is_not_retried(self) -> None:
        transport = FakeTransport({"infer": [Overloaded("busy", retry_after_s=0), echo]})
        send = run(Connection(transport, 10.0, 3).encode_once(X))
        with pytest.raises(Overloaded):
            run(send())
        assert transport.delays_s == []


Infer = Callable[..., dict[str, AnyArray]]


class TestRetries:
    @pytest.mark.parametrize("status", ["429 Busy", "502 Bad", "503 Later", "504 Slow"])
    def test_transient_errors_are_retried(self, infer: Infer, status: str) -> None:
        with CannedHttp([http(b"{}", status), http(b"{}", status), INFERRED]) as server:
            assert infer(server.url)["Y"] == [2]
            assert len(server.requests) == 3


class TestDelay:
    FAR = Deadline(timeout_s=1000, at=float("inf"))

    @given(attempt=st.integers(0, 60))
    def test_exponential_backoff_with_jitter(self, attempt: int) -> None:
        delay = retry_delay_s(ConnectionFailed("gone"), attempt, self.FAR)
        assert delay is not None
        assert 0 <= delay <= min(5.0, 0.1 * 2**attempt)
