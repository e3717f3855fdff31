"""Run `graphkiln serve` for the soak: repeated starts on the same ports, access, readiness."""

from __future__ import annotations

import http.client
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import psutil
import trustme

from graphkiln.story.server import free_ports
from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError
from graphkiln_backend.server.edge import find_haproxy
from graphkiln_backend.system.admin_key import HTTP_HEADER
from graphkiln_backend.system.processes import end_with_parent, start
from graphkiln_client import Client
from graphkiln_client.transports.endpoint import Security
from soaking.models import MODELS, difference

# Connections to a service: plain, or with mutual TLS on both ports.

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Certificates:
    """PEM files of an authority, a server and a client."""

    folder: Path

    @property
    def authority(self) -> Path:
        """Certificate of the authority."""
        return self.folder / "ca.pem"

    def of(self, who: str) -> tuple[Path, Path]:
        """Certificate and key of `server`, `expired` or `client`."""
        return self.folder / f"{who}.pem", self.folder / f"{who}.key"

    @classmethod
    def issue(cls, folder: Path) -> Certificates:
        """Issue new certificates."""
        folder.mkdir(mode=0o700)
        certificates = cls(folder)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(certificates.authority))
        yesterday = datetime.now(UTC) - timedelta(days=1)
        pairs = {
            "server": authority.issue_cert(_HOST),
            "expired": authority.issue_cert(_HOST, not_after=yesterday),
            "client": authority.issue_cert("soak@localhost"),
        }
        for who, pair in pairs.items():
            certificate, key = certificates.of(who)
            pair.cert_chain_pems[0].write_to_path(str(certificate))
            pair.private_key_pem.write_to_path(str(key))
        return certificates

    @contextmanager
    def expired(self) -> Iterator[None]:
        """Replace the server's certificate by an expired one."""
        valid = [path.read_bytes() for path in self.of("server")]
        expired = [path.read_bytes() for path in self.of("expired")]
        try:
            for path, content in zip(self.of("server"), expired, strict=True):
                path.write_bytes(content)
            yield
        finally:
            for path, content in zip(self.of("server"), valid, strict=True):
                path.write_bytes(content)

    def flags(self) -> tuple[str, ...]:
        """Flags of `graphkiln serve`."""
        certificate, key = self.of("server")
        return (f"--tls-cert={certificate}", f"--tls-key={key}", f"--tls-client-ca={self.authority}")

    @cached_property
    def context(self) -> ssl.SSLContext:
        """SSL context of a client."""
        context = ssl.create_default_context(cafile=self.authority)
        context.load_cert_chain(*self.of("client"))
        return context


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Access to a service.

    Attributes:
        http_port: HTTP port.
        grpc_port: gRPC port.
        certificates: For mutual TLS; None for plain connections.
    """

    http_port: int
    grpc_port: int
    certificates: Certificates | None = None

    @property
    def http_url(self) -> str:
        """HTTP address."""
        return f"http{'s' if self.certificates else ''}://{_HOST}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """GRPC address."""
        return f"grpc{'s' if self.certificates else ''}://{_HOST}:{self.grpc_port}"

    @property
    def security(self) -> Security:
        """TLS arguments of graphkiln's clients."""
        if self.certificates is None:
            return {}
        certificate, key = self.certificates.of("client")
        return {"ca_file": self.certificates.authority, "client_cert": certificate, "client_key": key}

    def connect_http(self, timeout_s: float) -> http.client.HTTPConnection:
        """Make an HTTP connection, opened by its first request."""
        if self.certificates is None:
            return http.client.HTTPConnection(_HOST, self.http_port, timeout=timeout_s)
        context = self.certificates.context
        return http.client.HTTPSConnection(_HOST, self.http_port, timeout=timeout_s, context=context)

    def open_http(self, timeout_s: float) -> socket.socket:
        """Open a socket to the HTTP port, for arbitrary bytes."""
        bare = socket.create_connection((_HOST, self.http_port), timeout=timeout_s)
        if self.certificates is None:
            return bare
        return self.certificates.context.wrap_socket(bare, server_hostname=_HOST)

    def triton_grpc(self) -> Mapping[str, Any]:
        """Arguments of Triton's gRPC client."""
        address = {"url": f"{_HOST}:{self.grpc_port}"}
        if self.certificates is None:
            return address
        certificate, key = map(str, self.certificates.of("client"))
        files = {"root_certificates": str(self.certificates.authority), "private_key": key}
        return {**address, "ssl": True, **files, "certificate_chain": certificate}

    def triton_http(self) -> Mapping[str, Any]:
        """Arguments of Triton's HTTP client."""
        address = {"url": f"{_HOST}:{self.http_port}"}
        if self.certificates is None:
            return address
        context = self.certificates.context
        return {**address, "ssl": True, "ssl_context_factory": lambda: context}


