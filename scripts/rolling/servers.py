"""Servers that a rolling update replaces on the same ports, and haproxy in front of them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.error import URLError
from urllib.request import urlopen

from graphkiln.story.server import free_ports
from graphkiln_backend.system import processes

READY_S = 300
STOP_S = 60
SERVE = (sys.executable, "-m", "graphkiln.cli", "serve", "--edge=on")
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


class Replaceable(Protocol):
    """A server that is replaced on the same ports."""

    http_port: int

    def start(self) -> None:
        """Start the next one and wait until it is ready."""

    def stop(self) -> None:
        """End it with SIGTERM, and wait for its end."""


class ServedProcess:
    """`graphkiln serve`; use it as a context manager.

    Args:
        store: Model store.
        log: File for its output.

    Attributes:
        command: Command of the next start, without store and ports.
    """

    def __init__(self, store: Path, log: Path, command: Sequence[str] = SERVE) -> None:
        self.http_port, *rest = free_ports(3)
        self._ports = (self.http_port, *rest)
        self._store, self._log = store, log
        self.command = command

    def start(self) -> None:
        """Start the next one and wait until it is ready."""
        names = ("http", "grpc", "metrics")
        ports = [f"--{name}-port={port}" for name, port in zip(names, self._ports, strict=True)]
        command = [*self.command, f"--model-store={self._store}", "--drain=20", *ports]
        with self._log.open("ab") as log:
            self._process = processes.start(command, log=log)
        wait(lambda: is_ready(self.http_port), "graphkiln serve", lambda: self._process.poll() is not None)

    def stop(self) -> None:
        """End it with SIGTERM.

        Raises:
            RuntimeError: Its exit code is not 0.
        """
        self._process.send_signal(signal.SIGTERM)
        if code := self._process.wait(STOP_S):
            raise RuntimeError(f"the server ended with {code}:\n{self._log.read_text()}")

    def __enter__(self) -> ServedProcess:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            processes.stop(self._process, STOP_S)


def is_ready(port: int) -> bool:
    """Return true if a server on a port of this machine is ready."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


class Proxy:
    """haproxy in front of two ports, without retries; use it as a context manager."""

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

    def command(self, command: str) -> str:
        """Send a command of haproxy's runtime API."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            connection.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()

    def is_up(self, name: str) -> bool:
        """Return true if haproxy sends requests to a server."""
        lines = (line.split(",") for line in self.command("show stat").splitlines())
        return any(line[:2] == ["servers", name] and line[17].startswith("UP") for line in lines if len(line) > 17)


def wait(condition: Callable[[], bool], what: str, has_ended: Callable[[], bool] = lambda: False) -> None:
    """Wait until a condition holds.

    Raises:
        RuntimeError: The process has ended, or the condition does not hold in time.
    """
    deadline = time.monotonic() + READY_S
    while not condition():
        if has_ended() or time.monotonic() > deadline:
            raise RuntimeError(f"{what} ended, or did not get ready in {READY_S} s")
        time.sleep(0.05)
