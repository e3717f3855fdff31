"""What is tried again, how often and when, over real connections."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from canned import INFERRED, CannedHttp, hang_up, http

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, ModelNotReady, Overloaded

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

    @pytest.mark.parametrize("status", ["400 Bad", "401 Who", "404 No", "500 Oh"])
    def test_what_is_final_is_not(self, infer: Infer, status: str) -> None:
        with CannedHttp([http(b"{}", status), INFERRED]) as server:
            with pytest.raises(ClientError):
                infer(server.url)
            assert len(server.requests) == 1

    def test_no_more_often_than_asked(self, infer: Infer) -> None:
        with CannedHttp([http(b"{}", "503 Later")]) as server:
            with pytest.raises(ModelNotReady):
                infer(server.url, max_retries=3)
            assert len(server.requests) == 4

    def test_the_server_says_when(self, infer: Infer) -> None:
        begun = time.monotonic()
        with CannedHttp([http(b"{}", "429 Busy", "Retry-After: 1"), INFERRED]) as server:
            infer(server.url)
        assert time.monotonic() - begun >= 1

    def test_waiting_beyond_the_deadline_is_not_begun(self, infer: Infer) -> None:
        begun = time.monotonic()
        with CannedHttp([http(b"{}", "429 Busy", "Retry-After: 60")]) as server, pytest.raises(Overloaded):
            infer(server.url, timeout_s=2)
        assert time.monotonic() - begun < 1.5
