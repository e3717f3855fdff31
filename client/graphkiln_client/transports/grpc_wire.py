"""KServe v2 over gRPC: its requests and responses, in Triton's own protobufs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from graphkiln_backend.graph.errors import (
    ClientError,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ProtocolError,
    ServerError,
    Unauthorized,
)
from graphkiln_backend.graph.text import without_traceback
from graphkiln_backend.system.admin_key import HOW_TO_GIVE_IT, needs_admin_key
from graphkiln_client.transports.base import Call, InferRequest, InferResponse
from graphkiln_client.transports.failures import WHAT_IS_SERVED
from graphkiln_client.transports.grpc_codec import decode_response, encode_request
from graphkiln_client.transports.limits import DOCUMENT_LIMIT, too_large

_SERVICE = "/inference.GRPCInferenceService/"
_ADMIN_METHODS = ("Repository", "SystemSharedMemory")
_MODEL_INFER = _SERVICE + "ModelInfer"


@dataclass(kw_only=True, slots=True)
class GrpcRequest:
    """One unary call.

    Attributes:
        method: Its full name.
        message: The serialized request message.
        parse: From the bytes of the response to its message.
        request_id: Of an inference, for its errors.
        is_admin: Whether it changes the server, and needs its admin key.
    """

    method: str
    message: bytes
    parse: Callable[[bytes], Any]
    request_id: str | None = None
    is_admin: bool = False


class GrpcWire:
    """See `Wire`."""

    def ready(self) -> Call[bool]:
        """See `Wire.ready`."""
        return Call(_request("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse), _read_ready)

    def live(self) -> Call[bool]:
        """See `Wire.live`."""
        return Call(
            _request("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse), lambda response: bool(response.live)
        )

    def server_metadata(self) -> Call[dict[str, Any]]:
        """See `Wire.server_metadata`."""
        return Call(_request("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse), _to_dict)

    def model_metadata(self, model: str, version: str) -> Call[dict[str, Any]]:
        """See `Wire.model_metadata`."""
        request = pb.ModelMetadataRequest(name=model, version=version)
        return Call(_request("ModelMetadata", request, pb.ModelMetadataResponse), _read_metadata)

    def model_config(self, model: str, version: str) -> Call[dict[str, Any]]:
        """See `Wire.model_config`."""
        request = pb.ModelConfigRequest(name=model, version=version)
        return Call(
            _request("ModelConfig", request, pb.ModelConfigResponse),
            lambda response: _to_dict(response).get("config", {}),
        )

    def model_statistics(self, model: str, version: str) -> Call[dict[str, Any]]:
        """See `Wire.model_statistics`."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return Call(
            _request("ModelStatistics", request, pb.ModelStatisticsResponse),
            lambda response: _parse_counts(_to_dict(response)),
        )

    def repository_index(self) -> Call[list[dict[str, Any]]]:
        """See `Wire.repository_index`."""
        message = _request("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
        return Call(message, lambda response: list(_to_dict(response).get("models", [])))

    def load(self, model: str, config: str = "") -> Call[None]:
        """See `Wire.load`."""
        request = pb.RepositoryModelLoadRequest(model_name=model)
        if config:
            request.parameters["config"].string_param = config
        return Call(_request("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse), _read_nothing)

    def unload(self, model: str) -> Call[None]:
        """See `Wire.unload`."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        return Call(_request("RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse), _read_nothing)

    def register_region(self, name: str, key: str, size_bytes: int) -> Call[None]:
        """See `Wire.register_region`."""
        request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=size_bytes)
        response = pb.SystemSharedMemoryRegisterResponse
        return Call(_request("SystemSharedMemoryRegister", request, response), _read_nothing)

    def region_status(self, name: str) -> Call[None]:
        """See `Wire.region_status`."""
        request = pb.SystemSharedMemoryStatusRequest(name=name)
        return Call(_request("SystemSharedMemoryStatus", request, pb.SystemSharedMemoryStatusResponse), _read_nothing)

    def unregister_region(self, name: str) -> Call[None]:
        """See `Wire.unregister_region`."""
        request = pb.SystemSharedMemoryUnregisterRequest(name=name)
        response = pb.SystemSharedMemoryUnregisterResponse
        return Call(_request("SystemSharedMemoryUnregister", request, response), _read_nothing)

    def infer(self, request: InferRequest, timeout_s: float, *, binary: bool) -> Call[InferResponse]:
        """See `Wire.infer`. Protocol buffers are binary in any case."""
        del binary
        call = GrpcRequest(
            method=_MODEL_INFER,
            message=encode_request(request, timeout_s),
            parse=pb.ModelInferResponse.FromString,
            request_id=request.request_id,
        )
        return Call(call, lambda response: decode_response(response, request))


def parse_response(response: bytes, request: GrpcRequest) -> Any:
    """The message of a response.

    Raises:
        ProtocolError: The bytes are not such a message, or too many.
    """
    if request.request_id is None and len(response) > DOCUMENT_LIMIT:
        raise too_large(DOCUMENT_LIMIT)
    try:
        return request.parse(response)
    except DecodeError as error:
        raise ProtocolError(f"the response to {request.method} is damaged: {error}") from error


def grpc_error(code: grpc.StatusCode, details: str, request_id: str | None) -> ClientError:
    """One table from gRPC status to the error tree; what only a transport can tell apart stays with it."""
    message = f"the server returned {code.name}: {without_traceback(details)}"
    if needs_admin_key(details):
        return Unauthorized(message, status=code.name, body=details, request_id=request_id, hint=HOW_TO_GIVE_IT)
    kind = _BY_STATUS.get(code, ServerError)
    hint = WHAT_IS_SERVED if kind is ModelNotFound else ""
    return kind(message, status=code.name, body=details, request_id=request_id, hint=hint)


_BY_STATUS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthorized,
    grpc.StatusCode.PERMISSION_DENIED: Unauthorized,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.CANCELLED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: ModelNotReady,
}


def _read_ready(response: Any) -> bool:
    return bool(response.ready)


def _read_nothing(_: Any) -> None:
    return None


def _read_metadata(response: Any) -> dict[str, Any]:
    document = _to_dict(response)
    for tensor in (*document.get("inputs", []), *document.get("outputs", [])):
        tensor["shape"] = [int(size) for size in tensor.get("shape", [])]
    return document


def _request(method: str, message: Any, response: Any) -> GrpcRequest:
    return GrpcRequest(
        method=_SERVICE + method,
        message=message.SerializeToString(),
        parse=response.FromString,
        is_admin=method.startswith(_ADMIN_METHODS),
    )


def _to_dict(message: Any) -> dict[str, Any]:
    document: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return document


_COUNTS = {"ns", "count", "batch_size", "last_inference", "inference_count", "execution_count"}


def _parse_counts(document: Any) -> Any:
    """Statistics with numbers where protobuf's JSON has strings, as in Triton's own JSON."""
    if isinstance(document, list):
        return [_parse_counts(item) for item in document]
    if not isinstance(document, dict):
        return document
    return {name: int(value) if name in _COUNTS else _parse_counts(value) for name, value in document.items()}
