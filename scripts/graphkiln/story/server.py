"""A local Triton server for measurements: ready, or the reason why it is not."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import ClientError, MeasurementError
from graphkiln_client import Client

_STOP_S = 60
_POLL_S = 0.02
"""What is waited for may itself be measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalServer:
    """A server that is ready.

    Attributes:
        http_url: Its HTTP address.
        grpc_url: Its gRPC address.
        pid: Of its supervisor.
        metrics_url: Where its metrics are; empty where nobody said.
    """

    http_url: str
    grpc_url: str
    pid: int
    metrics_url: str = ""

    @property
    def urls(self) -> tuple[str, str]:
        """HTTP, then gRPC."""
        return self.http_url, self.grpc_url


@contextmanager
def start_server(
    *stores: Path, flags: tuple[str, ...] = (), log: Path | None = None, deadline_s: float = math.inf
) -> Iterator[LocalServer]:
    """Serves model stores on free ports until the context is left.

    Args:
        stores: Model repositories.
        flags: Further flags of `graphkiln serve`.
        log: Where its output goes; to stderr when None.
        deadline_s: How long it may take until it is ready.

    Raises:
        MeasurementError: A model cannot be loaded, the server ended, or is not ready in time; the message says why.
    """
    http, grpc, metrics = free_ports(3)
    ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
    command = [sys.executable, "-P", "-m", "graphkiln.cli", "serve", *(f"--model-store={store}" for store in stores)]
    with ExitStack() as stack:
        output = stack.enter_context(log.open("w")) if log else sys.stderr
        # In a session of its own: Ctrl-C interrupts the measurement, which then stops the server.
        server = subprocess.Popen(
            [*ending_with_us(), *command, *flags, *ports],
            stdout=output,
            stderr=output,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        stack.callback(stop, server)
        local = LocalServer(
            http_url=f"http://127.0.0.1:{http}",
            grpc_url=f"grpc://127.0.0.1:{grpc}",
            pid=server.pid,
            metrics_url=f"http://127.0.0.1:{metrics}/metrics",
        )
        _wait_ready(server, local.http_url, log, time.monotonic() + deadline_s)
        yield local


def ending_with_us() -> tuple[str, ...]:
    """What a server's command begins with, so that it ends when this process is killed; nothing without util-linux.

    Source: prctl(2), PR_SET_PDEATHSIG; setpriv(1).
    """
    return ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()


def free_ports(count: int) -> list[int]:
    """Ports that nobody holds; all are held together, so that none comes twice."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def stop(server: subprocess.Popen[bytes]) -> None:
    """Ends a server as a service manager does: with SIGTERM, and with SIGKILL when it does not end in a minute."""
    server.terminate()
    try:
        server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait_ready(server: subprocess.Popen[bytes], url: str, log: Path | None, deadline: float) -> None:
    with Client(url, timeout_s=5, max_retries=0) as client:
        while True:
            if time.monotonic() > deadline:
                raise MeasurementError(f"the server was not ready in time{': ' + _last_line(log) if log else ''}")
            if server.poll() is not None:
                reason = f": {_last_line(log)}" if log else ""
                raise MeasurementError(f"the server ended with code {server.returncode}{reason}")
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


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
