"""Reads the signature of an ONNX file without a runtime and without its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.files import GRAPH_LIMIT, UnusableFile, read_bytes
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Dim, Signature, TensorSpec, free_dim
from graphkiln_backend.repository.tensor_outputs import ReplacedOutput, find_replaced, with_tensor_outputs

_PROTOBUF_LIMIT = 1 << 30
"""A message ends at 2 GiB."""
_MOST_DIMENSIONS = 32
"""Of numpy's arrays."""
_QUANTIZED_OPERATORS = {"QuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"}
PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
"""Operators where nearly all of the arithmetic is."""
_PRECISIONS: dict[int, Precision] = {
    onnx.TensorProto.FLOAT: Precision.FP32,
    onnx.TensorProto.FLOAT16: Precision.FP16,
    onnx.TensorProto.BFLOAT16: Precision.BF16,
}


def read_signature(path: Path) -> Signature:
    """Inputs and outputs of a graph, in its own order; inputs with a default in the graph are optional.

    An output that is no tensor is told of as what is served in its place, see `tensor_outputs`.

    Raises:
        RepositoryError: The file is damaged, an input or every output is not a tensor, or weights in another file are
            missing or lie outside the graph's folder.
        ManifestError: An element type cannot be carried by Triton.
    """
    model = _load_model(path)
    with_tensor_outputs(model)
    graph = model.graph
    if not graph.output:
        raise RepositoryError(f"{path} holds no graph", hint="the file is damaged or cut short: copy it again")
    _check_external_data(graph, path)
    initialized = {tensor.name for tensor in graph.initializer}
    return Signature(
        inputs=tuple(_spec(value, path) for value in graph.input if value.name not in initialized),
        outputs=tuple(_spec(value, path) for value in graph.output),
        optional_inputs=tuple(_spec(value, path) for value in graph.input if value.name in initialized),
    )


def read_precision(path: Path) -> Precision:
    """The precision of most of a graph's weights: fp32, fp16, bf16, or int8 where it is quantized.

    Raises:
        RepositoryError: The file is damaged.
    """
    graph = _load(path)
    if any(node.op_type in _QUANTIZED_OPERATORS for node in graph.node):
        return Precision.INT8
    elements: Counter[Precision] = Counter()
    for tensor in graph.initializer:
        if tensor.data_type in _PRECISIONS:
            elements[_PRECISIONS[tensor.data_type]] += math.prod(tensor.dims)
    return elements.most_common(1)[0][0] if elements else Precision.FP32


def count_products(path: Path) -> int:
    """Number of convolutions and matrix products in a graph, without those in its subgraphs.

    Raises:
        RepositoryError: The file is damaged.
    """
    return sum(node.op_type in PRODUCTS for node in _load(path).node)


def read_replaced_outputs(path: Path) -> tuple[ReplacedOutput, ...]:
    """The outputs that are no tensors, and what becomes of them.

    Raises:
        RepositoryError: The file is damaged.
    """
    return find_replaced(_load(path))


def save_with_tensor_outputs(path: Path, target: Path) -> None:
    """Writes a graph whose outputs are tensors, its weights inside or in a file beside it.

    Raises:
        RepositoryError: The file is damaged.
    """
    model = _load_model(path)
    onnx.external_data_helper.load_external_data_for_model(model, str(path.parent))
    with_tensor_outputs(model)
    external = model.ByteSize() > _PROTOBUF_LIMIT
    onnx.save(model, target, save_as_external_data=external, location=f"{target.name}.data" if external else None)


def _load(path: Path) -> onnx.GraphProto:
    return _load_model(path).graph


def _load_model(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load_model_from_string(read_bytes(path, GRAPH_LIMIT))
    except UnusableFile as error:
        raise RepositoryError(f"{path} is not an ONNX graph: {error}") from error
    except (DecodeError, OSError, MemoryError) as error:
        raise RepositoryError(
            f"{path} is not an ONNX graph: {error}", hint="the file is damaged or cut short: copy it again"
        ) from error


def _check_external_data(graph: onnx.GraphProto, path: Path) -> None:
    locations = {
        entry.value
        for tensor in _tensors(graph)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    for location in locations:
        if Path(location).is_absolute() or ".." in Path(location).parts:
            raise RepositoryError(
                f"{path} refers to weights in '{location}', which leads out of the version folder",
                hint="put the weights beside the graph",
            )
        if not (path.parent / location).is_file():
            raise RepositoryError(
                f"{path} refers to weights in '{location}', which is missing", hint=f"copy it into {path.parent}"
            )


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor in a graph: weights, attributes, and those of its subgraphs."""
    graphs = [graph]
    while graphs:
        current = graphs.pop()
        yield from current.initializer
        for sparse in current.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for attribute in (attribute for node in current.node for attribute in node.attribute):
            yield from (attribute.t, *attribute.tensors)
            graphs += [attribute.g, *attribute.graphs] if attribute.HasField("g") else [*attribute.graphs]


def _spec(value: onnx.ValueInfoProto, path: Path) -> TensorSpec:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise RepositoryError(
            f"{path}: '{value.name}' is a {kind or 'value without a type'}, and Triton carries tensors only",
            hint="cut it off the graph, or let the graph make a tensor of it",
        )
    tensor = value.type.tensor_type
    if len(tensor.shape.dim) > _MOST_DIMENSIONS:
        raise RepositoryError(
            f"{path}: '{value.name}' has {len(tensor.shape.dim)} dimensions, and arrays have {_MOST_DIMENSIONS} at most"
        )
    return TensorSpec(
        name=value.name,
        dtype=DType.from_onnx(tensor.elem_type),
        shape=tuple(_dim(dim, value.name, axis) for axis, dim in enumerate(tensor.shape.dim)),
    )


def _dim(dim: onnx.TensorShapeProto.Dimension, tensor: str, axis: int) -> Dim:
    if dim.WhichOneof("value") == "dim_value":
        return dim.dim_value
    return dim.dim_param or free_dim(tensor, axis)
