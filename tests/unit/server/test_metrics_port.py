"""What a server on this machine publishes."""

from __future__ import annotations

import pytest
from canned import CannedHttp, http
from running import free_ports

from graphkiln_backend.server.ports import fetch_metrics


def test_the_text_comes_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with CannedHttp([http("a 1\nü 2\n".encode())]) as server:
        assert fetch_metrics(f"{server.url}/metrics") == "a 1\nü 2\n"


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(OSError, match="refused"):
        fetch_metrics(f"http://127.0.0.1:{free_ports(1)[0]}/metrics")
