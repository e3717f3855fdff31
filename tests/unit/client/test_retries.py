"""What is tried again, how often and when, over real connections."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from canned import INFERRED, CannedHttp, hang_up, http
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import (
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    ServerError,
    Unauthorized,
)
from graphkiln_client.connection import retry_delay_s
from graphkiln_client.transports.base import Deadline

Infer = Callable[..., dict[str, AnyArray]]


class TestRetries:
    @pytest.mark.parametrize("status", ["429 Busy", "502 Bad", "503 Later", "504 Slow"])
    def test_what_may_pass_is_tried_again(self, infer: Infer, status: str) -> None:
        with CannedHttp([http(b"{}", status), http(b"{}", status), INFERRED]) as server:
            assert infer(server.url)["Y"] == [2]
            assert len(server.requests) == 3

    def test_a_broken_connection_is_tried_again(self, infer: Infer) -> None:
        with CannedHttp([hang_up, INFERRED]) as server:
            assert infer(server.url)["Y"] == [2]

    def test_the_server_says_when(self, infer: Infer) -> None:
        begun = time.monotonic()
        with CannedHttp([http(b"{}", "429 Busy", "Retry-After: 1"), INFERRED]) as server:
            infer(server.url)
        assert time.monotonic() - begun >= 1


class TestDelay:
    FAR = Deadline(timeout_s=1000, at=float("inf"))

    @pytest.mark.parametrize(
        "kind", [InvalidInput, ModelNotFound, Unauthorized, DeadlineExceeded, ServerError, ProtocolError]
    )
    def test_these_are_final(self, kind: type[ClientError]) -> None:
        assert retry_delay_s(kind("never", retry_after_s=0), 0, self.FAR) is None

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
