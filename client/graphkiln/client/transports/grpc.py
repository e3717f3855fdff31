"""KServe v2 over gRPC, on grpcio and Triton's own protobufs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from graphkiln.client.transports.base import InferRequest, InferResponse, from_bytes, raw_buffer
from graphkiln.graph.dtypes import DType
from graphkiln.graph.errors import (
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ProtocolError,
    ServerError,
    Unauthorized,
)

_MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_PROBE_S = 1.0


class GrpcTransport:
    """One HTTP/2 channel to one gRPC endpoint."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address, options=_UNLIMITED)
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._infer = self._channel.unary_unary(
            _MODEL_INFER, request_serializer=encode_request, response_deserializer=pb.ModelInferResponse.FromString
        )

    def ready(self, timeout_s: float) -> bool:
        """See `Transport.ready`."""
        return bool(self._call(self._stub.ServerReady, pb.ServerReadyRequest(), timeout_s).ready)

    def model_metadata(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        """See `Transport.model_metadata`."""
        request = pb.ModelMetadataRequest(name=model, version=version)
        document = _plain(self._call(self._stub.ModelMetadata, request, timeout_s))
        for tensor in (*document.get("inputs", []), *document.get("outputs", [])):
            tensor["shape"] = [int(size) for size in tensor.get("shape", [])]
        return document

    def model_config(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        """See `Transport.model_config`."""
        request = pb.ModelConfigRequest(name=model, version=version)
        config: dict[str, Any] = _plain(self._call(self._stub.ModelConfig, request, timeout_s))["config"]
        return config

    def model_statistics(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        """See `Transport.model_statistics`."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        document: dict[str, Any] = _numbers(_plain(self._call(self._stub.ModelStatistics, request, timeout_s)))
        return document

    def repository_index(self, timeout_s: float) -> list[dict[str, Any]]:
        """See `Transport.repository_index`."""
        answer = self._call(self._stub.RepositoryIndex, pb.RepositoryIndexRequest(), timeout_s)
        return list(_plain(answer).get("models", []))

    def load(self, model: str, timeout_s: float) -> None:
        """See `Transport.load`."""
        self._call(self._stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name=model), timeout_s)

    def unload(self, model: str, timeout_s: float) -> None:
        """See `Transport.unload`."""
        self._call(self._stub.RepositoryModelUnload, pb.RepositoryModelUnloadRequest(model_name=model), timeout_s)

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """See `Transport.infer`."""
        return _decode(self._call(self._infer, request, timeout_s))

    def close(self) -> None:
        """See `Transport.close`."""
        self._channel.close()

    def _call(self, method: Callable[..., Any], message: Any, timeout_s: float) -> Any:
        try:
            return method(message, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._error(error, timeout_s, getattr(message, "request_id", None)) from error

    def _answers(self) -> bool:
        """Whether the server is there: gRPC has one status for "nobody answers" and "the server says: not now"."""
        try:
            self._stub.ServerLive(pb.ServerLiveRequest(), timeout=_PROBE_S)
        except grpc.RpcError:
            return False
        return True

    def _error(self, error: Any, timeout_s: float, request_id: str | None) -> ClientError:
        """One table from gRPC status to the error tree."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE and not self._answers():
            return ConnectionFailed(
                f"cannot reach grpc://{self._address}: {details}",
                hint="is the server running? graphkiln health --url URL",
                status=code.name,
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"no answer from grpc://{self._address} within {timeout_s:g} s", status=code.name)
        kind = _BY_STATUS.get(code, ServerError)
        message = f"the server answers {code.name}: {details}"
        return kind(message, status=code.name, body=details, request_id=request_id)


_BY_STATUS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthorized,
    grpc.StatusCode.PERMISSION_DENIED: Unauthorized,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.CANCELLED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: ModelNotReady,
}


def encode_request(request: InferRequest) -> bytes:
    """A serialized `ModelInferRequest`.

    The tensors are joined to the rest in one copy. As fields of a message they would be copied three times (into bytes,
    into the message, out of it), which costs more than the journey: 0.17 ms of 0.96 ms for 600 kB.

    Source: Protocol Buffers, "Encoding": a message is its fields in any order, a repeated field is repeated.
    """
    message = pb.ModelInferRequest(model_name=request.model, model_version=request.version, id=request.request_id)
    parts: list[Any] = [b""]
    for name, array in request.inputs.items():
        message.inputs.add(name=name, datatype=DType.from_numpy(array.dtype).value, shape=array.shape)
        raw = raw_buffer(array)
        parts += (_RAW_INPUT_TAG, _varint(len(raw) if isinstance(raw, bytes) else raw.nbytes), raw)
    for name, count in request.outputs.items():
        output = message.outputs.add(name=name)
        if count:
            output.parameters["classification"].int64_param = count
    parts[0] = message.SerializeToString()
    return b"".join(parts)


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


def _decode(message: Any) -> InferResponse:
    if len(message.outputs) != len(message.raw_output_contents):
        raise ProtocolError(
            f"the answer has {len(message.outputs)} outputs and {len(message.raw_output_contents)} contents"
        )
    return InferResponse(
        model=message.model_name,
        version=message.model_version,
        outputs={
            output.name: from_bytes(raw, output.datatype, tuple(output.shape))
            for output, raw in zip(message.outputs, message.raw_output_contents, strict=True)
        },
    )


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
