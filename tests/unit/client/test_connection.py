"""Calls with one deadline and retries, over a transport without a server."""

from __future__ import annotations

import time
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
    def test_what_may_pass_is_tried_again_after_a_delay(self) -> None:
        transport = FakeTransport({"ready": [ConnectionFailed("gone"), Overloaded("busy", retry_after_s=0.25), True]})
        assert run(Connection(transport, 30.0, 2).call(transport.wire.ready())) is True
        assert len(transport.sent("ready")) == 3
        assert transport.delays_s[0] <= 0.1
        assert transport.delays_s[1] == 0.25

    @pytest.mark.parametrize("error", [InvalidInput("no"), DeadlineExceeded("late"), ProtocolError("what")])
    def test_what_is_final_is_raised_at_once(self, error: ClientError) -> None:
        transport = FakeTransport({"ready": [error, True]})
        with pytest.raises(type(error)):
            run(Connection(transport, 30.0, 5).call(transport.wire.ready()))
        assert transport.delays_s == []

    def test_all_attempts_share_one_deadline(self, clock: list[float]) -> None:
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
    def test_each_attempt_tells_the_server_what_is_left(self, clock: list[float]) -> None:
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
    def test_tensors_are_bytes_where_the_server_takes_them(self, extensions: list[str], binary: bool) -> None:
        transport = FakeTransport({"server_metadata": {"extensions": extensions}, "infer": echo})
        run(Connection(transport, 10.0, 0).infer(X))
        assert transport.sent("infer")[0].options == {"binary": binary}

    def test_the_extensions_are_requested_once(self) -> None:
        transport = FakeTransport({"infer": echo})
        connection = Connection(transport, 10.0, 0)
        for _ in range(3):
            run(connection.infer(X))
        assert [request.name for request in transport.requests] == ["server_metadata", "infer", "infer", "infer"]

    @pytest.mark.parametrize("extensions", [None, 7, "binary_tensor_data", {"binary_tensor_data": 1}])
    def test_extensions_that_are_no_list(self, extensions: Any) -> None:
        transport = FakeTransport({"server_metadata": {"extensions": extensions}})
        with pytest.raises(ProtocolError, match="list of extensions"):
            run(Connection(transport, 10.0, 0).extensions())


class TestEncodeOnce:
    def test_it_is_built_once_and_sent_each_time_with_a_new_deadline(self, clock: list[float]) -> None:
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

    def test_it_is_not_tried_again(self) -> None:
        transport = FakeTransport({"infer": [Overloaded("busy", retry_after_s=0), echo]})
        send = run(Connection(transport, 10.0, 3).encode_once(X))
        with pytest.raises(Overloaded):
            run(send())
        assert transport.delays_s == []


# What is tried again, how often and when, over real connections.

Infer = Callable[..., dict[str, AnyArray]]


class TestRetries:
    @pytest.mark.parametrize("status", ["429 Busy", "502 Bad", "503 Later", "504 Slow"])
    def test_what_may_pass_is_tried_again(self, infer: Infer, status: str) -> None:
        with CannedHttp([http(b"{}", status), http(b"{}", status), INFERRED]) as server:
            assert infer(server.url)["Y"] == [2]
            assert len(server.requests) == 3

    def test_the_server_says_when(self, infer: Infer) -> None:
        begun = time.monotonic()
        with CannedHttp([http(b"{}", "429 Busy", "Retry-After: 1"), INFERRED]) as server:
            infer(server.url)
        assert time.monotonic() - begun >= 1


class TestDelay:
    FAR = Deadline(timeout_s=1000, at=float("inf"))

    @given(attempt=st.integers(0, 60))
    def test_the_delay_is_jittered_below_a_bound_that_doubles(self, attempt: int) -> None:
        delay = retry_delay_s(ConnectionFailed("gone"), attempt, self.FAR)
        assert delay is not None
        assert 0 <= delay <= min(5.0, 0.1 * 2**attempt)

    @pytest.mark.parametrize(("left_s", "expected"), [(7.1, 7.0), (7.0, None), (1.0, None), (0.0, None)])
    def test_a_delay_beyond_the_deadline_is_not_begun(
        self, left_s: float, expected: float | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("time.monotonic", lambda: 50.0)
        deadline = Deadline(timeout_s=10, at=50.0 + left_s)
        assert retry_delay_s(Overloaded("busy", retry_after_s=7.0), 0, deadline) == expected