MARKER = "GRAPHKILN_SOAK"  # environment variable by which the guard finds the processes of a soak
START_LIMIT_S = 120.0
_STOP_LIMIT_S = 60.0
_LOAD_LIMIT_S = 60.0
# Requests can make Triton (24.10) use all of it.
_SERVER_MEMORY = "4G"
_STUB = "triton_python_backend_stub"
_RESTARTS = re.compile(r'^graphkiln_restarts_total\{[^}]*cause="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)


class Service:
    """A served model store.

    Args:
        folder: Folder for its log, temporary files and cache.
        store: The model store.
        flags: Further flags of `graphkiln serve`.
        certificates: Certificates for mutual TLS on both ports.
        environment: Further environment variables.
    """

    def __init__(
        self,
        folder: Path,
        store: Path,
        *flags: str,
        certificates: Certificates | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        http_port, grpc_port, self.metrics_port = free_ports(3)
        self.reach = Reach(http_port=http_port, grpc_port=grpc_port, certificates=certificates)
        self._store = store
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.log_path = folder / "serve.log"
        self.admin_key = secrets.token_hex(32)
        key_file = folder / "admin.key"
        key_file.touch(mode=0o600)
        key_file.write_text(self.admin_key)
        self.starts = 0
        options = (
            f"--http-port={http_port}",
            f"--grpc-port={grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--admin-key-file={key_file}",
            f"--server-memory={_SERVER_MEMORY}",
            f"--edge={'on' if find_haproxy() else 'auto'}",
            *(certificates.flags() if certificates else ()),
        )
        self._command = [sys.executable, "-m", "graphkiln.cli", "serve", "--model-store", str(store), *options, *flags]
        self._environment = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        # State files of the server stay in the soak's folder, too.
        self._environment |= {MARKER: str(folder), "XDG_STATE_HOME": str(folder / "state"), **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def admin_headers(self) -> dict[str, str]:
        """Header with the admin key."""
        return {HTTP_HEADER: self.admin_key}

    def start(self) -> None:
        """Start the supervisor."""
        with self.log_path.open("ab") as log:
            self.process = start(
                self._command,
                log=log,
                cwd=self.temporary.parent,  # so that no request of the fuzzer leaves a file in the working folder
                env=self._environment,
                preexec_fn=end_with_parent,
            )
        self.starts += 1

    def is_running(self) -> bool:
        """Return true if the supervisor is running."""
        return self.process is not None and self.process.poll() is None

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> float:
        """Wait until the service is ready; return the seconds.

        Raises:
            MeasurementError: It exited, or is not ready within the limit.
        """
        begun = time.monotonic()
        while self.ready_status() != http.HTTPStatus.OK:
            if not self.is_running():
                raise MeasurementError(f"the service ended:\n{self.log_tail()}")
            if time.monotonic() - begun > limit_s:
                raise MeasurementError(f"not ready within {limit_s:.0f} s:\n{self.log_tail()}")
            time.sleep(0.05)
        return time.monotonic() - begun

    def ready_status(self, timeout_s: float = 5.0) -> int | None:
        """HTTP status of readiness; None without an answer."""
        return self.status("/v2/health/ready", timeout_s)

    def status(self, path: str, timeout_s: float = 2.0) -> int | None:
        """HTTP status of a GET; None without an answer."""
        connection = self.reach.connect_http(timeout_s)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def unready_models(self) -> tuple[str, ...]:
        """Models of the store that are not ready."""
        names = sorted(path.name for path in self._store.iterdir())
        return tuple(name for name in names if self.status(f"/v2/models/{name}/ready") != http.HTTPStatus.OK)

    def load(self, model: str) -> str:
        """Load a model; return the error, or an empty text."""
        return self._control(f"{model}/load")

    def unload(self, model: str) -> str:
        """Unload a model; return the error, or an empty text."""
        return self._control(f"{model}/unload")

    def _control(self, path: str) -> str:
        connection = self.reach.connect_http(_LOAD_LIMIT_S)
        try:
            connection.request("POST", f"/v2/repository/models/{path}", b"{}", self.admin_headers)
            response = connection.getresponse()
            content = response.read().decode(errors="replace")
            return "" if response.status == http.HTTPStatus.OK else f"HTTP {response.status}: {content[:300]}"
        finally:
            connection.close()

    def tree(self) -> list[psutil.Process]:
        """The supervisor and its descendants."""
        if self.process is None:
            return []
        with suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(self.process.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        return []

    def servers(self) -> list[psutil.Process]:
        """Processes of tritonserver (one, or none)."""
        return [process for process in self.tree() if _program(process) == "tritonserver"]

    def stubs(self) -> list[psutil.Process]:
        """Processes of instances."""
        return [process for process in self.tree() if _program(process) == _STUB]

    def edges(self) -> list[psutil.Process]:
        """Processes of HAProxy (one, or none)."""
        return [process for process in self.tree() if _program(process) == "haproxy"]

    def restarts(self) -> dict[str, int]:
        """The metric `graphkiln_restarts_total` by cause."""
        try:
            with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as response:
                text = response.read().decode()
        except OSError:
            return {}
        return {cause: int(float(count)) for cause, count in _RESTARTS.findall(text)}

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to the supervisor."""
        if self.process is not None:
            self.process.send_signal(signum)

    def wait_end(self) -> int:
        """Wait for the supervisor's end; return its exit code as a shell reports it."""
        if self.process is None:
            raise RuntimeError("the service was not started")
        code = self.process.wait(_STOP_LIMIT_S)
        return code if code >= 0 else 128 - code

    def stop(self) -> tuple[int, float]:
        """Send SIGTERM; return the exit code and the seconds until the exit."""
        begun = time.monotonic()
        self.signal(signal.SIGTERM)
        return self.wait_end(), time.monotonic() - begun

    def end(self) -> None:
        """Kill all of its processes."""
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process is not None:
            self.process.wait(_STOP_LIMIT_S)

    def append_log(self, path: Path) -> None:
        """Append its log to another file."""
        with path.open("ab") as kept, self.log_path.open("rb") as log:
            shutil.copyfileobj(log, kept)

    def log_tail(self, size: int = 3000) -> str:
        """The end of its log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - size))
            return log.read().decode(errors="replace")


def role_of(process: psutil.Process) -> str:
    """Role of a process: `supervisor`, `tritonserver`, `instance of MODEL/VERSION`, `other`."""
    command = _command(process)
    program = _program(process)
    if program == _STUB:
        return f"instance of {'/'.join(Path(command[1]).parts[-3:-1])}"
    return {"tritonserver": "tritonserver", "haproxy": "edge"}.get(
        program, "supervisor" if "serve" in command else "other"
    )


def _program(process: psutil.Process) -> str:
    """Name of the executed file; empty if the process has just exited."""
    command = _command(process)
    return Path(command[0]).name if command else ""


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# Check that every model answers correctly.

_PROBE_LIMIT_S = 5.0
_PROBE_ROWS = 2


def every_model_answers(service: Service) -> bool:
    """True if the service is ready and each version of the initial store answers correctly over both protocols."""
    if service.ready_status() != http.HTTPStatus.OK:
        return False
    try:
        return all(_answers(service, url) for url in (service.reach.http_url, service.reach.grpc_url))
    except (GraphkilnError, OSError):
        return False


def _answers(service: Service, url: str) -> bool:
    random = np.random.default_rng()
    with Client(url, timeout_s=_PROBE_LIMIT_S, max_retries=0, **service.reach.security) as client:
        for model in MODELS:
            feeds = model.feeds(random, min(_PROBE_ROWS, model.largest_batch))
            for version in model.versions:
                answer = client.model(model.name, str(version)).infer(feeds)
                if difference(model.reference(version, feeds), answer):
                    return False
    return True
