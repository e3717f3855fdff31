"""Mixed precision: a saved fp32 graph becomes an fp16 or bf16 one, node by node.

The levels are those of NVIDIA Apex's `amp` (O0 to O3). Inputs and outputs keep their types unless asked. A node stays
fp32 when its operator must (control flow, shapes), when it is asked to, or when a weight of it is too large for the
type.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir
from onnx_ir.passes.common import ShapeInferencePass
from onnxscript import version_converter

from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.onnx_file import PRODUCTS

Amp = Literal["O0", "O1", "O2", "O3"]

_STATISTICS = frozenset(
    {
        *("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization"),
        *("LpNormalization", "MeanVarianceNormalization", "RMSNormalization"),
        *("Softmax", "LogSoftmax", "Exp", "Log", "Pow", "Sum", "Mean", "CumSum", "GlobalAveragePool", "AveragePool"),
        *("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"),
        *("ReduceProd", "Sqrt", "Reciprocal"),
    }
)
"""Normalizations, reductions, and what belongs to them: the deny list of O1 and O2."""

_NEVER = frozenset(
    {
        *("If", "Loop", "Scan", "SequenceMap", "NonMaxSuppression", "Range", "RoiAlign", "Resize", "Upsample"),
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast", "CastLike", "ConstantOfShape"),
        *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "EyeLike"),
        *("TopK", "Constant", "Shape", "Size", "NonZero", "Unique"),
    }
)
"""Operators that make types of their own, hold graphs, or take fp32 by definition."""

_DTYPES = {Precision.FP16: onnx_ir.DataType.FLOAT16, Precision.BF16: onnx_ir.DataType.BFLOAT16}
_LARGEST = {Precision.FP16: 65504.0, Precision.BF16: 3.3895314e38}
_BF16_OPSET = 22
"""The first in which convolutions and poolings take bf16."""


@dataclass(frozen=True)
class LowerPrecision:
    """Lowers the nodes that a level allows.

    Attributes:
        target: Precision of the lowered nodes, fp16 or bf16.
        amp: O0 nothing; O1 products only; O2 all but normalizations and reductions; O3 all that can be.
        keep: Patterns (`*`, `?`) of names or operator types of nodes that stay fp32.
        keep_nodes: Names of further nodes that stay fp32.
        edges: Whether the graph's inputs and outputs take the type, too.
    """

    target: Precision
    amp: Amp = "O2"
    keep: tuple[str, ...] = ()
    keep_nodes: Collection[str] = field(default_factory=frozenset)
    edges: bool = False
    name: str = "lower-precision"
    summary: str = "convolutions and products in fp16 or bf16"

    def requires(self, model: onnx_ir.Model) -> str:
        """A node that may be lowered."""
        return "" if self.candidates(model) else "nothing may be lowered"

    def candidates(self, model: onnx_ir.Model) -> list[str]:
        """Names of the nodes that the level lowers, in the graph's order."""
        name_nodes(model)
        return [str(node.name) for node in model.graph if self._lowers(node)]

    def __call__(self, model: onnx_ir.Model) -> None:
        """Retypes nodes and weights, and puts casts where the types meet."""
        if self.target is Precision.BF16 and (model.opset_imports.get("") or 0) < _BF16_OPSET:
            version_converter.convert_version(model, _BF16_OPSET, fallback=True)
        ShapeInferencePass()(model)
        name_nodes(model)
        chosen = {id(node) for node in model.graph if self._lowers(node)}
        casts = _Casts(model, self.target)
        if self.edges:
            casts.lower_inputs()
        for node in list(model.graph):
            if id(node) in chosen:
                casts.lower(node)
            else:
                casts.raise_inputs(node)
        casts.retype_outputs(casts.low if self.edges else onnx_ir.DataType.FLOAT)

    def ensures(self, model: onnx_ir.Model) -> str:
        """Says how many products run in the type; none is a failure of the request, not a detail."""
        lowered, total = lowered_products(model, self.target)
        return f"{lowered}/{total} products in {self.target}"

    def _lowers(self, node: onnx_ir.Node) -> bool:
        if self.amp == "O0" or node.op_type in _NEVER or node.domain not in ("", "ai.onnx"):
            return False
        if self.amp == "O1" and node.op_type not in PRODUCTS:
            return False
        if self.amp == "O2" and node.op_type in _STATISTICS:
            return False
        if node.name in self.keep_nodes or any(_fits(node, pattern) for pattern in self.keep):
            return False
        computes = any(value is not None and value.dtype == onnx_ir.DataType.FLOAT for value in node.inputs)
        return computes and not any(self._too_large(value) for value in node.inputs)

    def _too_large(self, value: onnx_ir.Value | None) -> bool:
        tensor = value.const_value if value is not None else None
        if tensor is None or tensor.dtype != onnx_ir.DataType.FLOAT or not tensor.size:
            return False
        return float(np.abs(tensor.numpy()).max()) > _LARGEST[self.target]


def lowered_products(model: onnx_ir.Model, target: Precision) -> tuple[int, int]:
    """How many convolutions and matrix products take a type, and how many there are."""
    products = [node for node in model.graph if node.op_type in PRODUCTS]
    lowered = [node for node in products if node.inputs[0] is not None and node.inputs[0].dtype == _DTYPES[target]]
    return len(lowered), len(products)


