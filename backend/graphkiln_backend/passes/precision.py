"""Mixed precision: a saved fp32 graph becomes an fp16 or bf16 one, node by node.

The levels are those of NVIDIA Apex's `amp` (O0 to O3). Inputs and outputs keep their types unless `edges` is set. A
node stays fp32 when its operator must (control flow, shapes), when the user keeps it, or when one of its weights is too
large for the type.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import onnx_ir
from onnx_ir.passes.common import ShapeInferencePass
from onnxscript import version_converter

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.passes.base import Pass
from graphkiln_backend.passes.edge import Arrays, Edge
from graphkiln_backend.repository.onnx_file import PRODUCTS

# Casts between fp32 and another floating-point type inside a graph, each made once.

# Precision -> the element type of lowered tensors.
LOW_TYPES = {Precision.FP16: onnx_ir.DataType.FLOAT16, Precision.BF16: onnx_ir.DataType.BFLOAT16}


class Casts:
    """Casts between fp32 and another type, each made once.

    Attributes:
        low: The other element type: a lower one, or fp64.
    """

    def __init__(self, model: onnx_ir.Model, low: onnx_ir.DataType, keep: Collection[onnx_ir.Value] = ()) -> None:
        """Keep some values of the lower type as they are."""
        self._graph = model.graph
        self._keep = keep
        self.low = low
        self._made: dict[tuple[int, onnx_ir.DataType], onnx_ir.Value] = {}
        self._names = set(_names(model.graph))

    def lower_inputs(self) -> None:
        """Give the graph's fp32 inputs the lower type."""
        for value in self._graph.inputs:
            if value.dtype == onnx_ir.DataType.FLOAT:
                value.dtype = self.low

    def lower(self, node: onnx_ir.Node) -> None:
        """Give a node inputs and outputs of the lower type."""
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == onnx_ir.DataType.FLOAT:
                node.replace_input_with(index, self._as(value, self.low))
        for value in node.outputs:
            if value.dtype in (onnx_ir.DataType.FLOAT, None):
                value.dtype = self.low

    def raise_inputs(self, node: onnx_ir.Node) -> None:
        """Give a node (and the graphs inside it) fp32 where it would read the low type."""
        for inner in _with_inner(node):
            for index, value in enumerate(inner.inputs):
                if value is not None and value.dtype == self.low and self._is_outer(value) and value not in self._keep:
                    inner.replace_input_with(index, self._as(value, onnx_ir.DataType.FLOAT))

    def retype_outputs(self, dtype: onnx_ir.DataType) -> None:
        """Give the graph's floating-point outputs a type; they keep their names."""
        for position, value in enumerate(list(self._graph.outputs)):
            is_float = value.dtype in (self.low, onnx_ir.DataType.FLOAT) and value not in self._keep
            if is_float and value.dtype != dtype:
                name = value.name
                value.name = self._free(f"{name}_before")
                result = self._cast(value, dtype)
                result.name = name
                self._graph.outputs[position] = result

    def round_output(self, node: onnx_ir.Node, value: onnx_ir.Value) -> None:
        """Let a node compute an fp32 value, and round it for its readers."""
        value.dtype = onnx_ir.DataType.FLOAT
        uses = list(value.uses())
        rounded = onnx_ir.node("Cast", [value], {"to": self.low})
        rounded.outputs[0].name, rounded.outputs[0].shape = self._free(f"{value.name}_rounded"), value.shape
        rounded.outputs[0].dtype = self.low
        self._graph.insert_after(node, rounded)
        for user, index in uses:
            user.replace_input_with(index, rounded.outputs[0])
        for position, output in enumerate(self._graph.outputs):
            if output is value:
                rounded.outputs[0].name, value.name = value.name, self._free(f"{value.name}_exact")
                self._graph.outputs[position] = rounded.outputs[0]

    def _free(self, name: str) -> str:
        """A name that nothing has yet: a graph that was lowered has casts already."""
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

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
        array = tensor.numpy().astype(dtype.numpy())
        name = self._free(f"{value.name}_{dtype.name.lower()}")
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
        result.name = self._free(f"{value.name}_{dtype.name.lower()}")
        result.shape, result.dtype = value.shape, dtype
        producer = value.producer()
        if producer is None:
            self._graph.insert_before(self._graph[0], node)
        else:
            self._graph.insert_after(producer, node)
        return result


def _names(graph: onnx_ir.Graph) -> Iterator[str]:
    """Yield the names of all values, in nested graphs, too."""
    produced = (value for node in graph.all_nodes() for value in node.outputs)
    for value in (*graph.inputs, *graph.initializers.values(), *produced):
        yield str(value.name)


def _with_inner(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    yield node
    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from _with_inner(inner)


Amp = Literal["O0", "O1", "O2", "O3"]

# Normalizations, reductions, and what belongs to them: the deny list of O1 and O2.
_STATISTICS = frozenset(
    {
        *("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization"),
        *("LpNormalization", "MeanVarianceNormalization", "RMSNormalization"),
        *("Softmax", "LogSoftmax", "Exp", "Log", "Pow", "Sum", "Mean", "CumSum", "GlobalAveragePool", "AveragePool"),
        *("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"),
        *("ReduceProd", "Sqrt", "Reciprocal"),
    }
)

# Operators that make types of their own, hold graphs, or take fp32 by definition.
_NEVER = frozenset(
    {
        *("If", "Loop", "Scan", "SequenceMap", "NonMaxSuppression", "Range", "RoiAlign", "Resize", "Upsample"),
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast", "CastLike", "ConstantOfShape"),
        *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "EyeLike"),
        *("TopK", "Constant", "Shape", "Size", "NonZero", "Unique"),
    }
)

