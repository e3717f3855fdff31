"""haproxy in front of two servers: it retries nothing, and stops sending to one of them when it is told to."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from graphkiln.story.server import free_ports

READY_S = 300
STOP_S = 60
_CONFIGURATION = """\
global
    stats socket {socket} mode 600 level admin
    nbthread 1
defaults
    mode http
    timeout connect 10s
    timeout client 120s
    timeout server 120s
    timeout http-keep-alive 120s
    retries 0
frontend front
    bind 127.0.0.1:{port}
    default_backend servers
backend servers
    balance roundrobin
    option httpchk GET /v2/health/ready
    server one 127.0.0.1:{one} check inter 500ms
    server two 127.0.0.1:{two} check inter 500ms
"""


class Proxy:
    """haproxy in front of two ports; use it as a context manager."""

    def __init__(self, folder: Path, one: int, two: int) -> None:
        (self.port,) = free_ports(1)
        self._socket = folder / "haproxy.sock"
        self._file = folder / "haproxy.cfg"
        self._file.write_text(_CONFIGURATION.format(socket=self._socket, port=self.port, one=one, two=two))

    def __enter__(self) -> Proxy:
        self._process = subprocess.Popen(["haproxy", "-db", "-f", self._file], stdout=subprocess.DEVNULL)
        wait(self._socket.exists, "haproxy", lambda: self._process.poll() is not None)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(STOP_S)

    def tell(self, command: str) -> str:
        """Sends a command of haproxy's runtime API."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            connection.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()

    def is_up(self, name: str) -> bool:
        """Whether it sends requests to a server."""
        lines = (line.split(",") for line in self.tell("show stat").splitlines())
        return any(line[:2] == ["servers", name] and line[17].startswith("UP") for line in lines if len(line) > 17)


def wait(condition: Callable[[], bool], what: str, has_ended: Callable[[], bool] = lambda: False) -> None:
    """Waits for something.

    Raises:
        RuntimeError: It ended first, or does not become true in time.
    """
    deadline = time.monotonic() + READY_S
    while not condition():
        if has_ended() or time.monotonic() > deadline:
            raise RuntimeError(f"{what} ended, or did not get ready in {READY_S} s")
        time.sleep(0.05)
