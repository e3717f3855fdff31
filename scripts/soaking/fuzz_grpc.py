"""gRPC requests, built from the descriptors of Triton's own messages: valid ones, nearly valid ones, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from soaking.fuzz_values import DATATYPES, EDGES, damaged, names, requests, shapes
from soaking.models import Arrays, SoakModel
from soaking.senders import to_bytes

_SERVICE = "/inference.GRPCInferenceService/"
_METHODS = {
    "ModelReady": "ModelReadyRequest",
    "ModelMetadata": "ModelMetadataRequest",
    "ModelConfig": "ModelConfigRequest",
    "ModelStatistics": "ModelStatisticsRequest",
    "ServerMetadata": "ServerMetadataRequest",
    "RepositoryIndex": "RepositoryIndexRequest",
    "RepositoryModelLoad": "RepositoryModelLoadRequest",
    "RepositoryModelUnload": "RepositoryModelUnloadRequest",
    "SystemSharedMemoryStatus": "SystemSharedMemoryStatusRequest",
    "SystemSharedMemoryRegister": "SystemSharedMemoryRegisterRequest",
    "SystemSharedMemoryUnregister": "SystemSharedMemoryUnregisterRequest",
    "CudaSharedMemoryRegister": "CudaSharedMemoryRegisterRequest",
    "TraceSetting": "TraceSettingRequest",
    "LogSettings": "LogSettingsRequest",
    "ModelInfer": "ModelInferRequest",
}
"""Methods and their messages. Source: Triton's grpc_service.proto."""
_DEPTH = 3


@dataclass(frozen=True, kw_only=True)
class GrpcCase:
    """One call.

    Attributes:
        kind: Which strategy made it.
        method: Full name of the method.
        body: The serialized message.
        model: What a valid request is for, else None.
        version: Which version a valid request names, or empty.
        feeds: Inputs of a valid request.
    """

    kind: str
    method: str
    body: bytes
    model: SoakModel | None = None
    version: str = ""
    feeds: Arrays = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}: {self.method} {self.body[:500]!r}"


def _infer_request(model: SoakModel, version: str, feeds: Arrays, *, swapped: bool = False) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model.name, model_version=version)
    items = list(feeds.items())
    for name, array in reversed(items) if swapped else items:
        request.inputs.add(name=name, datatype=model.inputs[name][0], shape=array.shape)
        request.raw_input_contents.append(to_bytes(array))
    return request


@st.composite
def valid_calls(draw: st.DrawFn) -> GrpcCase:
    """Requests that must be answered rightly, inputs in any order."""
    model, version, rows, seed = draw(requests())
    feeds = model.feeds(np.random.default_rng(seed), rows)
    request = _infer_request(model, version, feeds, swapped=draw(st.booleans()))
    request.id = draw(st.text(max_size=20))
    return GrpcCase(
        kind="gRPC valid",
        method=f"{_SERVICE}ModelInfer",
        body=request.SerializeToString(),
        model=model,
        version=version,
        feeds=feeds,
    )


@st.composite
def nearly_valid_calls(draw: st.DrawFn) -> GrpcCase:
    """Valid requests of which a few fields were changed."""
    model, version, rows, seed = draw(requests())
    request = _infer_request(model, version, model.feeds(np.random.default_rng(seed), min(rows, 3)))
    for change in draw(st.lists(st.sampled_from(_CHANGES), min_size=1, max_size=3)):
        change(draw, request)
    return GrpcCase(kind="gRPC nearly valid", method=f"{_SERVICE}ModelInfer", body=request.SerializeToString())


def _change_shape(draw: st.DrawFn, request: Any) -> None:
    _tensor(draw, request).shape[:] = [_clipped(size) for size in draw(shapes)]


def _change_one_size(draw: st.DrawFn, request: Any) -> None:
    shape = _tensor(draw, request).shape
    if shape:
        shape[draw(st.integers(0, len(shape) - 1))] = _clipped(draw(st.sampled_from(EDGES)))


def _change_datatype(draw: st.DrawFn, request: Any) -> None:
    _tensor(draw, request).datatype = draw(st.sampled_from(DATATYPES))


def _change_name(draw: st.DrawFn, request: Any) -> None:
    _tensor(draw, request).name = _clean(draw(names))


def _change_model(draw: st.DrawFn, request: Any) -> None:
    request.model_name = _clean(draw(names))
    request.model_version = draw(st.sampled_from(("", "1", "99", "-1", "x", str(2**64))))


def _change_contents(draw: st.DrawFn, request: Any) -> None:
    index = draw(st.integers(0, max(0, len(request.raw_input_contents) - 1)))
    if request.raw_input_contents:
        request.raw_input_contents[index] = draw(damaged(request.raw_input_contents[index]))


def _drop_contents(_: st.DrawFn, request: Any) -> None:
    del request.raw_input_contents[:]