def name_nodes(model: onnx_ir.Model) -> None:
    """Gives nodes without a name one, so that they can be kept by it."""
    taken = {node.name for node in model.graph}
    for number, node in enumerate(model.graph):
        if not node.name:
            name = f"{node.op_type}_{number}"
            node.name = name if name not in taken else f"{name}_{id(node)}"


def emulate(model: onnx_ir.Model, target: Precision) -> None:
    """Lets a lowered graph run where only fp32 kernels exist: values are kept in the type, sums are done in fp32.

    That is what processors with units for the type do, too. ONNX Runtime on a CPU has no bf16 kernels, and computes
    fp16 in fp32 without rounding what passes from one node to the next: overflow would go unseen.
    """
    casts = _Casts(model, target)
    for node in list(model.graph):
        if node.op_type == "Cast":
            continue
        was_low = [value.dtype == _DTYPES[target] for value in node.outputs]
        casts.raise_inputs(node)
        for value, low in zip(node.outputs, was_low, strict=True):
            if low:
                casts.round_output(node, value)


class _Casts:
    """Casts between fp32 and a lower type, each made once."""

    def __init__(self, model: onnx_ir.Model, target: Precision) -> None:
        self._graph = model.graph
        self._target = target
        self.low = _DTYPES[target]
        self._made: dict[tuple[int, onnx_ir.DataType], onnx_ir.Value] = {}

    def lower_inputs(self) -> None:
        """Gives the graph low inputs."""
        for value in self._graph.inputs:
            if value.dtype == onnx_ir.DataType.FLOAT:
                value.dtype = self.low

    def lower(self, node: onnx_ir.Node) -> None:
        """Gives a node low inputs and low outputs."""
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == onnx_ir.DataType.FLOAT:
                node.replace_input_with(index, self._as(value, self.low))
        for value in node.outputs:
            if value.dtype in (onnx_ir.DataType.FLOAT, None):
                value.dtype = self.low

    def raise_inputs(self, node: onnx_ir.Node) -> None:
        """Gives a node (and the graphs inside it) fp32 where it would read the low type."""
        for inner in _with_inner(node):
            for index, value in enumerate(inner.inputs):
                if value is not None and value.dtype == self.low and self._is_outer(value):
                    inner.replace_input_with(index, self._as(value, onnx_ir.DataType.FLOAT))

    def retype_outputs(self, dtype: onnx_ir.DataType) -> None:
        """Gives the graph's floating-point outputs a type; they keep their names."""
        for position, value in enumerate(list(self._graph.outputs)):
            if value.dtype in (self.low, onnx_ir.DataType.FLOAT) and value.dtype != dtype:
                name = value.name
                value.name = f"{name}_before"
                result = self._cast(value, dtype)
                result.name = name
                self._graph.outputs[position] = result

    def round_output(self, node: onnx_ir.Node, value: onnx_ir.Value) -> None:
        """Lets a node answer fp32, and rounds its answer for everybody who reads it."""
        value.dtype = onnx_ir.DataType.FLOAT
        uses = list(value.uses())
        rounded = onnx_ir.node("Cast", [value], {"to": self.low})
        rounded.outputs[0].name, rounded.outputs[0].shape = f"{value.name}_rounded", value.shape
        rounded.outputs[0].dtype = self.low
        self._graph.insert_after(node, rounded)
        for user, index in uses:
            user.replace_input_with(index, rounded.outputs[0])
        for position, output in enumerate(self._graph.outputs):
            if output is value:
                rounded.outputs[0].name, value.name = value.name, f"{value.name}_exact"
                self._graph.outputs[position] = rounded.outputs[0]

    def _is_outer(self, value: onnx_ir.Value) -> bool:
        producer = value.producer()
        return value.is_initializer() or producer is None or producer.graph is self._graph

    def _as(self, value: onnx_ir.Value, dtype: onnx_ir.DataType) -> onnx_ir.Value:
        key = (id(value), dtype)
        if key not in self._made:
            weight = value.const_value if value.is_initializer() else None
            self._made[key] = self._cast(value, dtype) if weight is None else self._weight(value, weight, dtype)
        return self._made[key]

    def _weight(self, value: onnx_ir.Value, tensor: onnx_ir.TensorProtocol, dtype: onnx_ir.DataType) -> onnx_ir.Value:
        numpy_dtype = np.dtype(np.float32) if dtype == onnx_ir.DataType.FLOAT else self._target.numpy
        array = tensor.numpy().astype(numpy_dtype)
        name = f"{value.name}_{dtype.name.lower()}"
        weight = onnx_ir.Value(
            name=name,
            shape=value.shape,
            type=onnx_ir.TensorType(dtype),
            const_value=onnx_ir.Tensor(array, dtype=dtype, name=name),
        )
        self._graph.register_initializer(weight)
        return weight

    def _cast(self, value: onnx_ir.Value, dtype: onnx_ir.DataType) -> onnx_ir.Value:
        node = onnx_ir.node("Cast", [value], {"to": dtype})
        result = node.outputs[0]
        result.name, result.shape, result.dtype = f"{value.name}_{dtype.name.lower()}", value.shape, dtype
        producer = value.producer()
        if producer is None:
            self._graph.insert_before(self._graph[0], node)
        else:
            self._graph.insert_after(producer, node)
        return result


def _with_inner(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    yield node
    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from _with_inner(inner)


def _fits(node: onnx_ir.Node, pattern: str) -> bool:
    return fnmatch.fnmatchcase(str(node.name), pattern) or fnmatch.fnmatchcase(node.op_type, pattern)
