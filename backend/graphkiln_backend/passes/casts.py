"""Casts between fp32 and another floating-point type inside a graph, each made once."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir

from graphkiln_backend.graph.precision import Precision

LOW_TYPES = {Precision.FP16: onnx_ir.DataType.FLOAT16, Precision.BF16: onnx_ir.DataType.BFLOAT16}
"""Precision -> the element type of lowered tensors."""


class Casts:
    """Casts between fp32 and another type, each made once.

    Attributes:
        low: The other element type: a lower one, or fp64.
    """

    def __init__(self, model: onnx_ir.Model, low: onnx_ir.DataType, keep: Collection[onnx_ir.Value] = ()) -> None:
        """Values to keep are of the lower type and stay so."""
        self._graph = model.graph
        self._keep = keep
        self.low = low
        self._made: dict[tuple[int, onnx_ir.DataType], onnx_ir.Value] = {}
        self._names = set(_names(model.graph))

    def lower_inputs(self) -> None:
        """Gives the graph's fp32 inputs the lower type."""
        for value in self._graph.inputs:
            if value.dtype == onnx_ir.DataType.FLOAT:
                value.dtype = self.low

    def lower(self, node: onnx_ir.Node) -> None:
        """Gives a node inputs and outputs of the lower type."""
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
                if value is not None and value.dtype == self.low and self._is_outer(value) and value not in self._keep:
                    inner.replace_input_with(index, self._as(value, onnx_ir.DataType.FLOAT))

    def retype_outputs(self, dtype: onnx_ir.DataType) -> None:
        """Gives the graph's floating-point outputs a type; they keep their names."""
        for position, value in enumerate(list(self._graph.outputs)):
            is_float = value.dtype in (self.low, onnx_ir.DataType.FLOAT) and value not in self._keep
            if is_float and value.dtype != dtype:
                name = value.name
                value.name = self._free(f"{name}_before")
                result = self._cast(value, dtype)
                result.name = name
                self._graph.outputs[position] = result

    def round_output(self, node: onnx_ir.Node, value: onnx_ir.Value) -> None:
        """Lets a node compute an fp32 value, and rounds it for all who read it."""
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
    """Of all values, in the graphs inside it, too."""
    produced = (value for node in graph.all_nodes() for value in node.outputs)
    for value in (*graph.inputs, *graph.initializers.values(), *produced):
        yield str(value.name)


def _with_inner(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    yield node
    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from _with_inner(inner)
