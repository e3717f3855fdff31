"""Readiness of peers, the rows of their table, and their installation."""

from __future__ import annotations

import subprocess
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import peers_speed
import pytest
from peers.protocols import PEERS, Peer, parse_json

from graphkiln.bench.generator import Throughput
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.server.installation import find_installation


class TestReadiness:
    @pytest.mark.parametrize(("status", "ready"), [(200, True), (503, False), (404, False)])
    def test_is_a_status_of_200(self, status: int, ready: bool) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status if self.path == "/health" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:  # type: ignore[override]
                pass

        peer = Peer("fake", "/health", PEERS["fastapi"].request, parse_json)
        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = Thread(target=server.handle_request)
            thread.start()
            assert peer.is_ready("127.0.0.1", server.server_port) is ready
            thread.join()
        assert not peer.is_ready("127.0.0.1", server.server_port)  # the port is closed


class TestRows:
    def throughput(self, *rates: float) -> list[Throughput]:
        return [Throughput(per_second=rate, latencies_ms=(1e3 / rate,), seconds=1) for rate in rates]

    def test_ratios_are_to_the_best_peer_round_by_round(self) -> None:
        measured = {name: self.throughput(10, 1, 10) for name in PEERS}
        measured["litserve"] = self.throughput(20, 2, 20)
        measured["graphkiln fp32"] = self.throughput(60, 6, 60)
        rows = {row["set-up"]: row for row in peers_speed._rows(measured)}
        assert rows["graphkiln fp32"]["ratio"] == 3
        assert rows["litserve"]["ratio"] == 1
        assert rows["fastapi"]["ratio"] == 0.5
        assert rows["litserve"]["images/s"] == 20
        assert rows["litserve"]["p50 ms"] == 50

    def test_tritons_cpp_backend_is_a_peer(self) -> None:
        measured = {name: self.throughput(10) for name in PEERS}
        measured |= {peers_speed.CPP: self.throughput(20), "graphkiln int8": self.throughput(60)}
        rows = {row["set-up"]: row for row in peers_speed._rows(measured)}
        assert rows[peers_speed.CPP]["ratio"] == 1
        assert rows[peers_speed.CPP]["version"] == find_installation().version
        assert rows["graphkiln int8"]["ratio"] == 3

    @pytest.mark.parametrize("name", PEERS)
    def test_versions_are_the_pinned_ones(self, name: str) -> None:
        version = peers_speed._version(name)
        assert version[:1].isdigit()
        assert f"=={version}" in (peers_speed._FOLDER / f"{name}.txt").read_text()


def test_a_failed_installation_names_the_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(peers_speed, "CACHE", tmp_path)
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(MeasurementError, match=r"the peer litserve cannot be installed from .*litserve\.txt: code 1"):
        peers_speed.environment("litserve")
    assert not (tmp_path / "peers" / "litserve" / "requirements.txt").exists()  # the next run tries again
