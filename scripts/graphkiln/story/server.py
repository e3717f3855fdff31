"""A local Triton server for measurements: ready, or the reason why it is not."""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalServer:
    """A server that is ready.

    Attributes:
        http_url: Its HTTP address.
        grpc_url: Its gRPC address.
        pid: Of its supervisor.
    """

    http_url: str
    grpc_url: str
    pid: int

    @property
    def urls(self) -> tuple[str, str]:
        """HTTP, then gRPC."""
        return self.http_url, self.grpc_url


@contextmanager
def start_server(*stores: Path, flags: tuple[str, ...] = (), log: Path | None = None) -> Iterator[LocalServer]:
    """Serves model stores on free ports until the context is left.

    Args:
        stores: Model repositories.
        flags: Further flags of `graphkiln serve`.
        log: Where its output goes; to stderr when None.

    Raises:
        MeasurementError: A model cannot be loaded, or the server ended; the message says why.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        http, grpc, metrics = (held.getsockname()[1] for held in sockets)
    ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
    command = [sys.executable, "-m", "graphkiln.cli", "serve", *(f"--model-store={store}" for store in stores)]
    with ExitStack() as stack:
        output = stack.enter_context(log.open("w")) if log else sys.stderr
        # In a session of its own: Ctrl-C interrupts the measurement, which then stops the server.
        server = subprocess.Popen(
            [*command, *flags, *ports], stdout=output, stderr=output, start_new_session=True, stdin=subprocess.DEVNULL
        )
        stack.callback(_stop, server)
        local = LocalServer(http_url=f"http://127.0.0.1:{http}", grpc_url=f"grpc://127.0.0.1:{grpc}", pid=server.pid)
        _wait_ready(server, local.http_url, log)
        yield local


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait_ready(server: subprocess.Popen[bytes], url: str, log: Path | None) -> None:
    with Client(url, timeout_s=5, max_retries=0) as client:
        while True:
            if server.poll() is not None:
                reason = f": {_last_line(log)}" if log else ""
                raise MeasurementError(f"the server ended with code {server.returncode}{reason}")
            try:
                health = client.health()
            except ClientError:
                time.sleep(0.1)
                continue
            if health.ready:
                return
            failed = [f"{model.name}: {model.reason}" for model in health.not_ready if model.state == "UNAVAILABLE"]
            if failed:
                raise MeasurementError("; ".join(failed))
            time.sleep(0.1)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