_LARGEST = {Precision.FP16: 65504.0, Precision.BF16: 3.3895314e38}
_BF16_OPSET = 22  # the first in which convolutions and poolings take bf16


@dataclass(frozen=True)
class LowerPrecision(Pass):
    """Lower the nodes that a level allows.

    Attributes:
        target: Precision of the lowered nodes, fp16 or bf16.
        amp: O0 nothing; O1 products only; O2 all but normalizations and reductions; O3 all that can be.
        keep: Patterns (`*`, `?`) of names or operator types of nodes that stay fp32.
        keep_nodes: Names of further nodes that stay fp32.
        edges: Whether the graph's fp32 inputs and outputs take the type, too.
    """

    target: Precision
    amp: Amp = "O2"
    keep: tuple[str, ...] = ()
    keep_nodes: Collection[str] = field(default_factory=frozenset)
    edges: bool = False
    name = "lower-precision"
    summary = "convolutions and products in fp16 or bf16"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph without a node that may be lowered."""
        return "" if self.candidates(model) else "nothing may be lowered"

    def candidates(self, model: onnx_ir.Model) -> list[str]:
        """Return the names of the nodes that the level lowers, in the graph's order."""
        name_nodes(model)
        return [str(node.name) for node in model.graph if self._lowers(node)]

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Change the types of nodes and weights, with casts in between."""
        if self.target is Precision.BF16 and (model.opset_imports.get("") or 0) < _BF16_OPSET:
            version_converter.convert_version(model, _BF16_OPSET, fallback=True)
        ShapeInferencePass()(model)
        name_nodes(model)
        chosen = {id(node) for node in model.graph if self._lowers(node)}
        low = LOW_TYPES[self.target]
        casts, edge = Casts(model, low, _values(model, low)), self._edge(model)
        if self.edges:
            casts.lower_inputs()
        for node in list(model.graph):
            if id(node) in chosen:
                casts.lower(node)
            else:
                casts.raise_inputs(node)
        casts.retype_outputs(casts.low if self.edges else onnx_ir.DataType.FLOAT)
        return edge

    def remark(self, model: onnx_ir.Model) -> str:
        """Report the products that run in the type: none means that the request failed."""
        lowered, total = lowered_products(model, self.target)
        return f"{lowered}/{total} products in {self.target}"

    def _edge(self, model: onnx_ir.Model) -> Edge:
        """The change of the graph's inputs and outputs, of a graph that is not lowered yet."""
        if not self.edges:
            return Edge()
        inputs, outputs = _float_names(model.graph.inputs), _float_names(model.graph.outputs)
        low, high = self.target.numpy, np.dtype(np.float32)
        return Edge(
            to_graph_feeds=lambda feeds: _cast(feeds, inputs, low),
            to_source_feeds=lambda feeds: _cast(feeds, inputs, high),
            to_graph_outputs=lambda arrays: _cast(arrays, outputs, low),
            to_graph_preprocess=self._preprocess,
        )

    def _preprocess(self, preprocess: Preprocess) -> Preprocess:
        return replace(preprocess, dtype=self.target.dtype) if preprocess.dtype is DType.FP32 else preprocess

    def _lowers(self, node: onnx_ir.Node) -> bool:
        if self.amp == "O0" or node.op_type in _NEVER or node.domain not in ("", "ai.onnx"):
            return False
        if self.amp == "O1" and node.op_type not in PRODUCTS:
            return False
        if self.amp == "O2" and node.op_type in _STATISTICS:
            return False
        if node.name in self.keep_nodes or matches(node, self.keep):
            return False
        computes = any(value is not None and value.dtype == onnx_ir.DataType.FLOAT for value in node.inputs)
        return computes and not any(self._too_large(value) for value in node.inputs)

    def _too_large(self, value: onnx_ir.Value | None) -> bool:
        tensor = value.const_value if value is not None else None
        if tensor is None or tensor.dtype != onnx_ir.DataType.FLOAT or not tensor.size:
            return False
        return float(np.abs(tensor.numpy()).max()) > _LARGEST[self.target]


def lowered_products(model: onnx_ir.Model, target: Precision) -> tuple[int, int]:
    """Count the convolutions and matrix products that take a type, and all of them."""
    products = [node for node in model.graph if node.op_type in PRODUCTS]
    lowered = [node for node in products if node.inputs[0] is not None and node.inputs[0].dtype == LOW_TYPES[target]]
    return len(lowered), len(products)


def name_nodes(model: onnx_ir.Model) -> None:
    """Give nodes without a name one, so that users can name them."""
    taken = {node.name for node in model.graph}
    for number, node in enumerate(model.graph):
        if not node.name:
            name = f"{node.op_type}_{number}"
            node.name = name if name not in taken else f"{name}_{id(node)}"


def matches(node: onnx_ir.Node, patterns: Iterable[str]) -> bool:
    """Return true where the name or the type of a node matches a pattern (`*`, `?`)."""
    words = (str(node.name), node.op_type)
    return any(fnmatch.fnmatchcase(word, pattern) for pattern in patterns for word in words)


def _values(model: onnx_ir.Model, dtype: onnx_ir.DataType) -> frozenset[onnx_ir.Value]:
    """All values of the main graph that have a type."""
    computed = (value for node in model.graph for value in node.outputs)
    given = (*model.graph.inputs, *model.graph.initializers.values())
    return frozenset(value for value in (*given, *computed) if value.dtype == dtype)


def _float_names(values: Sequence[onnx_ir.Value]) -> frozenset[str]:
    return frozenset(str(value.name) for value in values if value.dtype == onnx_ir.DataType.FLOAT)


def _cast(arrays: Arrays, names: Collection[str], dtype: np.dtype[np.generic]) -> dict[str, AnyArray]:
    return {name: array.astype(dtype) if name in names else array for name, array in arrays.items()}
