"""Follows the batch through a graph of fixed shapes, and mends where it is baked in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir

from graphkiln.graph.errors import ConversionError

Value = onnx_ir.Value


@dataclass(frozen=True, slots=True)
class Carried:
    """Where a value carries the batch: `axis` has the size `before * batch * after`, the last varying fastest."""

    axis: int
    before: int = 1
    after: int = 1

    def size(self, batch: int) -> int:
        """Of the axis."""
        return self.before * batch * self.after


class Follower:
    """Follows the batch from node to node.

    Attributes:
        carried: Value -> where it carries the batch; others do not.
    """

    def __init__(self, model: onnx_ir.Model, batch: int) -> None:
        self.model = model
        self.batch = batch
        self.carried = {value: Carried(0) for value in model.graph.inputs}
        self._counted: Value | None = None

    def reaches(self, node: onnx_ir.Node) -> bool:
        """Whether the batch comes into a node."""
        return any(value in self.carried for value in node.inputs if value is not None)

    def error(self, node: onnx_ir.Node, why: str) -> ConversionError:
        """A node that stands in the way."""
        return ConversionError(
            f"the saved batch of {self.batch} cannot be made to vary: {node.op_type} '{node.name}': {why}",
            hint="a model that treats the samples of a batch alike can: look at this place of it",
        )

    def shape(self, value: Value | None) -> tuple[int, ...]:
        """As saved."""
        if value is None or value.shape is None or not value.shape.is_static():
            raise ConversionError(f"the shape of '{value.name if value else ''}' is not known")
        return tuple(int(dim) for dim in value.shape.numpy())

    def only(self, node: onnx_ir.Node) -> Carried:
        """Of the first input, when no other carries the batch."""
        first, *others = node.inputs
        if first not in self.carried or any(value in self.carried for value in others):
            raise self.error(node, "the batch comes in where weights or settings are expected")
        return self.carried[first]

    def constant(self, node: onnx_ir.Node, index: int) -> list[int] | None:
        """The integers of a constant input; None where it is left out."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            return None
        if value.const_value is None:
            raise self.error(node, f"'{value.name}' is computed, expected a constant")
        return [int(each) for each in np.ravel(value.const_value.numpy())]

    def replace_constant(self, node: onnx_ir.Node, index: int, numbers: Sequence[int]) -> None:
        """Gives a node another constant; the old one may have other users."""
        node.replace_input_with(index, self.weight(f"{node.name}/batch/{index}", numbers))

    def broadcast(self, node: onnx_ir.Node, values: Sequence[Value], rank: int) -> Carried:
        """Where the result of values that broadcast carries the batch; those that must carry it, too, are mended."""
        found: Carried | None = None
        for value in values:
            if value in self.carried:
                own = self.carried[value]
                aligned = replace(own, axis=own.axis + rank - len(self.shape(value)))
                if found is not None and aligned != found:
                    raise self.error(node, f"its inputs carry the batch in different places: {found}, {aligned}")
                found = aligned
        assert found is not None  # noqa: S101 - the batch reaches the node through one of them
        for index, other in enumerate(node.inputs):
            if other in values and other not in self.carried:
                shape = self.shape(other)
                axis = found.axis - (rank - len(shape))
                if axis >= 0 and shape[axis] != 1:
                    self.carry(node, index, replace(found, axis=axis))
        return found

    def carry(self, node: onnx_ir.Node, index: int, wanted: Carried) -> None:
        """Lets an input carry the batch that does not: it was expanded to it, or must be now."""
        value = node.inputs[index]
        shape = list(self.shape(value))
        assert value is not None  # noqa: S101 - it has a shape
        name = f"{node.name}/batch/{index}"
        expand = onnx_ir.node(
            "Expand", [self._unexpanded(node, value, wanted), self._target(node, name, shape, wanted)], name=name
        )
        shape[wanted.axis] = wanted.size(self.batch)
        result = expand.outputs[0]
        result.name, result.shape, result.type = name, onnx_ir.Shape(shape), value.type
        self.model.graph.insert_before(node, [expand])
        node.replace_input_with(index, result)
        self.carried[result] = wanted

    def _unexpanded(self, node: onnx_ir.Node, value: Value, wanted: Carried) -> Value:
        """A value before it was expanded to the saved batch."""
        if self.shape(value)[wanted.axis] == 1:
            return value
        producer = value.producer()
        if producer is not None and producer.op_type == "Expand" and producer.inputs[0] is not None:
            source = producer.inputs[0]
            axis = wanted.axis - len(self.shape(value)) + len(self.shape(source))
            if axis < 0 or self.shape(source)[axis] == 1:
                return source
        raise self.error(node, f"'{value.name}' has the saved batch in it, and no Expand says where from")

    def _target(self, node: onnx_ir.Node, name: str, shape: Sequence[int], wanted: Carried) -> Value:
        """A shape with the batch of each request in it, `[rank]`."""
        size, factor = self._batch_size(), wanted.before * wanted.after
        if factor != 1:
            times = onnx_ir.node("Mul", [size, self.weight(f"{name}/factor", [factor])], name=f"{name}/size")
            self.model.graph.insert_before(node, [times])
            size = times.outputs[0]
        parts = [self.weight(f"{name}/dim{axis}", [dim]) for axis, dim in enumerate(shape)]
        parts[wanted.axis] = size
        joined = onnx_ir.node("Concat", parts, {"axis": 0}, name=f"{name}/shape")
        self.model.graph.insert_before(node, [joined])
        return joined.outputs[0]

    def _batch_size(self) -> Value:
        """The batch of a request, `[1]`."""
        if self._counted is None:
            node = onnx_ir.node("Shape", [self.model.graph.inputs[0]], {"start": 0, "end": 1}, name="batch/size")
            self.model.graph.insert_before(self.model.graph[0], [node])
            self._counted = node.outputs[0]
        return self._counted

    def weight(self, name: str, numbers: Sequence[int]) -> Value:
        """A new constant of the graph, INT64 `[len(numbers)]`."""
        tensor = onnx_ir.tensor(np.asarray(numbers, np.int64), name=name)
        value = Value(
            name=name, shape=onnx_ir.Shape([len(numbers)]), type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
        )
        self.model.graph.register_initializer(value)
        return value
