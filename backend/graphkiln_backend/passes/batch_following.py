"""Follows the batch through a graph of fixed shapes, and mends where it is baked in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.signature import BATCH

Value = onnx_ir.Value


@dataclass(frozen=True, slots=True)
class Carried:
    """Where a value carries the batch: `axis` has the size `before * batch * after`, the last varying fastest."""

    axis: int
    before: int = 1
    after: int = 1


def mark(value: Value, carried: Carried) -> None:
    """Names the batch in a value's shape."""
    if value.shape is None:
        return
    factor = carried.before * carried.after
    dims = list(value.shape)
    dims[carried.axis] = onnx_ir.SymbolicDim(BATCH if factor == 1 else f"{factor}*{BATCH}")
    value.shape = onnx_ir.Shape(dims)


class ExpandedToBatch(Exception):
    """A constant was expanded to the saved batch further up: it carries the batch from there on.

    Attributes:
        value: What the Expand answers.
        carried: Where.
    """

    def __init__(self, value: Value, carried: Carried) -> None:
        super().__init__(str(value.name))
        self.value = value
        self.carried = carried


class Follower:
    """Follows the batch from node to node. Nothing is changed before `mend`.

    Attributes:
        carried: Value -> where it carries the batch; others do not.
        expanded: Constants that are known to be expanded to the batch.
    """

    def __init__(self, model: onnx_ir.Model, batch: int, expanded: Mapping[Value, Carried]) -> None:
        self.model = model
        self.batch = batch
        self.carried = {value: Carried(0) for value in model.graph.inputs}
        self.expanded = expanded
        self._repairs: list[Callable[[], None]] = []
        self._counted: Value | None = None

    def mend(self) -> None:
        """Changes what has the saved batch baked in."""
        for repair in self._repairs:
            repair()

    def expand_here(self, node: onnx_ir.Node) -> Carried:
        """Lets an Expand of a constant go to the batch of each request."""
        (result,) = node.outputs
        wanted, shape = self.expanded[result], self.shape(result)
        self._repairs.append(
            lambda: node.replace_input_with(1, self._target(node, f"{node.name}/batch", shape, wanted))
        )
        return wanted

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

    def given(self, node: onnx_ir.Node, index: int) -> Value:
        """An input that must not be left out."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            raise self.error(node, f"input {index} is missing")
        return value

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
        name = f"{node.name}/batch/{index}"
        self._repairs.append(lambda: node.replace_input_with(index, self._weight(name, numbers)))

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
        if found is None:
            raise self.error(node, "the batch comes in where weights or settings are expected")
        for index, other in enumerate(node.inputs):
            if other in values and other not in self.carried:
                shape = self.shape(other)
                axis = found.axis - (rank - len(shape))
                if axis >= 0 and shape[axis] != 1:
                    self.carry(node, index, replace(found, axis=axis))
        return found

    def carry(self, node: onnx_ir.Node, index: int, wanted: Carried) -> None:
        """Lets an input carry the batch that does not: it was expanded to it, or must be now.

        Raises:
            ExpandedToBatch: It was computed from one that was expanded.
        """
        value = self.given(node, index)
        shape = self.shape(value)
        source = self._unexpanded(node, value, wanted)
        self._repairs.append(lambda: self._expand_input(node, index, source, shape, wanted))

    def _expand_input(
        self, node: onnx_ir.Node, index: int, source: Value, shape: Sequence[int], wanted: Carried
    ) -> None:
        name = f"{node.name}/batch/{index}"
        expand = onnx_ir.node("Expand", [source, self._target(node, name, shape, wanted)], name=name)
        result = expand.outputs[0]
        result.name, result.shape, result.type = name, onnx_ir.Shape(shape), source.type
        mark(result, wanted)
        self.model.graph.insert_before(node, [expand])
        node.replace_input_with(index, result)

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
        above = self._expanded_above(value)
        if above is None:
            raise self.error(node, f"'{value.name}' has the saved batch in it, and no Expand says where from")
        raise above

    def _expanded_above(self, value: Value) -> ExpandedToBatch | None:
        """The nearest Expand to the saved batch that a value is computed from."""
        waiting = [value]
        for each in waiting:
            producer = each.producer()
            if producer is None:
                continue
            if producer.op_type == "Expand" and each not in self.expanded:
                shape = self.shape(each)
                before = (1,) * len(shape) + self.shape(producer.inputs[0])
                for axis, (old, new) in enumerate(zip(before[-len(shape) :], shape, strict=True)):
                    if old == 1 and new == self.batch:
                        return ExpandedToBatch(each, Carried(axis))
            waiting += [source for source in producer.inputs if source is not None and source not in waiting]
        return None

    def _target(self, node: onnx_ir.Node, name: str, shape: Sequence[int], wanted: Carried) -> Value:
        """A shape with the batch of each request in it, `[rank]`."""
        size, factor = self._batch_size(), wanted.before * wanted.after
        if factor != 1:
            times = onnx_ir.node("Mul", [size, self._weight(f"{name}/factor", [factor])], name=f"{name}/size")
            self.model.graph.insert_before(node, [times])
            size = times.outputs[0]
        parts = [self._weight(f"{name}/dim{axis}", [dim]) for axis, dim in enumerate(shape)]
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

    def _weight(self, name: str, numbers: Sequence[int]) -> Value:
        """A new constant of the graph, INT64 `[len(numbers)]`."""
        tensor = onnx_ir.tensor(np.asarray(numbers, np.int64), name=name)
        value = Value(
            name=name, shape=onnx_ir.Shape([len(numbers)]), type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
        )
        self.model.graph.register_initializer(value)
        return value
