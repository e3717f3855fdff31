"""Triton's model repository extension: list the versions that a server knows, load or unload a model.

Loads go over gRPC where they can: over HTTP, Triton (24.10) loads in one of the threads that serve connections, and
every connection of that thread waits until the load is over.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

from graphkiln_backend.graph.text import in_path
from graphkiln_backend.server.flags import ListenAddress

_TIMEOUT_S = 5.0
# Triton's reason for a version that it no longer serves as requested; any other reason means that it failed.
_UNLOADED = "unloaded"


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionState:
    """A model version as the server lists it.

    Attributes:
        model: Model name.
        version: Model version; empty for a model of which no version was ever loaded.
        state: Triton's state: `READY`, `LOADING`, `UNAVAILABLE`, ...; `UNLOADED` where it names none.
        reason: Triton's reason for a state other than READY.
    """

    model: str
    version: str
    state: str
    reason: str

    @property
    def failed(self) -> bool:
        """True if it could not be loaded, for which Triton's readiness is "no"."""
        return self.state == "UNAVAILABLE" and self.reason != _UNLOADED


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOverride:
    """Configuration and files to load in the place of a model's folder, invisible to other loads of the model.

    Attributes:
        config: The configuration, as JSON.
        files: Contents by path below the model's folder.
    """

    config: str
    files: Mapping[str, str]


class RepositoryControl(Protocol):
    """Repository control of a running server. Every call may raise OSError: the server may end at any time."""

    def index(self) -> list[VersionState]:
        """List every version that the server knows."""

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        """Load what the repository holds of a model, or something else; return why that failed, or nothing."""

    def unload(self, model: str) -> None:
        """Unload a model with all its versions; return before that is done."""


@dataclass(frozen=True, slots=True)
class GrpcControl:
    """Repository control over gRPC, without TLS."""

    address: ListenAddress
    metadata: Sequence[tuple[str, str]] = field(default=(), repr=False)

    def index(self) -> list[VersionState]:
        """List every version that the server knows."""
        with _errors_as_os_errors():
            response = self._call("RepositoryIndex", _messages().RepositoryIndexRequest(), _TIMEOUT_S)
        return [
            VersionState(model=row.name, version=row.version, state=row.state or "UNLOADED", reason=row.reason)
            for row in response.models
        ]

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        """Load what the repository holds of a model, or something else; return why that failed, or nothing."""
        import grpc

        request = _messages().RepositoryModelLoadRequest(model_name=model)
        if override:
            request.parameters["config"].string_param = override.config
            for path, text in override.files.items():
                request.parameters[f"file:{path}"].bytes_param = text.encode()
        try:
            self._call("RepositoryModelLoad", request, timeout_s)
        except grpc.RpcError as error:
            if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                raise ConnectionError(f"{model} cannot be loaded: {error.details()}") from error
            return str(error.details())
        return ""

    def unload(self, model: str) -> None:
        """Unload a model with all its versions; return before that is done."""
        with _errors_as_os_errors():
            self._call("RepositoryModelUnload", _messages().RepositoryModelUnloadRequest(model_name=model), _TIMEOUT_S)

    def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        from tritonclient.grpc import service_pb2_grpc

        with open_channel(self.address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return getattr(stub, method)(request, timeout=timeout_s, metadata=self.metadata)


@dataclass(frozen=True, slots=True)
class HttpControl:
    """Repository control over HTTP.

    Args:
        address: Where the server listens.
        headers: Required by its restricted endpoints.
        loads: Over gRPC, where the server serves that, too.
    """

    address: ListenAddress
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    loads: GrpcControl | None = None

    def index(self) -> list[VersionState]:
        """List every version that the server knows."""
        path = "/v2/repository/index"
        status, body = self._post(path, _TIMEOUT_S)
        if status != HTTPStatus.OK:
            raise ConnectionError(f"port {self.address.port} responded with status {status} to {path}")
        return [
            VersionState(
                model=row["name"],
                version=row.get("version", ""),
                state=row.get("state", "UNLOADED"),
                reason=row.get("reason", ""),
            )
            for row in json.loads(body)
        ]

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        """Load what the repository holds of a model, or something else; return why that failed, or nothing."""
        if self.loads:
            return self.loads.load(model, timeout_s, override)
        return self._change(model, "load", timeout_s, _to_json(override) if override else b"")

    def unload(self, model: str) -> None:
        """Unload a model with all its versions; return before that is done."""
        if error := self._change(model, "unload", _TIMEOUT_S):
            raise ConnectionError(f"{model} cannot be unloaded: {error}")

    def _change(self, model: str, verb: str, timeout_s: float, request: bytes = b"") -> str:
        status, body = self._post(f"/v2/repository/models/{in_path(model)}/{verb}", timeout_s, request)
        return "" if status == HTTPStatus.OK else _error_text(body) or f"status {status}"

    def _post(self, path: str, timeout_s: float, request: bytes = b"") -> tuple[int, bytes]:
        from http.client import HTTPConnection, HTTPException  # with ssl, which the start of a server need not wait for

        connection = HTTPConnection(*self.address.local_address, timeout=timeout_s)
        try:
            connection.request("POST", path, request, headers={"Connection": "close", **self.headers})
            response = connection.getresponse()
            return response.status, response.read()
        except HTTPException as error:
            raise ConnectionError(f"port {self.address.port} broke off its response: {error}") from error
        finally:
            connection.close()


def _to_json(override: LoadOverride) -> bytes:
    files = {f"file:{path}": base64.b64encode(text.encode()).decode() for path, text in override.files.items()}
    return json.dumps({"parameters": {"config": override.config, **files}}).encode()


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


def open_channel(address: ListenAddress) -> Any:
    """Make a gRPC channel to a server without TLS, which opens when it is used."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # the supervisor's children are other programs
    import grpc

    host, port = address.local_address
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)])  # it is on this machine


def ask_whether_live(channel: Any) -> Any:
    """Ask over a channel whether a server is live; the call is a future of grpc."""
    from tritonclient.grpc import service_pb2_grpc

    return service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive.future(_messages().ServerLiveRequest())


def _messages() -> Any:
    from tritonclient.grpc import service_pb2

    return service_pb2


@contextmanager
def _errors_as_os_errors() -> Iterator[None]:
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        raise ConnectionError(f"over gRPC: {error.details()}") from error
