"""A local Triton server for measurements."""

from __future__ import annotations

import math
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from graphkiln_backend.graph.errors import ClientError, MeasurementError
from graphkiln_backend.system import processes
from graphkiln_client import Client

if TYPE_CHECKING:
    from subprocess import Popen

STOP_S = 60
_POLL_S = 0.02  # short, because start times are measured, too
_TRIES = 3
# Messages of our server and of Triton.
_IN_USE = re.compile(r"port \d+ \(\w+\) is in use|already in use")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalServer:
    """A server that is ready.

    Attributes:
        pid: Process id of the supervisor.
        metrics_url: Address of the metrics, or empty.
    """

    http_url: str
    grpc_url: str
    pid: int
    metrics_url: str = ""

    @property
    def urls(self) -> tuple[str, str]:
        """HTTP and gRPC URL."""
        return self.http_url, self.grpc_url


class PortTaken(MeasurementError):
    """Another program took a port of the server before the server could listen on it."""


@contextmanager
def start_server(
    *stores: Path, flags: tuple[str, ...] = (), log: Path | None = None, deadline_s: float = math.inf
) -> Iterator[LocalServer]:
    """Serve model stores on free ports within a context, which is entered when the server is ready.

    Raises:
        PortTaken: The ports were taken at each attempt.
        MeasurementError: A model cannot be loaded, the server ended, or is not ready in time.
    """
    deadline = time.monotonic() + deadline_s
    command = [sys.executable, "-P", "-m", "graphkiln.cli", "serve", *(f"--model-store={store}" for store in stores)]
    with ExitStack() as stack:
        output = stack.enter_context(log.open("w")) if log else sys.stderr
        for left in reversed(range(_TRIES)):
            try:
                started = stack.enter_context(_start([*command, *flags], output, log, deadline))
                break
            except PortTaken:
                if not left:
                    raise
                output.seek(0)
                output.truncate()  # keep only the log of the next attempt
        yield started


@contextmanager
def _start(command: Sequence[str], output: IO[str], log: Path | None, deadline: float) -> Iterator[LocalServer]:
    http, grpc, metrics = free_ports(3)
    ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
    # In a new session, so that Ctrl-C interrupts the measurement, which then stops the server.
    server = processes.start([*command, *ports], log=output, at_our_end=signal.SIGTERM)
    try:
        local = LocalServer(
            http_url=f"http://127.0.0.1:{http}",
            grpc_url=f"grpc://127.0.0.1:{grpc}",
            pid=server.pid,
            metrics_url=f"http://127.0.0.1:{metrics}/metrics",
        )
        _wait_ready(server, local.http_url, log, deadline)
        yield local
    finally:
        processes.stop(server, STOP_S)


def free_ports(count: int) -> list[int]:
    """Find distinct free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def _wait_ready(server: Popen[bytes], url: str, log: Path | None, deadline: float) -> None:
    with Client(url, timeout_s=5, max_retries=0) as client:
        while True:
            if time.monotonic() > deadline:
                raise _failure("the server was not ready in time", log)
            if server.poll() is not None:
                raise _failure(f"the server ended with code {server.returncode}", log)
            try:
                health = client.health()
            except ClientError:
                time.sleep(_POLL_S)
                continue
            if health.ready:
                return
            failed = [f"{model.name}: {model.reason}" for model in health.not_ready if model.state == "UNAVAILABLE"]
            if failed:
                raise MeasurementError("; ".join(failed))
            time.sleep(_POLL_S)


def _failure(what: str, log: Path | None) -> MeasurementError:
    """Create an error with the last line of the log; `PortTaken` if the log reports a port in use."""
    if log is None:
        return MeasurementError(what)
    text = log.read_text(errors="replace").strip()
    kind = PortTaken if _IN_USE.search(text) else MeasurementError
    return kind(f"{what}: {text.splitlines()[-1].strip() if text else 'the log is empty'}")
