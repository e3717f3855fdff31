"""Triton's model repository extension over gRPC.

Loads go this way where they can: over HTTP, Triton (24.10) loads in one of the threads that serve connections, and
every connection of that thread waits until the load is over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.repository_control import HttpControl, LoadOverride, VersionState

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class GrpcControl:
    """The extension over gRPC, without TLS.

    Args:
        address: Where the server listens.
        metadata: What its restricted protocols need.
    """

    address: ListenAddress
    metadata: Sequence[tuple[str, str]] = field(default=(), repr=False)

    def index(self) -> list[VersionState]:
        """Every version that the server knows.

        Raises:
            OSError: The server does not list them.
        """
        with _errors_as_os_errors():
            response = self._call("RepositoryIndex", _messages().RepositoryIndexRequest(), _TIMEOUT_S)
        return [
            VersionState(model=row.name, version=row.version, state=row.state or "UNLOADED", reason=row.reason)
            for row in response.models
        ]

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        """Loads what the repository holds of a model, or something else; returns why that failed, or nothing.

        Raises:
            OSError: The server did not respond.
        """
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
        """Unloads a model with all its versions; returns before that is done.

        Raises:
            OSError: The server did not do it.
        """
        with _errors_as_os_errors():
            self._call("RepositoryModelUnload", _messages().RepositoryModelUnloadRequest(model_name=model), _TIMEOUT_S)

    def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        from tritonclient.grpc import service_pb2_grpc

        with open_channel(self.address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return getattr(stub, method)(request, timeout=timeout_s, metadata=self.metadata)


@dataclass(frozen=True, slots=True)
class BothControls:
    """The extension over HTTP, and loads over gRPC."""

    http: HttpControl
    grpc: GrpcControl

    def index(self) -> list[VersionState]:
        """As `HttpControl.index`."""
        return self.http.index()

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        """As `GrpcControl.load`."""
        return self.grpc.load(model, timeout_s, override)

    def unload(self, model: str) -> None:
        """As `HttpControl.unload`."""
        self.http.unload(model)


def open_channel(address: ListenAddress) -> Any:
    """A channel to a server without TLS, which opens when it is used.

    Args:
        address: Where it listens for gRPC.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # the supervisor's children are other programs
    import grpc

    host, port = address.local_address
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)])  # it is on this machine


def ask_whether_live(channel: Any) -> Any:
    """A call that asks whether a server lives, as a future of grpc.

    Args:
        channel: From `open_channel`.
    """
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
