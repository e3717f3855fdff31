"""Outline of an ONNX file: versions, precision and operators that decide who can compute it, read without onnx.

The server decides before each start and after each change of a model, in a process that imports neither onnx nor a
runtime. Fields of the protobuf message are skipped by their lengths, so that weights are not read: a few microseconds
for each node and tensor. The file is not mapped into memory: a user who overwrites it would end the server by SIGBUS.

Source: onnx/onnx.proto (numbers of the fields), "Protocol Buffers: Encoding".
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.files import open_regular, stamp_of
from graphkiln_backend.graph.precision import Precision

_Span = tuple[int, int]  # where the content of a field begins and ends

_MOST_FILES = 256
_MOST_NODE_BYTES = 1 << 16  # larger nodes hold subgraphs or weights
# Numbers of fields.
_IR_VERSION, _GRAPH, _OPSET_IMPORT, _FUNCTIONS = 1, 7, 8, 25  # ModelProto
_DOMAIN, _VERSION = 1, 2  # OperatorSetIdProto
_FUNCTION_NODE = 7  # FunctionProto
_NODE, _INITIALIZER, _OUTPUT = 1, 5, 12  # GraphProto
_ATTRIBUTE = 5  # NodeProto
_SUBGRAPHS = (6, 11)  # AttributeProto
_DIMS, _DATA_TYPE = 1, 2  # TensorProto
_TYPE, _TENSOR_TYPE = 2, 1  # ValueInfoProto, TypeProto
# Encoding of fields.
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}  # wire type -> bytes
_MORE = 0x80
_VARINT_BYTES = 10
# `TensorProto.DataType` of weights.
_PRECISIONS = {1: Precision.FP32, 10: Precision.FP16, 16: Precision.BF16}
_FEW_BITS = frozenset({21, 22, 25, 26})  # UINT4, INT4, UINT2, INT2
# Words in a node. `DequantizeLinear` alone computes with floats, but with `block_size` ONNX Runtime fuses it and a
# product into `MatMulNBits`.
_INTEGER_PRODUCTS = re.compile(rb"QuantizeLinear|QLinear|MatMulInteger|ConvInteger|DynamicQuantize|QGemm|QAttention")
_LOOP = b"\x22\x04Loop"  # field `op_type` of a node
_BLOCKS = re.compile(rb"MatMulNBits|block_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphOutline:
    """Outline of a graph.

    Attributes:
        opset: Version of the domain ai.onnx; 0 if the graph declares none.
        ml_opset: Version of the domain ai.onnx.ml; 0 if the graph declares none.
        ir_version: Version of the file format.
        precision: As `onnx_file.read_precision`.
        quantized: Whether a node, or a name in one, reads like a product of integers.
        blockwise: Whether weights have fewer than 8 bits, or scales for blocks of them.
        loops: Whether a node is a `Loop`, which a request may keep from ending.
        other_outputs: Whether an output is a sequence, a map, or another value than a tensor.
    """

    opset: int = 0
    ml_opset: int = 0
    ir_version: int = 0
    precision: Precision = Precision.FP32
    quantized: bool = False
    blockwise: bool = False
    loops: bool = False
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
        with open_regular(path) as file:
            return _outline(file)
    except (OSError, ValueError, IndexError, RecursionError) as error:
        raise RepositoryError(
            f"{path} is not an ONNX graph: {error}", hint="the file is damaged or cut short: copy it again"
        ) from error


def _outline(file: BinaryIO) -> GraphOutline:
    model = _grouped(file, (0, os.fstat(file.fileno()).st_size))
    if not model[_GRAPH]:
        raise ValueError("it holds no graph")
    graph = _grouped(file, model[_GRAPH][-1][1])
    nodes = [span for _, span in graph[_NODE]]
    nodes += [span for _, function in model[_FUNCTIONS] for _, span in _grouped(file, function)[_FUNCTION_NODE]]
    quantized = blockwise = loops = False
    for text in (text for span in nodes for text in _texts(file, span)):
        quantized = quantized or _INTEGER_PRODUCTS.search(text) is not None
        blockwise = blockwise or _BLOCKS.search(text) is not None
        loops = loops or _LOOP in text
    elements = Counter[int]()
    for data_type, size in (_tensor(file, span) for _, span in graph[_INITIALIZER]):
        elements[data_type] += size
    opsets = dict(_opset(file, span) for _, span in model[_OPSET_IMPORT])
    saved = max(_PRECISIONS, key=elements.__getitem__)
    return GraphOutline(
        opset=max(opsets.get(b"", 0), opsets.get(b"ai.onnx", 0)),
        ml_opset=opsets.get(b"ai.onnx.ml", 0),
        ir_version=model[_IR_VERSION][-1][0] if model[_IR_VERSION] else 0,
        precision=Precision.INT8 if quantized else _PRECISIONS[saved],
        quantized=quantized,
        loops=loops,
        blockwise=blockwise or not _FEW_BITS.isdisjoint(elements),
        other_outputs=not all(_is_tensor(file, span) for _, span in graph[_OUTPUT]),
    )


def _texts(file: BinaryIO, node: _Span) -> Iterator[bytes]:
    """Yield the bytes of a node; of a large node, the bytes of its small fields and of the nodes in its subgraphs."""
    start, end = node
    if end - start <= _MOST_NODE_BYTES:
        file.seek(start)
        yield file.read(end - start)
        return
    for number, _, (first, last) in _fields(file, node):
        if last - first <= _MOST_NODE_BYTES:
            file.seek(first)
            yield file.read(last - first)
        elif number == _ATTRIBUTE:
            subgraphs = [inner for inner_number, _, inner in _fields(file, (first, last)) if inner_number in _SUBGRAPHS]
            for _, span in (field for subgraph in subgraphs for field in _grouped(file, subgraph)[_NODE]):
                yield from _texts(file, span)


def _opset(file: BinaryIO, span: _Span) -> tuple[bytes, int]:
    """Return a domain and its version."""
    domain, version = b"", 0
    for number, value, (start, end) in _fields(file, span):
        if number == _DOMAIN:
            file.seek(start)
            domain = file.read(end - start)
        elif number == _VERSION:
            version = value
    return domain, version


def _tensor(file: BinaryIO, span: _Span) -> tuple[int, int]:
    """Return the data type and the number of elements of a tensor."""
    data_type, size = 0, 1
    for number, value, (start, end) in _fields(file, span):
        if number == _DATA_TYPE:
            data_type = value
        elif number == _DIMS and start == end:
            size *= value
        elif number == _DIMS:
            file.seek(start)
            size *= math.prod(_packed(file.read(end - start)))
    return data_type, size


def _packed(content: bytes) -> Iterator[int]:
    at = 0
    while at < len(content):
        value, at = _varint(content, at)
        yield value


def _is_tensor(file: BinaryIO, span: _Span) -> bool:
    """Return true for an output that is a tensor, or whose type is not given."""
    types = [inner for number, _, inner in _fields(file, span) if number == _TYPE]
    kinds = {number for inner in types for number, *_ in _fields(file, inner)}
    return not kinds or _TENSOR_TYPE in kinds


def _grouped(file: BinaryIO, span: _Span) -> defaultdict[int, list[tuple[int, _Span]]]:
    """Return values and spans of all fields of a message by number, see `_fields`."""
    grouped = defaultdict[int, list[tuple[int, _Span]]](list)
    for number, value, inner in _fields(file, span):
        grouped[number].append((value, inner))
    return grouped


def _fields(file: BinaryIO, span: _Span) -> Iterator[tuple[int, int, _Span]]:
    """Yield the number of each field of a message, its value if it is a number, and the span of its content otherwise.

    Raises:
        ValueError: The bytes are not a message.
        IndexError: The file ends too early.
    """
    at, end = span
    while at < end:
        file.seek(at)
        head = file.read(2 * _VARINT_BYTES)
        tag, used = _varint(head, 0)
        wire = tag & 7
        value = length = 0
        if wire == _VARINT:
            value, used = _varint(head, used)
        elif wire == _BYTES:
            length, used = _varint(head, used)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            raise ValueError("it is not a protobuf message")
        at += used
        if at + length > end:
            raise ValueError("it ends too early")
        yield tag >> 3, value, (at, at + length)
        at += length


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    value = 0
    for index in range(_VARINT_BYTES):
        byte = content[at + index]
        value |= (byte & ~_MORE) << 7 * index
        if not byte & _MORE:
            return value, at + index + 1
    raise ValueError("it is not a protobuf message")