def _add_typed_contents(draw: st.DrawFn, request: Any) -> None:
    contents = draw(messages(service_pb2.InferTensorContents))
    _tensor(draw, request).contents.CopyFrom(contents)


def _add_output(draw: st.DrawFn, request: Any) -> None:
    request.outputs.append(draw(messages(service_pb2.ModelInferRequest.InferRequestedOutputTensor)))


def _add_parameter(draw: st.DrawFn, request: Any) -> None:
    known = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "classification", "priority")
    name = draw(st.sampled_from((*known, "timeout", "sequence_id", "binary_data_output")))
    target = draw(st.sampled_from((request, *request.inputs)))
    target.parameters[name].CopyFrom(draw(messages(service_pb2.InferParameter)))


def _double_input(draw: st.DrawFn, request: Any) -> None:
    request.inputs.append(_tensor(draw, request))


def _remove_input(draw: st.DrawFn, request: Any) -> None:
    if request.inputs:
        del request.inputs[draw(st.integers(0, len(request.inputs) - 1))]


_CHANGES: tuple[Callable[[st.DrawFn, Any], None], ...] = (
    _change_shape, _change_one_size, _change_datatype, _change_name, _change_model, _change_contents, _drop_contents,
    _add_typed_contents, _add_output, _add_parameter, _double_input, _remove_input,
)  # fmt: skip


def _tensor(draw: st.DrawFn, request: Any) -> Any:
    return draw(st.sampled_from(list(request.inputs))) if request.inputs else request.inputs.add()


@st.composite
def any_calls(draw: st.DrawFn) -> GrpcCase:
    """Any method with any message of its type."""
    method = draw(st.sampled_from(sorted(_METHODS)))
    message = draw(messages(getattr(service_pb2, _METHODS[method])))
    return GrpcCase(kind="gRPC any message", method=_SERVICE + method, body=message.SerializeToString())


@st.composite
def damaged_calls(draw: st.DrawFn) -> GrpcCase:
    """Serialized requests with some bytes changed, and bytes that never were one."""
    model, version, _, seed = draw(requests())
    request = _infer_request(model, version, model.feeds(np.random.default_rng(seed), 1))
    body = draw(st.one_of(damaged(request.SerializeToString()), st.binary(max_size=100)))
    return GrpcCase(kind="gRPC damaged", method=_SERVICE + draw(st.sampled_from(sorted(_METHODS))), body=body)


@st.composite
def messages(draw: st.DrawFn, kind: Callable[[], Message], depth: int = 0) -> Any:
    """A message with any of its fields set to values of their types."""
    message = kind()
    for each in message.DESCRIPTOR.fields:
        if draw(st.booleans()):
            _set_field(draw, message, each, depth)
    return message


def _set_field(draw: st.DrawFn, message: Any, descriptor: Any, depth: int) -> None:
    value = getattr(message, descriptor.name)
    if descriptor.message_type is None:
        scalars = _scalars(descriptor)
        if isinstance(value, (int, float, str, bytes)):
            setattr(message, descriptor.name, draw(scalars))
        else:
            value.extend(draw(st.lists(scalars, max_size=4)))
    elif depth < _DEPTH:
        _set_message(draw, value, descriptor, depth)


def _set_message(draw: st.DrawFn, value: Any, descriptor: Any, depth: int) -> None:
    kind = descriptor.message_type
    if kind.GetOptions().map_entry:
        for key in draw(st.lists(_scalars(kind.fields_by_name["key"]), max_size=2)):
            inner = kind.fields_by_name["value"]
            if inner.message_type is None:
                value[key] = draw(_scalars(inner))
            else:
                value[key].CopyFrom(draw(messages(type(value[key]), depth + 1)))
    elif isinstance(value, Message):
        value.CopyFrom(draw(messages(type(value), depth + 1)))
    else:
        for _ in range(draw(st.integers(0, 2))):
            value.add().CopyFrom(draw(messages(_element_type(value), depth + 1)))


def _element_type(repeated: Any) -> Callable[[], Message]:
    kind: type[Message] = type(repeated.add())
    del repeated[-1]
    return kind


def _scalars(descriptor: Any) -> st.SearchStrategy[Any]:
    return st.binary(max_size=64) if descriptor.type == FieldDescriptor.TYPE_BYTES else _SCALARS[descriptor.cpp_type]


def _clean(text: str) -> str:
    """A text that protobuf takes: no surrogates."""
    return text.encode("utf-8", "replace").decode()


def _clipped(size: int) -> int:
    return max(-(2**63), min(2**63 - 1, size))


def _whole(low: int, high: int) -> st.SearchStrategy[int]:
    edges = [edge for edge in EDGES if low <= edge <= high]
    return st.one_of(st.sampled_from(edges), st.integers(0, 10), st.integers(low, high))


_SCALARS: Mapping[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _whole(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: _whole(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: _whole(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: _whole(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.just(0),
    FieldDescriptor.CPPTYPE_STRING: st.one_of(names.map(_clean), st.sampled_from(DATATYPES)),
}
