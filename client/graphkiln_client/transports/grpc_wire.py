"""KServe v2 over gRPC: what the calls look like and how the answers read, in Triton's own protobufs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from graphkiln_backend.graph.dtypes import AnyArray
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
from graphkiln_client.transports.base import (
    Call,
    InferRequest,
    InferResponse,
    SharedTensor,
    Wanted,
    datatype_of,
    dtype_named,
    from_bytes,
    raw_buffer,
)

_SERVICE = "/inference.GRPCInferenceService/"


@dataclass(kw_only=True, slots=True)
class GrpcMessage:
    """One unary call.

    Attributes:
        method: Its full name.
        request: Serialized.
        answers: From bytes to the answer's message.
        request_id: Of an inference, for its errors.
    """

    method: str
    request: bytes
    answers: Callable[[bytes], Any]
    request_id: str | None = None


class GrpcWire:
    """See `Wire`."""

    def ready(self) -> Call[bool]:
        """See `Wire.ready`."""
        return Call(_message("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse), _read_ready)

    def live(self) -> Call[bool]:
        """See `Wire.live`."""
        return Call(
            _message("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse), lambda answer: bool(answer.live)
        )

    def server_metadata(self) -> Call[dict[str, Any]]:
        """See `Wire.server_metadata`."""
        return Call(_message("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse), _plain)

    def model_metadata(self, model: str, version: str) -> Call[dict[str, Any]]:
        """See `Wire.model_metadata`."""
        request = pb.ModelMetadataRequest(name=model, version=version)
        return Call(_message("ModelMetadata", request, pb.ModelMetadataResponse), _read_metadata)

    def model_config(self, model: str, version: str) -> Call[dict[str, Any]]:
        """See `Wire.model_config`."""
        request = pb.ModelConfigRequest(name=model, version=version)
        return Call(
            _message("ModelConfig", request, pb.ModelConfigResponse), lambda answer: _plain(answer).get("config", {})
        )

    def model_statistics(self, model: str, version: str) -> Call[dict[str, Any]]:
        """See `Wire.model_statistics`."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return Call(
            _message("ModelStatistics", request, pb.ModelStatisticsResponse), lambda answer: _numbers(_plain(answer))
        )

    def repository_index(self) -> Call[list[dict[str, Any]]]:
        """See `Wire.repository_index`."""
        message = _message("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
        return Call(message, lambda answer: list(_plain(answer).get("models", [])))

    def load(self, model: str) -> Call[None]:
        """See `Wire.load`."""
        request = pb.RepositoryModelLoadRequest(model_name=model)
        return Call(_message("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse), _read_nothing)

    def unload(self, model: str) -> Call[None]:
        """See `Wire.unload`."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        return Call(_message("RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse), _read_nothing)

    def register_region(self, name: str, key: str, size_bytes: int) -> Call[None]:
        """See `Wire.register_region`."""
        request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=size_bytes)
        answers = pb.SystemSharedMemoryRegisterResponse
        return Call(_message("SystemSharedMemoryRegister", request, answers), _read_nothing)

    def region_status(self, name: str) -> Call[None]:
        """See `Wire.region_status`."""
        request = pb.SystemSharedMemoryStatusRequest(name=name)
        return Call(_message("SystemSharedMemoryStatus", request, pb.SystemSharedMemoryStatusResponse), _read_nothing)

    def unregister_region(self, name: str) -> Call[None]:
        """See `Wire.unregister_region`."""
        request = pb.SystemSharedMemoryUnregisterRequest(name=name)
        answers = pb.SystemSharedMemoryUnregisterResponse
        return Call(_message("SystemSharedMemoryUnregister", request, answers), _read_nothing)

    def infer(self, request: InferRequest, timeout_s: float, *, binary: bool) -> Call[InferResponse]:
        """See `Wire.infer`. Protocol buffers are binary in any case."""
        del binary
        message = GrpcMessage(
            method=MODEL_INFER,
            request=encode_request(request, timeout_s),
            answers=pb.ModelInferResponse.FromString,
            request_id=request.request_id,
        )
        return Call(message, lambda answer: decode_response(answer, request))


MODEL_INFER = _SERVICE + "ModelInfer"


def parsed(answer: bytes, message: GrpcMessage) -> Any:
    """An answer's protobuf message.

    Raises:
        ProtocolError: It is none.
    """
    try:
        return message.answers(answer)
    except DecodeError as error:
        raise ProtocolError(f"the answer to {message.method} is damaged: {error}") from error


def grpc_error(code: grpc.StatusCode, details: str, request_id: str | None) -> ClientError:
    """One table from gRPC status to the error tree; what only a transport can tell apart stays with it."""
    kind = _BY_STATUS.get(code, ServerError)
    return kind(f"the server answers {code.name}: {details}", status=code.name, body=details, request_id=request_id)


_BY_STATUS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthorized,
    grpc.StatusCode.PERMISSION_DENIED: Unauthorized,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.CANCELLED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: ModelNotReady,
}


def encode_request(request: InferRequest, timeout_s: float | None) -> bytes:
    """A serialized `ModelInferRequest`.

    The tensors are joined to the rest in one copy. As fields of a message they would be copied three times (into bytes,
    into the message, out of it), which costs more than the journey: 0.17 ms of 0.96 ms for 600 kB. What is the same for
    every request of a kind is serialized once.

    Source: Protocol Buffers, "Encoding": a message is its fields in any order, a repeated field is repeated.
    """
    tensors: list[tuple[str, SharedTensor | tuple[str, tuple[int, ...]]]] = []
    parts: list[Any] = [b"", b""]
    for name, array in request.inputs.items():
        if isinstance(array, SharedTensor):
            tensors.append((name, array))
            continue
        tensors.append((name, (datatype_of(name, array), array.shape)))
        raw = raw_buffer(array)
        parts += (_RAW_INPUT_TAG, _varint(len(raw)), raw)
    parts[0] = _kind(request.model, request.version, tuple(tensors), tuple(request.outputs.items()))
    own = pb.ModelInferRequest(id=request.request_id)
    if timeout_s is not None:
        own.parameters["timeout"].int64_param = round(timeout_s * 1e6)
    parts[1] = own.SerializeToString()
    return b"".join(parts)


@functools.lru_cache(maxsize=256)
def _kind(
    model: str,
    version: str,
    tensors: tuple[tuple[str, SharedTensor | tuple[str, tuple[int, ...]]], ...],
    outputs: tuple[tuple[str, Wanted], ...],
) -> bytes:
    """The fields that requests of a kind share: model, tensors by name, type and shape, and outputs wanted."""
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    for name, tensor in tensors:
        if isinstance(tensor, SharedTensor):
            shared = message.inputs.add(name=name, datatype=tensor.datatype.value, shape=tensor.shape)
            _set_place(shared.parameters, tensor)
        else:
            datatype, shape = tensor
            message.inputs.add(name=name, datatype=datatype, shape=shape)
    for name, wanted in outputs:
        output = message.outputs.add(name=name)
        if wanted.classes:
            output.parameters["classification"].int64_param = wanted.classes
        if wanted.place:
            _set_place(output.parameters, wanted.place)
    serialized: bytes = message.SerializeToString()
    return serialized


def _set_place(parameters: Any, place: SharedTensor) -> None:
    parameters["shared_memory_region"].string_param = place.region
    parameters["shared_memory_byte_size"].int64_param = place.size_bytes
    parameters["shared_memory_offset"].int64_param = place.offset


_LENGTH_DELIMITED = 2
_RAW_INPUT_TAG = bytes(
    [pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | _LENGTH_DELIMITED]
)


def _varint(number: int) -> bytes:
    """Base 128, least significant group first; the top bit says that more follow."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def decode_response(message: Any, request: InferRequest) -> InferResponse:
    """Reads the answer to a request: raw, typed or shared-memory tensors.

    Raises:
        ProtocolError: The message is not what the protocol promises.
    """
    if message.id and request.request_id and message.id != request.request_id:
        raise ProtocolError(f"asked with id {request.request_id}, answered with id {message.id[:80]}")
    contents = message.raw_output_contents
    if len(contents) == len(message.outputs) and not any(map(request.places, request.outputs)):
        arrays = {
            output.name: from_bytes(raw, output.datatype, tuple(output.shape))
            for output, raw in zip(message.outputs, contents, strict=True)
        }
        return InferResponse(model=message.model_name, version=message.model_version, outputs=arrays)
    return _decode_mixed(message, request)


def _decode_mixed(message: Any, request: InferRequest) -> InferResponse:
    """Reads an answer whose tensors are not all raw: some in shared memory, or in the message's own numbers."""
    placed = {output.name: tuple(output.shape) for output in message.outputs if request.places(output.name)}
    outputs = [output for output in message.outputs if output.name not in placed]
    contents = list(message.raw_output_contents)
    if not contents:
        arrays = {output.name: _typed(output) for output in outputs}
    else:
        if len(contents) == len(message.outputs):  # Triton leaves an empty place for a tensor in shared memory
            named = zip(message.outputs, contents, strict=True)
            contents = [raw for output, raw in named if output.name not in placed]
        if len(contents) != len(outputs):
            raise ProtocolError(f"the answer has {len(outputs)} outputs and {len(contents)} contents")
        arrays = {
            output.name: from_bytes(raw, output.datatype, tuple(output.shape))
            for output, raw in zip(outputs, contents, strict=True)
        }
    return InferResponse(model=message.model_name, version=message.model_version, outputs=arrays, placed=placed)


_TYPED = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of `InferTensorContents` that holds a datatype. Source: KServe v2, `grpc_predict_v2.proto`."""


def _typed(output: Any) -> AnyArray:
    """A tensor in a message's own numbers, as servers other than Triton send them."""
    dtype = dtype_named(output.datatype)
    try:
        values = list(getattr(output.contents, _TYPED[dtype]))
        return np.array(values, dtype.numpy).reshape(tuple(output.shape))
    except (KeyError, ValueError, OverflowError) as error:
        raise ProtocolError(f"output '{output.name}' is not a {dtype} tensor of {list(output.shape)}") from error


def _read_ready(answer: Any) -> bool:
    return bool(answer.ready)


def _read_nothing(_: Any) -> None:
    return None


def _read_metadata(answer: Any) -> dict[str, Any]:
    document = _plain(answer)
    for tensor in (*document.get("inputs", []), *document.get("outputs", [])):
        tensor["shape"] = [int(size) for size in tensor.get("shape", [])]
    return document


def _message(method: str, request: Any, answers: Any) -> GrpcMessage:
    return GrpcMessage(method=_SERVICE + method, request=request.SerializeToString(), answers=answers.FromString)


def _plain(message: Any) -> dict[str, Any]:
    document: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return document


_COUNTS = {"ns", "count", "batch_size", "last_inference", "inference_count", "execution_count"}


def _numbers(document: Any) -> Any:
    """Statistics with numbers where protobuf's JSON has texts, as Triton's own JSON has them."""
    if isinstance(document, list):
        return [_numbers(item) for item in document]
    if not isinstance(document, dict):
        return document
    return {name: int(value) if name in _COUNTS else _numbers(value) for name, value in document.items()}
