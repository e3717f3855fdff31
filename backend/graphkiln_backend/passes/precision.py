"""Mixed precision: conversion of nodes of an fp32 graph to fp16 or bf16.

The levels O0 to O3 are those of NVIDIA Apex's `amp`. Inputs and outputs keep their types unless `edges` is set. A node
stays fp32 if its operator requires it (control flow, shapes), if the user excludes it, or if one of its weights
overflows the type.
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

# Precision -> the element type of lowered tensors.
LOW_TYPES = {Precision.FP16: onnx_ir.DataType.FLOAT16, Precision.BF16: onnx_ir.DataType.BFLOAT16}
Amp = Literal["O0", "O1", "O2", "O3"]
# Normalizations and reductions: the deny list of O1 and O2.
_STATISTICS = frozenset(
    {
        *("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization"),
        *("LpNormalization", "MeanVarianceNormalization", "RMSNormalization"),
        *("Softmax", "LogSoftmax", "Exp", "Log", "Pow", "Sum", "Mean", "CumSum", "GlobalAveragePool", "AveragePool"),
        *("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"),
        *("ReduceProd", "Sqrt", "Reciprocal"),
    }
)
# Operators that set the output type, have subgraphs, or require fp32.
_NEVER = frozenset(
    {
        *("If", "Loop", "Scan", "SequenceMap", "NonMaxSuppression", "Range", "RoiAlign", "Resize", "Upsample"),
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast", "CastLike", "ConstantOfShape"),
        *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "EyeLike"),
        *("TopK", "Constant", "Shape", "Size", "NonZero", "Unique"),
    }
)
_LARGEST = {Precision.FP16: 65504.0, Precision.BF16: 3.3895314e38}
_BF16_OPSET = 22  # first opset with bf16 convolutions and poolings


class Casts:
    """Inserts casts between fp32 and another type, at most one per value and type.

    Attributes:
        low: The other element type: fp16, bf16 or fp64.
    """

    def __init__(self, model: onnx_ir.Model, low: onnx_ir.DataType, keep: Collection[onnx_ir.Value] = ()) -> None:
        """Prepare a graph; values in `keep` are never cast."""
        self._graph = model.graph
        self._keep = keep
        self.low = low
        self._made: dict[tuple[int, onnx_ir.DataType], onnx_ir.Value] = {}
        self._names = set(_names(model.graph))

    def lower_inputs(self) -> None:
        """Change the graph's fp32 inputs to the lower type."""
        for value in self._graph.inputs:
            if value.dtype == onnx_ir.DataType.FLOAT:
                value.dtype = self.low

    def lower(self, node: onnx_ir.Node) -> None:
        """Change a node's inputs and outputs to the lower type."""
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == onnx_ir.DataType.FLOAT:
                node.replace_input_with(index, self._as(value, self.low))
        for value in node.outputs:
            if value.dtype in (onnx_ir.DataType.FLOAT, None):
                value.dtype = self.low

    def raise_inputs(self, node: onnx_ir.Node) -> None:
        """Cast inputs of the lower type to fp32 for a node and its subgraphs."""
        for inner in _with_inner(node):
            for index, value in enumerate(inner.inputs):
                if value is not None and value.dtype == self.low and self._is_outer(value) and value not in self._keep:
                    inner.replace_input_with(index, self._as(value, onnx_ir.DataType.FLOAT))

    def retype_outputs(self, dtype: onnx_ir.DataType) -> None:
        """Change the type of the graph's floating-point outputs; they keep their names."""
        for position, value in enumerate(list(self._graph.outputs)):
            is_float = value.dtype in (self.low, onnx_ir.DataType.FLOAT) and value not in self._keep
            if is_float and value.dtype != dtype:
                name = value.name
                value.name = self._free(f"{name}_before")
                result = self._cast(value, dtype)
                result.name = name
                self._graph.outputs[position] = result

    def round_output(self, node: onnx_ir.Node, value: onnx_ir.Value) -> None:
        """Make a node compute in fp32, and round the value for its readers."""
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
        """Return an unused name; a graph that was lowered before already contains casts."""
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
    """Yield the names of all values, including subgraphs."""
    produced = (value for node in graph.all_nodes() for value in node.outputs)
    for value in (*graph.inputs, *graph.initializers.values(), *produced):
        yield str(value.name)


def _with_inner(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    yield node
    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from _with_inner(inner)


@dataclass(frozen=True)
class LowerPrecision(Pass):
    """Lower the nodes that a level allows.

    Attributes:
        target: Precision of the lowered nodes, fp16 or bf16.
        amp: O0: none; O1: products; O2: all except normalizations and reductions; O3: all that support the type.
        keep: Glob patterns of node names or operator types that stay fp32.
        keep_nodes: Names of further nodes that stay fp32.
        edges: Lower the graph's fp32 inputs and outputs, too.
    """

    target: Precision
    amp: Amp = "O2"
    keep: tuple[str, ...] = ()
    keep_nodes: Collection[str] = field(default_factory=frozenset)
    edges: bool = False
    name = "lower-precision"
    summary = "convolutions and products in fp16 or bf16"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph without a node to lower."""
        return "" if self.candidates(model) else "no node can be lowered"

    def candidates(self, model: onnx_ir.Model) -> list[str]:
        """Return the names of the nodes to lower, in graph order."""
        name_nodes(model)
        return [str(node.name) for node in model.graph if self._lowers(node)]

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Change the types of nodes and weights, and insert casts."""
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
        """Report the share of products in the type; zero means that lowering failed."""
        lowered, total = lowered_products(model, self.target)
        return f"{lowered}/{total} products in {self.target}"

    def _edge(self, model: onnx_ir.Model) -> Edge:
        """Return the change to inputs and outputs; call before lowering."""
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
    """Count the convolutions and matrix products in a type, and in total."""
    products = [node for node in model.graph if node.op_type in PRODUCTS]
    lowered = [node for node in products if node.inputs[0] is not None and node.inputs[0].dtype == LOW_TYPES[target]]
    return len(lowered), len(products)


def name_nodes(model: onnx_ir.Model) -> None:
    """Name unnamed nodes, so that users can refer to them."""
    taken = {node.name for node in model.graph}
    for number, node in enumerate(model.graph):
        if not node.name:
            name = f"{node.op_type}_{number}"
            node.name = name if name not in taken else f"{name}_{id(node)}"


def matches(node: onnx_ir.Node, patterns: Iterable[str]) -> bool:
    """Return True if the name or operator type of a node matches a glob pattern."""
    words = (str(node.name), node.op_type)
    return any(fnmatch.fnmatchcase(word, pattern) for pattern in patterns for word in words)


def _values(model: onnx_ir.Model, dtype: onnx_ir.DataType) -> frozenset[onnx_ir.Value]:
    """Return the values of the main graph with an element type."""
    computed = (value for node in model.graph for value in node.outputs)
    given = (*model.graph.inputs, *model.graph.initializers.values())
    return frozenset(value for value in (*given, *computed) if value.dtype == dtype)


def _float_names(values: Sequence[onnx_ir.Value]) -> frozenset[str]:
    return frozenset(str(value.name) for value in values if value.dtype == onnx_ir.DataType.FLOAT)


def _cast(arrays: Arrays, names: Collection[str], dtype: np.dtype[np.generic]) -> dict[str, AnyArray]:
    return {name: array.astype(dtype) if name in names else array for name, array in arrays.items()}
