"""Constant folding by ONNX Runtime, which serves the graph.

ONNX's reference implementation differs from it: casts to text and to 4-bit types, rounding in Resize of integers, the
mean of no elements. A node that ONNX Runtime cannot compute alone stays in the graph.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass

import onnx
import onnx_ir
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass
from onnxscript import optimizer

from graphkiln_backend.engines.onnxruntime.constants import compute_node
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.passes.base import Pass
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.repository.training_mode import DRAWING

_log = logging.getLogger("graphkiln.passes")

_MOST_ELEMENTS = 2**20
_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
# Left for the runtime: random numbers, large constants from few numbers, and products of integers, which ONNX Runtime
# computes exactly on some CPUs only (see `engines.onnxruntime.exact_products`).
_LEFT = DRAWING | {
    *("Constant", "ConstantOfShape", "Dropout", "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"),
    *("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"),
}
_GRAPHS = (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS)


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Fold constant nodes, and lift Constant nodes to initializers, which other passes match.

    Attributes:
        fills: Fold ConstantOfShape, too, which makes large constants from few numbers.
    """

    fills: bool = False
    name = "fold-constants"
    summary = "compute what no input changes"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Fold all results of at most 2^20 elements; larger ones would bloat the file."""
        InlinePass()(model)
        left = _LEFT - {"ConstantOfShape"} if self.fills else _LEFT
        _fold_sizes(model)
        while _fold(model, left):  # a result may be the condition of a branch, or a shape
            _fold_sizes(model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        return Edge()

    def remark(self, model: onnx_ir.Model) -> str:
        """Report the Constant nodes that stay in the main graph."""
        left = sum(node.op_type == "Constant" for node in model.graph)
        return f"{left} constants left" if left else ""


def _fold_sizes(model: onnx_ir.Model) -> None:
    """Replace known sizes by constants and inline branches of known conditions, in place; nothing is computed."""
    optimizer.fold_constants(model, onnx_shape_inference=True, should_fold=lambda _: False)


def _fold(model: onnx_ir.Model, left: Collection[str]) -> bool:
    """Replace constant nodes by their results, in place; return False if there was none."""
    like = onnx.ModelProto(ir_version=model.ir_version)
    like.opset_import.extend(
        onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()
    )
    folded = False
    for graph in model.graphs():
        for node in list(graph):  # a result may make a later node constant
            if node.op_type in left or not _is_constant(node) or (results := _compute(node, like)) is None:
                continue
            for value, result in zip(node.outputs, results, strict=True):
                name, value.name = value.name, None
                constant = onnx_ir.Value(
                    name=name,
                    shape=onnx_ir.Shape(result.shape.numpy()),
                    type=onnx_ir.TensorType(result.dtype),
                    const_value=result,
                )
                value.replace_all_uses_with(constant)
                graph.register_initializer(constant)
            graph.remove(node, safe=True)
            folded = True
    return folded


def _is_constant(node: onnx_ir.Node) -> bool:
    """Return True for a node of few constants whose results are not outputs of a graph."""
    if node.domain not in _DOMAINS or any(value.is_graph_output() for value in node.outputs):
        return False
    if any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
        return False
    given = [value for value in node.inputs if value is not None]
    if any(value.const_value is None or value.is_graph_input() for value in given):
        return False
    if node.op_type == "Transpose":  # takes no more space, if nothing else reads the weight
        return _elements(given[0]) <= _MOST_ELEMENTS or len(given[0].uses()) == 1
    return all(_elements(value) <= _MOST_ELEMENTS for value in (*given, *node.outputs))


def _elements(value: onnx_ir.Value) -> int:
    """Return the known number of elements of a value, or 0."""
    dims = value.shape.dims if value.shape is not None else ()
    return math.prod(dim if isinstance(dim, int) else 0 for dim in dims)


def _compute(node: onnx_ir.Node, like: onnx.ModelProto) -> list[onnx_ir.TensorProtocol] | None:
    """Compute a node of constants; return None if ONNX Runtime refuses it, or the results take much more space."""
    weights = {
        value.name: value.const_value for value in node.inputs if value is not None and value.const_value is not None
    }
    protos = [onnx_ir.to_proto(tensor) for tensor in weights.values()]
    for proto, name in zip(protos, weights, strict=True):
        proto.name = str(name)
    try:
        arrays = compute_node(onnx_ir.to_proto(node), protos, like)
    except LoweringError as error:
        _log.debug("not folded: %s", error)
        return None
    results = [_tensor(array, str(value.name)) for array, value in zip(arrays, node.outputs, strict=True)]
    added = sum(tensor.size for tensor in results) - sum(
        tensor.size for tensor in weights.values() if tensor is not None
    )
    return results if added <= _MOST_ELEMENTS else None


def _tensor(array: AnyArray, name: str) -> onnx_ir.TensorProtocol:
    if array.dtype == object:
        words = [str(word).encode() for word in array.flat]
        return onnx_ir.StringTensor(words, shape=onnx_ir.Shape(array.shape), name=name)
    return onnx_ir.tensor(array, name=name)
