"""The metrics port: graphkiln's own metrics beside those of tritonserver.

The supervisor answers on the user's metrics port, tritonserver on a port of the loopback interface. The supervisor adds
the metrics of graphkiln's instances, from their files, and what belongs to none of them: restarts, the version of
tritonserver, rollouts, which versions are proven, and the self-tests of versions that other backends compute. While
tritonserver is away, it answers with these alone.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from http import HTTPStatus

from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.ports import listen
from graphkiln_backend.server.proofs import ProofState
from graphkiln_backend.server.rollouts import RolloutFolder
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.triton.metric_catalog import describe, family_of, kind_of, sample_line

_PATH = "/metrics"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # source: Prometheus, "Exposition formats"
_THREADS = 4  # requests at the same time; others wait in the queue of the socket
_REQUEST_TIMEOUT_S = 2.0  # until a request has arrived
_RESPONSE_TIMEOUT_S = 5.0  # until its response is sent
_TRITON_TIMEOUT_S = 3.0  # less than that of clients
_REQUEST_LIMIT = 1 << 14  # bytes
_PAUSE_S = 0.2  # after a failed `accept`, for example for lack of open files
_INSTANCE = "server"  # label of metrics that instances publish of other versions


class MetricsPort(Closeable):
    """Serve `GET /metrics` until it is closed.

    Args:
        address: Address to listen on.
        triton: Metrics address of tritonserver, running or not.
        version: Version of tritonserver; empty if unknown.
        restarts: Returns the number of restarts by cause.
        rows: Returns the proofs of all versions.
        instances: Returns the lines of the metrics of graphkiln's instances.
        refusals: Returns why versions are refused, by model and version.
        rollouts: Returns the folders of the rollouts of the served stores.

    Raises:
        ServerSetupError: The address is in use, or not of this machine.
    """

    def __init__(
        self,
        address: ListenAddress,
        triton: ListenAddress,
        *,
        version: str,
        restarts: Callable[[], Mapping[str, int]],
        rows: Callable[[], Sequence[ProofState]],
        instances: Callable[[], Iterable[str]] = tuple,
        refusals: Callable[[], Mapping[tuple[str, str], str]] = dict,
        rollouts: Callable[[], Sequence[RolloutFolder]] = tuple,
    ) -> None:
        self._triton = triton
        self._version = version
        self._restarts = restarts
        self._rows = rows
        self._instances = instances
        self._refusals = refusals
        self._rollouts = rollouts
        self._closing = threading.Event()
        self._socket = listen(address)
        for number in range(_THREADS):
            threading.Thread(target=self._run, name=f"graphkiln-metrics-{number}", daemon=True).start()

    def close(self) -> None:
        """Stop listening; the thread of a request in progress ends on its own within the timeouts."""
        self._closing.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait in `accept`
        self._socket.close()

    def text(self) -> str:
        """All metrics, in Prometheus' text format."""
        tritons = self._fetch()
        return _merge(tritons or "", self._own(is_up=tritons is not None))

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._closing.wait(_PAUSE_S)
                continue
            with connection, suppress(OSError):  # the client is gone, or too slow
                connection.sendall(self._respond(_read_request(connection)))
                connection.shutdown(socket.SHUT_WR)

    def _respond(self, request: bytes) -> bytes:
        method, path, *_ = (*request.split(b" ", 2), b"")
        if method != b"GET":
            return _response("405 Method Not Allowed", f"expected GET {_PATH}\n")
        if path.partition(b"?")[0] != _PATH.encode():
            return _response("404 Not Found", f"expected GET {_PATH}\n")
        return _response("200 OK", self.text())

    def _fetch(self) -> str | None:
        """Metrics of tritonserver; None if it is away."""
        from http.client import HTTPConnection, HTTPException  # imports ssl, which a start does not need

        connection = HTTPConnection(*self._triton.local_address, timeout=_TRITON_TIMEOUT_S)
        with closing(connection), suppress(OSError, HTTPException):
            connection.request("GET", _PATH, headers={"Connection": "close"})
            response = connection.getresponse()
            if response.status == HTTPStatus.OK:
                return response.read().decode("utf-8", "replace")
        return None

    def _own(self, *, is_up: bool) -> Iterator[str]:
        """Lines of graphkiln's metrics."""
        for cause, number in self._restarts().items():
            yield sample_line("graphkiln_restarts_total", number, cause=cause)
        if is_up and self._version:
            yield sample_line("graphkiln_triton_info", 1, version=self._version)
        for row in self._rows():
            labels = {"model": row.model, "version": str(row.version)}
            yield sample_line("graphkiln_version_proven", int(row.proven), **labels, backend=row.backend, seat=row.seat)
            if row.seat == "python":  # its instances publish their self-tests
                continue
            for number in range(row.instances if is_up else 0):  # as instances of graphkiln do, for autoscaling
                info = {**labels, "instance": f"{row.model}_0_{number}", "device": row.device, "precision": ""}
                yield sample_line("graphkiln_instance_info", 1, **info, engine=row.backend)
            labels["instance"] = _INSTANCE
            yield sample_line("graphkiln_self_test_error", row.error, **labels)
            yield sample_line("graphkiln_self_test_replays_total", row.replays, **labels)
            yield sample_line("graphkiln_self_test_failures_total", row.failures, **labels)
            yield sample_line("graphkiln_self_test_timestamp_seconds", row.last_right_at, **labels)
        yield from self._instances()
        for (model, version), reason in self._refusals().items():
            yield sample_line("graphkiln_version_refused", 1, model=model, version=version, reason=reason)
        if folders := [folder for folder in self._rollouts() if folder.models()]:
            from graphkiln_backend.server.rollout_metrics import rollout_samples  # needed by rollouts only

            for name, value, keys in rollout_samples(folders):
                yield sample_line(name, value, **keys)


def _read_request(connection: socket.socket) -> bytes:
    """Read the first line and the headers of a request.

    Raises:
        OSError: It is incomplete, too long, or arrives too slowly.
    """
    request, deadline = b"", time.monotonic() + _REQUEST_TIMEOUT_S
    while b"\r\n\r\n" not in request:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))  # 0 would not block
        part = connection.recv(_REQUEST_LIMIT)
        request += part
        if not part or len(request) > _REQUEST_LIMIT:
            raise ConnectionError("the request is incomplete or too long")
    connection.settimeout(_RESPONSE_TIMEOUT_S)  # `sendall` counts it for the whole response
    return request


def _response(status: str, text: str) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def _merge(text: str, lines: Iterator[str]) -> str:
    """Add lines to metrics in text format, in which the lines of one metric follow each other."""
    families: dict[str, str] = {}
    for line in lines:
        name = family_of(line)
        families[name] = families.get(name, "") + line
    heads = (f"# HELP {name} {describe(name)}\n# TYPE {name} {kind_of(name)}\n{own}" for name, own in families.items())
    return text + "".join(heads)
