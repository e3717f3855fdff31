"""What a graph consists of: operators, parameters, arithmetic, precision. Changes nothing."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx_ir
from onnx_ir.passes.common import ShapeInferencePass

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.repository.onnx_file import PRODUCTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Census:
    """A graph in numbers.

    Attributes:
        operators: Number of nodes by operator type, most frequent first.
        parameters: Number of elements of all weights.
        weight_bytes: Bytes of all weights.
        precisions: Number of elements of the weights by element type.
        flops: Floating-point operations of one sample in convolutions and matrix products (a multiply and an add are
            two), with varying dimensions other than the batch as 1; None where a shape is not known.
        opset: Version of ONNX's operators.
        ir_version: Version of the file format.
    """

    operators: dict[str, int]
    parameters: int
    weight_bytes: int
    precisions: dict[str, int]
    flops: int | None
    opset: int
    ir_version: int


def census(graph_path: Path) -> Census:
    """Counts a graph.

    Raises:
        RepositoryError: The file cannot be read.
    """
    try:
        model = onnx_ir.load(graph_path)
        ShapeInferencePass()(model)
    except Exception as error:  # protobuf's and onnx_ir's own errors have no common base
        raise RepositoryError(f"{graph_path} is not an ONNX graph: {error}", hint="the file is damaged") from error
    weights = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    precisions: Counter[str] = Counter()
    for weight in weights:
        precisions[_name(weight.dtype)] += weight.size
    flops = [flops_of(node) for node in model.graph if node.op_type in PRODUCTS]
    operators = Counter(node.op_type if not node.domain else f"{node.domain}.{node.op_type}" for node in model.graph)
    return Census(
        operators=dict(operators.most_common()),
        parameters=sum(weight.size for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights),
        precisions=dict(precisions.most_common()),
        flops=None if None in flops else sum(filter(None, flops)),
        opset=model.opset_imports.get("") or 0,
        ir_version=model.ir_version,
    )


def flops_of(node: onnx_ir.Node) -> int | None:
    """Floating-point operations of a product: elements of the output, times twice what is summed up for each.

    Varying dimensions count as 1; None where a shape is not known.
    """
    output, weight = node.outputs[0].shape, node.inputs[1].shape if node.inputs[1] is not None else None
    first = node.inputs[0].shape if node.inputs[0] is not None else None
    if output is None or weight is None or first is None:
        return None
    elements = _elements(output)
    if node.op_type == "Conv":
        return 2 * elements * _elements(weight, start=1)
    if node.op_type == "ConvTranspose":
        return 2 * _elements(first) * _elements(weight, start=1)
    transposed = node.op_type == "Gemm" and node.attributes.get_int("transA")
    summed = first[0] if transposed else first[-1]
    return 2 * elements * (summed if isinstance(summed, int) else 1)


def _elements(shape: onnx_ir.Shape, start: int = 0) -> int:
    return math.prod(dim if isinstance(dim, int) else 1 for dim in list(shape)[start:])


def _name(dtype: onnx_ir.DataType) -> str:
    try:
        return str(DType.from_onnx(int(dtype)))
    except ManifestError:
        return dtype.name
