"""Outline of an ONNX file: versions, precision and operators that decide who can compute it, read without onnx.

The server decides before every start and after every change of a model, in a process that imports neither onnx nor a
runtime. The fields of the protobuf message are skipped by their lengths, so that the weights are not read: about a
microsecond for a node or a tensor.

Source: onnx/onnx.proto (numbers of the fields), "Protocol Buffers: Encoding".
"""

from __future__ import annotations

import math
import mmap
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.files import stamp_of
from graphkiln_backend.graph.precision import Precision

_Span = tuple[int, int]  # where the content of a field begins and ends

_MOST_FILES = 256
# Numbers of fields.
_IR_VERSION, _GRAPH, _OPSET_IMPORT, _FUNCTIONS = 1, 7, 8, 25  # ModelProto
_DOMAIN, _VERSION = 1, 2  # OperatorSetIdProto
_NODE, _INITIALIZER, _OUTPUT = 1, 5, 12  # GraphProto
_DIMS, _DATA_TYPE = 1, 2  # TensorProto
_TYPE, _TENSOR_TYPE = 2, 1  # ValueInfoProto, TypeProto
# Encoding of fields.
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}  # wire type -> bytes
_MORE = 0x80
_VARINT_BITS = 70
# `TensorProto.DataType` of weights.
_PRECISIONS = {1: Precision.FP32, 10: Precision.FP16, 16: Precision.BF16}
_FEW_BITS = frozenset({21, 22, 25, 26})  # UINT4, INT4, UINT2, INT2
# Names in a node. `DequantizeLinear` alone computes with floats; with `block_size`, ONNX Runtime fuses it and a product
# into `MatMulNBits`.
_INTEGER_PRODUCTS = re.compile(rb"QuantizeLinear|QLinear|MatMulInteger|ConvInteger|DynamicQuantize|QGemm|QAttention")
_BLOCKS = re.compile(rb"MatMulNBits|block_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphOutline:
    """Outline of a graph.

    Attributes:
        opset: Version of the domain ai.onnx; 0 if the graph declares none.
        ir_version: Version of the file format.
        precision: As `onnx_file.read_precision`.
        quantized: Whether a node, or a name in one, reads like a product of integers.
        blockwise: Whether weights have fewer than 8 bits or scales for blocks of them.
        other_outputs: Whether an output is a sequence, a map, or another value than a tensor.
    """

    opset: int = 0
    ir_version: int = 0
    precision: Precision = Precision.FP32
    quantized: bool = False
    blockwise: bool = False
    other_outputs: bool = False


def read_outline(path: Path) -> GraphOutline:
    """Read the outline of an ONNX file; it is read again only if the file has changed.

    Raises:
        RepositoryError: The file is missing or damaged.
    """
    return _read(path, stamp_of(path))


@lru_cache(maxsize=_MOST_FILES)
def _read(path: Path, _: tuple[int, ...]) -> GraphOutline:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _outline(content)
    except (OSError, ValueError, IndexError) as error:  # mmap refuses an empty file by a ValueError
        raise RepositoryError(
            f"{path} is not an ONNX graph: {error}", hint="the file is damaged or cut short: copy it again"
        ) from error


def _outline(content: mmap.mmap) -> GraphOutline:
    model = _grouped(content, (0, len(content)))
    if not model[_GRAPH]:
        raise ValueError("it holds no graph")
    graph = _grouped(content, model[_GRAPH][-1][1])
    nodes = [span for _, span in (*graph[_NODE], *model[_FUNCTIONS])]
    data_types = set[int]()
    elements = Counter[Precision]()
    for data_type, size in (_tensor(content, span) for _, span in graph[_INITIALIZER]):
        data_types.add(data_type)
        if precision := _PRECISIONS.get(data_type):
            elements[precision] += size
    quantized = _contain(content, nodes, _INTEGER_PRODUCTS)
    saved = elements.most_common(1)[0][0] if elements else Precision.FP32
    return GraphOutline(
        opset=max((_opset(content, span) for _, span in model[_OPSET_IMPORT]), default=0),
        ir_version=model[_IR_VERSION][-1][0] if model[_IR_VERSION] else 0,
        precision=Precision.INT8 if quantized else saved,
        quantized=quantized,
        blockwise=not data_types.isdisjoint(_FEW_BITS) or _contain(content, nodes, _BLOCKS),
        other_outputs=not all(_is_tensor(content, span) for _, span in graph[_OUTPUT]),
    )


def _contain(content: mmap.mmap, spans: Iterable[_Span], names: re.Pattern[bytes]) -> bool:
    return any(names.search(content, *span) for span in spans)


def _opset(content: mmap.mmap, span: _Span) -> int:
    """Return the version of the domain ai.onnx, 0 for another domain."""
    domain, version = b"", 0
    for number, value, (start, end) in _fields(content, span):
        if number == _DOMAIN:
            domain = content[start:end]
        elif number == _VERSION:
            version = value
    return version if domain in (b"", b"ai.onnx") else 0


def _tensor(content: mmap.mmap, span: _Span) -> tuple[int, int]:
    """Return the data type and the number of elements of a tensor."""
    data_type, size = 0, 1
    for number, value, (at, end) in _fields(content, span):
        if number == _DATA_TYPE:
            data_type = value
        elif number == _DIMS and at == end:
            size *= value
        elif number == _DIMS:
            size *= math.prod(_packed(content, at, end))
    return data_type, size


def _packed(content: mmap.mmap, at: int, end: int) -> Iterator[int]:
    while at < end:
        value, at = _varint(content, at)
        yield value


def _is_tensor(content: mmap.mmap, span: _Span) -> bool:
    """Return true for an output that is a tensor, or whose type is not given."""
    types = [inner for number, _, inner in _fields(content, span) if number == _TYPE]
    kinds = {number for inner in types for number, *_ in _fields(content, inner)}
    return not kinds or _TENSOR_TYPE in kinds


def _grouped(content: mmap.mmap, span: _Span) -> defaultdict[int, list[tuple[int, _Span]]]:
    """Return values and spans of all fields of a message by number, see `_fields`."""
    grouped = defaultdict[int, list[tuple[int, _Span]]](list)
    for number, value, inner in _fields(content, span):
        grouped[number].append((value, inner))
    return grouped


def _fields(content: mmap.mmap, span: _Span) -> Iterator[tuple[int, int, _Span]]:
    """Yield the number of each field of a message, its value if it is a number, and the span of its content otherwise.

    Raises:
        ValueError: The bytes are not a message.
        IndexError: The file ends too early.
    """
    at, end = span
    while at < end:
        tag, at = _varint(content, at)
        wire = tag & 7
        value = length = 0
        if wire == _VARINT:
            value, at = _varint(content, at)
        elif wire == _BYTES:
            length, at = _varint(content, at)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            raise ValueError("it is not a protobuf message")
        if at + length > end:
            raise ValueError("it ends too early")
        yield tag >> 3, value, (at, at + length)
        at += length


def _varint(content: mmap.mmap, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    value = shift = 0
    while shift < _VARINT_BITS:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & _MORE:
            return value, at
        shift += 7
    raise ValueError("it is not a protobuf message")
