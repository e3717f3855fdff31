"""Ports that are claimed before anybody listens."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from canned import CannedHttp, http
from running import free_ports

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.ports import PortClaims, fetch_metrics, publish_address, served_addresses
from graphkiln_backend.system.owned_folder import OWNER_FILE, OwnedFolder

KNOWN = dict.fromkeys(("http-port", "http-address", "grpc-port", "allow-metrics", "reuse-http-port"), True)


def parse(http: int, grpc: int, *more: str) -> TritonFlags:
    return TritonFlags.parse([f"--http-port={http}", f"--grpc-port={grpc}", "--allow-metrics=false", *more], KNOWN)


def test_a_port_is_claimed_once_until_it_is_given_up() -> None:
    http, grpc, other, more = free_ports(4)
    with PortClaims(parse(http, grpc)):
        with pytest.raises(ServerSetupError, match=rf"port {grpc} \(gRPC\) is reserved by another") as raised:
            PortClaims(parse(other, grpc))
        assert "--grpc-port=" in raised.value.hint
        with PortClaims(parse(other, more)):  # what failed half-way holds nothing
            pass
    with PortClaims(parse(http, grpc)):
        pass


def test_a_claim_does_not_listen() -> None:
    http, grpc = free_ports(2)
    with PortClaims(parse(http, grpc)), socket.create_server(("127.0.0.1", http)):
        pass


@pytest.mark.parametrize("more", ["--reuse-http-port=true", "--http-address=127.0.0.2"])
def test_what_is_shared_on_purpose_or_at_another_address_is_not_claimed(more: str) -> None:
    http, grpc, other = free_ports(3)
    with PortClaims(parse(http, grpc, more)), PortClaims(parse(http, other)):
        pass


def test_a_process_that_is_killed_leaves_no_claim() -> None:
    http, grpc = free_ports(2)
    program = (
        "import os, signal, sys; from graphkiln_backend.server.flags import TritonFlags\n"
        "from graphkiln_backend.server.ports import PortClaims\n"
        f"claims = PortClaims(TritonFlags.parse(sys.argv[1:], {KNOWN!r}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    flags = parse(http, grpc)
    ended = subprocess.run([sys.executable, "-c", program, *flags.arguments], check=False, timeout=60)
    assert ended.returncode == -9
    with PortClaims(flags):
        pass


# Where servers listen, as those beside them find it.

SERVED_FLAGS = dict.fromkeys(("http-port", "http-address", "grpc-port", "allow-http", "allow-grpc"), True)


def flags(*arguments: str, host: str = "0.0.0.0") -> TritonFlags:
    return TritonFlags.parse(arguments, SERVED_FLAGS, host)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (flags(), [("http", "127.0.0.1", 8000)]),
        (flags("--http-port=9000", host="10.0.0.7"), [("http", "10.0.0.7", 9000)]),
        (flags(host="::"), [("http", "::1", 8000)]),
        (flags("--http-address=ipv6:::1"), [("http", "::1", 8000)]),
        (flags("--allow-http=false"), [("grpc", "127.0.0.1", 8001)]),
        (flags("--allow-http=false", "--allow-grpc=false"), []),
    ],
)
def test_what_is_told_is_found(given: TritonFlags, found: list[tuple[str, str, int]], tmp_path: Path) -> None:
    with OwnedFolder(tmp_path) as run:
        publish_address(run.path, given)
        assert list(served_addresses([tmp_path])) == found
    assert list(served_addresses([tmp_path])) == []


def test_what_dead_servers_told_and_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    dead = tmp_path / "graphkiln-dead"  # without a lock
    dead.mkdir()
    (dead / OWNER_FILE).touch()
    publish_address(dead, flags())
    with OwnedFolder(tmp_path) as damaged, OwnedFolder(tmp_path):
        (damaged.path / "address.json").write_text('["http"')
        assert list(served_addresses([tmp_path])) == []


# What a server on this machine publishes.


def test_the_text_comes_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with CannedHttp([http("a 1\nü 2\n".encode())]) as server:
        assert fetch_metrics(f"{server.url}/metrics") == "a 1\nü 2\n"


def test_no_server_is_an_error() -> None:
    with pytest.raises(OSError, match="refused"):
        fetch_metrics(f"http://127.0.0.1:{free_ports(1)[0]}/metrics")
