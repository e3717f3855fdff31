"""Triton's model repository extension: list versions, load and unload models.

Over HTTP if possible, because a start then needs no gRPC library. Loads over gRPC if possible: over HTTP, Triton
(24.10) loads in a thread that serves connections, which blocks all other connections of that thread until it is done.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

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
        files: Contents by path below the model's folder; none to use the files of the repository.
    """

    config: str
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RepositoryControl:
    """Repository control of a running server. Every call may raise OSError: the server may exit at any time.

    Attributes:
        http: HTTP address; None if it is off.
        headers: HTTP headers for restricted endpoints.
        grpc: Address of gRPC without TLS; None if it is off. At least one of the two is on.
        metadata: The same headers for gRPC.
    """

    http: ListenAddress | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    grpc: ListenAddress | None = None
    metadata: Sequence[tuple[str, str]] = field(default=(), repr=False)

    def index(self) -> list[VersionState]:
        """List every version known to the server."""
        if self.http:
            path = "/v2/repository/index"
            status, body = self._send("POST", path, _TIMEOUT_S)
            if status != HTTPStatus.OK:
                raise ConnectionError(f"port {self.http.port} responded with status {status} to {path}")
            try:
                return [_to_state(row) for row in json.loads(body)]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConnectionError(f"port {self.http.port} responded to {path} with no list of models") from error
        with _errors_as_os_errors():
            response = self._call("RepositoryIndex", _messages().RepositoryIndexRequest(), _TIMEOUT_S)
        fields = ("name", "version", "state", "reason")
        return [_to_state({name: text for name in fields if (text := getattr(row, name))}) for row in response.models]

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        """Load a model from the repository, or an override; return the error, or an empty text."""
        files = {f"file:{path}": text.encode() for path, text in override.files.items()} if override else {}
        if not self.grpc:
            parameters = {name: base64.b64encode(content).decode() for name, content in files.items()}
            if override:
                parameters["config"] = override.config
            return self._change(model, "load", timeout_s, parameters)
        import grpc

        request = _messages().RepositoryModelLoadRequest(model_name=model)
        if override:
            request.parameters["config"].string_param = override.config
        for name, content in files.items():
            request.parameters[name].bytes_param = content
        try:
            self._call("RepositoryModelLoad", request, timeout_s)
        except grpc.RpcError as error:
            if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                raise ConnectionError(f"{model} cannot be loaded: {error.details()}") from error
            return str(error.details())
        return ""

    def unload(self, model: str) -> None:
        """Start to unload all versions of a model."""
        if not self.http:
            request = _messages().RepositoryModelUnloadRequest(model_name=model)
            with _errors_as_os_errors():
                self._call("RepositoryModelUnload", request, _TIMEOUT_S)
        elif error := self._change(model, "unload", _TIMEOUT_S, {}):
            raise ConnectionError(f"{model} cannot be unloaded: {error}")

    def read_counters(self, model: str, version: int) -> dict[str, int]:
        """Read what Triton has counted of a version since it was loaded, over HTTP; empty if it does not tell.

        Returns:
            Requests, executions, nanoseconds of each phase, and executions of each batch size: none ever decreases.

        Source: Triton's statistics extension.
        """
        status, body = self._send("GET", f"/v2/models/{in_path(model)}/versions/{version}/stats", _TIMEOUT_S)
        try:
            (row,) = json.loads(body)["model_stats"] if status == HTTPStatus.OK else [{}]
            counters = {name: int(row[name]) for name in ("inference_count", "execution_count") if name in row}
            for phase, sums in row.get("inference_stats", {}).items():
                counters |= {f"{phase} {unit}": int(value) for unit, value in sums.items()}
            for batch in row.get("batch_stats", ()):
                counters[f"batches of {batch['batch_size']}"] = int(batch["compute_infer"]["count"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}
        return counters

    def _change(self, model: str, verb: str, timeout_s: float, parameters: Mapping[str, str]) -> str:
        """Load or unload a model over HTTP; return the error, or an empty text."""
        request = json.dumps({"parameters": parameters}).encode() if parameters else b""
        status, body = self._send("POST", f"/v2/repository/models/{in_path(model)}/{verb}", timeout_s, request)
        if status == HTTPStatus.OK:
            return ""
        try:
            return str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            return f"status {status}"

    def _send(self, method: str, path: str, timeout_s: float, request: bytes = b"") -> tuple[int, bytes]:
        from http.client import HTTPConnection, HTTPException  # imports ssl, which a start does not need

        if self.http is None:
            raise ConnectionError("neither HTTP nor gRPC without TLS is on")
        connection = HTTPConnection(*self.http.local_address, timeout=timeout_s)
        try:
            connection.request(method, path, request, headers={"Connection": "close", **self.headers})
            response = connection.getresponse()
            return response.status, response.read()
        except HTTPException as error:
            raise ConnectionError(f"port {self.http.port} broke off its response: {error}") from error
        finally:
            connection.close()

    def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # child processes run other programs
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        if self.grpc is None:
            raise ConnectionError("neither HTTP nor gRPC without TLS is on")
        host, port = self.grpc.local_address
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # No proxy of the environment: the server is on this machine.
        with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return getattr(stub, method)(request, timeout=timeout_s, metadata=self.metadata)


def _to_state(row: Mapping[str, str]) -> VersionState:
    return VersionState(
        model=row["name"],
        version=row.get("version", ""),
        state=row.get("state", "UNLOADED"),
        reason=row.get("reason", ""),
    )


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
