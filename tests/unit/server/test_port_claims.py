"""Ports that are claimed before anybody listens."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from running import free_ports

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.ports import PortClaims

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


def test_nobody_listens_there() -> None:
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
