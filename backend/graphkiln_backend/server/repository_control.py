"""Triton's model repository extension: list versions, load and unload models.

Loads use gRPC if possible: over HTTP, Triton (24.10) loads in a thread that serves connections, which block all other
connections of that thread until the load is done.
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
# Triton's reason for a deliberately unloaded version; any other reason means a failure.
_UNLOADED = "unloaded"


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionState:
    """A model version in the repository index.

    Attributes:
        model: Model name.
        version: Model version; empty for a model without any loaded version.
        state: Triton's state: `READY`, `LOADING`, `UNAVAILABLE`, ...; `UNLOADED` if it has none.
        reason: Triton's reason for a state other than READY.
    """

    model: str
    version: str
    state: str
    reason: str

    @property
    def failed(self) -> bool:
        """True if its load failed, which makes Triton not ready."""
        return self.state == "UNAVAILABLE" and self.reason != _UNLOADED


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOverride:
    """Configuration and files of a load request, used instead of the model's folder for this load only.

    Attributes:
        config: Configuration in JSON.
        files: Contents by path below the model's folder.
    """

    config: str
    files: Mapping[str, str]


class RepositoryControl(Protocol):
    """Repository control of a running server. Every call may raise OSError, because the server may exit at any time."""

    def index(self) -> list[VersionState]:
        """List every version known to the server."""

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        """Load a model from the repository, or an override; return the error, or an empty text."""

    def unload(self, model: str) -> None:
        """Start to unload all versions of a model."""


@dataclass(frozen=True, slots=True)
class GrpcControl:
    """Repository control over gRPC, without TLS."""

    address: ListenAddress
    metadata: Sequence[tuple[str, str]] = field(default=(), repr=False)

    def index(self) -> list[VersionState]:
        """List every version known to the server."""
        with _errors_as_os_errors():
            response = self._call("RepositoryIndex", _messages().RepositoryIndexRequest(), _TIMEOUT_S)
        return [
            VersionState(model=row.name, version=row.version, state=row.state or "UNLOADED", reason=row.reason)
            for row in response.models
        ]

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        """Load a model from the repository, or an override; return the error, or an empty text."""
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
        """Start to unload all versions of a model."""
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
        address: HTTP address of the server.
        headers: Headers for its restricted endpoints.
        loads: Used for loads if the server serves gRPC, too.
    """

    address: ListenAddress
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    loads: GrpcControl | None = None

    def index(self) -> list[VersionState]:
        """List every version known to the server."""
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
        """Load a model from the repository, or an override; return the error, or an empty text."""
        if self.loads:
            return self.loads.load(model, timeout_s, override)
        return self._change(model, "load", timeout_s, _to_json(override) if override else b"")

    def unload(self, model: str) -> None:
        """Start to unload all versions of a model."""
        if error := self._change(model, "unload", _TIMEOUT_S):
            raise ConnectionError(f"{model} cannot be unloaded: {error}")

    def _change(self, model: str, verb: str, timeout_s: float, request: bytes = b"") -> str:
        status, body = self._post(f"/v2/repository/models/{in_path(model)}/{verb}", timeout_s, request)
        return "" if status == HTTPStatus.OK else _error_text(body) or f"status {status}"

    def _post(self, path: str, timeout_s: float, request: bytes = b"") -> tuple[int, bytes]:
        from http.client import HTTPConnection, HTTPException  # imports ssl, which a start does not need

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
    """Make a gRPC channel to a server without TLS; it connects when it is used."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # child processes run other programs
    import grpc

    host, port = address.local_address
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)])  # the server is on this machine


def ask_whether_live(channel: Any) -> Any:
    """Send a ServerLive request; return the pending call, a future of grpc."""
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
