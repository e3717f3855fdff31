"""Conversion of a graph with a fixed batch size to a dynamic batch.

The batch axis is propagated from the inputs through every node, based on static shapes. An axis may combine the batch
with other dimensions: window attention folds its windows into it, `[batch * 64, 49, 96]`. Shapes of reshapes, sizes of
expansions, and constants that were expanded to the batch are rewritten. A node that mixes samples is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir

from graphkiln_backend.graph.axes import Relation, reshape_places
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.signature import BATCH
from graphkiln_backend.passes.base import Pass
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.passes.node_axes import relate

_MOST_TRIES = 500  # assignments of the batch axis before giving up
_WITH_SETTINGS = ("Expand", "Reshape", "Resize", "Slice", "Squeeze")  # all inputs but the first are shapes, axes, ...
_NOT_BROADCASTING = ("Concat", "Einsum", "GatherElements", "GatherND", "GridSample", "GRU", "LSTM", "RNN")
_END = (1 << 63) - 1  # the end of an open slice

Value = onnx_ir.Value


@dataclass(frozen=True, slots=True)
class VaryBatch(Pass):
    """Make a fixed batch dimension dynamic."""

    name = "vary-batch"
    summary = "lets the batch vary that was saved with the graph"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """See `Pass.why_skip`."""
        fixed = [value for value in model.graph.inputs if isinstance(_first_dim(value), int)]
        return "" if fixed else "the batch varies already"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """See `Pass.__call__`.

        Raises:
            ConversionError: The inputs have no common batch, or a node mixes samples.
        """
        analysis = _analyze(model, saved_batch(model))
        analysis.repair()
        for value, axis in analysis.axes.items():
            _name_batch(value, axis)
        return Edge()

    def remark(self, model: onnx_ir.Model) -> str:
        """See `Pass.remark`."""
        fixed = [str(value.name) for value in model.graph.outputs if _first_dim(value) != BATCH]
        return f"the batch is not the first dimension of {', '.join(fixed)}" if fixed else ""


def saved_batch(model: onnx_ir.Model) -> int:
    """Return the fixed batch size of a graph: the first dimension of all inputs.

    Raises:
        ConversionError: The first dimension is dynamic or differs between inputs.
    """
    sizes = {_first_dim(value) for value in model.graph.inputs}
    (size,) = sizes if len(sizes) == 1 else (None,)
    if not isinstance(size, int):
        listed = ", ".join(f"{value.name} {list(value.shape or ())}" for value in model.graph.inputs)
        raise ConversionError(
            f"the inputs have no common first dimension to use as the batch: {listed}",
            hint="save the graph with the batch first in every input",
        )
    return size


def _first_dim(value: Value) -> object:
    shape = value.shape
    if shape is None or not len(shape):
        return None
    return shape[0] if isinstance(shape[0], int) else shape[0].value


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """Position of the batch in a value: `axis` has the size `before * batch * after`, in row-major order."""

    axis: int
    before: int = 1
    after: int = 1

    def __str__(self) -> str:
        factors = (str(size) if size != 1 else "" for size in (self.before, self.after))
        size = "*".join(factor for factor in (next(factors), BATCH, next(factors)) if factor)
        return f"axis {self.axis} of size {size}"


def _name_batch(value: Value, batch: BatchAxis) -> None:
    if value.shape is None:
        return
    factor = batch.before * batch.after
    dims = list(value.shape)
    dims[batch.axis] = onnx_ir.SymbolicDim(BATCH if factor == 1 else f"{factor}*{BATCH}")
    value.shape = onnx_ir.Shape(dims)


class ExpandedToBatch(Exception):
    """Signals that a constant was expanded to the saved batch upstream, so that the analysis restarts from there.

    Attributes:
        value: Output of the Expand.
        axis: Batch axis of the output.
    """

    def __init__(self, value: Value, axis: BatchAxis) -> None:
        super().__init__(str(value.name))
        self.value = value
        self.axis = axis


def _analyze(model: onnx_ir.Model, batch: int) -> BatchAnalysis:
    """Propagate the batch through the graph, backtracking over ambiguous positions of a batch of 1.

    Raises:
        ConversionError: No assignment is consistent; the message is that of the first one tried.
    """
    expanded, choices = dict[Value, BatchAxis](), dict[onnx_ir.Node, int]()
    first: ConversionError | None = None
    for _ in range(_MOST_TRIES):
        analysis = BatchAnalysis(model, batch, expanded, choices)
        try:
            analysis.follow()
        except ExpandedToBatch as found:  # at most once per Expand
            expanded[found.value] = found.axis
        except ConversionError as error:
            first = first or error
            if not _choose_otherwise(choices, analysis.open_choices):
                raise first from error
        else:
            return analysis
    raise first or ConversionError(f"the saved batch of {batch} cannot be followed through the graph")


def _choose_otherwise(choices: dict[onnx_ir.Node, int], open_choices: Mapping[onnx_ir.Node, int]) -> bool:
    """Advance the last node with an untried choice, and reset the nodes after it."""
    for node, count in reversed(list(open_choices.items())):
        if choices.get(node, 0) + 1 < count:
            choices[node] = choices.get(node, 0) + 1
            return True
        choices.pop(node, None)
    return False


class BatchAnalysis:
    """Batch axis of every value of a graph. The graph is unchanged until `repair`.

    Attributes:
        batch: Fixed batch size of the graph.
        axes: Value -> batch axis; values without the batch are absent.
        expanded: Constants known to be expanded to the batch -> batch axis.
        open_choices: Nodes with an ambiguous result -> number of alternatives, in node order.
    """

    def __init__(
        self, model: onnx_ir.Model, batch: int, expanded: Mapping[Value, BatchAxis], choices: Mapping[onnx_ir.Node, int]
    ) -> None:
        self.model = model
        self.batch = batch
        self.axes = {value: BatchAxis(0) for value in model.graph.inputs}
        self.expanded = expanded
        self.open_choices: dict[onnx_ir.Node, int] = {}
        self._choices = choices
        self._repairs: list[Callable[[], None]] = []
        self._size: Value | None = None

    def follow(self) -> None:
        """Find the batch axis of every value.

        Raises:
            ExpandedToBatch: A constant was expanded to the batch; restart with it in `expanded`.
            ConversionError: A node does not support a dynamic batch.
        """
        for node in self.model.graph:
            if node.outputs[0] in self.expanded:
                self.axes[node.outputs[0]] = self._expand_here(node)
            elif self._reaches(node):
                self._follow_node(node)

    def repair(self) -> None:
        """Rewrite the shapes and constants that contain the saved batch size."""
        for repair in self._repairs:
            repair()

    def _reaches(self, node: onnx_ir.Node) -> bool:
        """Return True if an input of a node, or of its subgraphs, carries the batch."""
        inner = (nested for attribute in node.attributes.values() for nested in _inner_nodes(attribute))
        return any(value in self.axes for each in (node, *inner) for value in each.inputs if value is not None)

    def _follow_node(self, node: onnx_ir.Node) -> None:
        special = _SPECIAL.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if special and node.op_type in _WITH_SETTINGS and any(value in self.axes for value in node.inputs[1:]):
            raise self._error(node, "its settings are computed from the batch")
        if special and node.inputs[0] in self.axes and (found := special(self, node)):
            self.axes[node.outputs[0]] = found
            return
        relation = relate(node)
        if relation is None:
            raise self._error(node, "the operator is not supported")
        label, batch = self._label(node, relation)
        for index, (value, axes) in enumerate(zip(node.inputs, relation.inputs, strict=False)):
            if value is not None and value not in self.axes and axes and label in axes:
                axis = axes.index(label)
                if self._shape(value)[axis] != 1 or node.op_type in _NOT_BROADCASTING:
                    self._carry(node, index, replace(batch, axis=axis))
        for number, value in enumerate(node.outputs):
            labels = relation.outputs[number] if number < len(relation.outputs) else None
            if labels and label in labels:
                self.axes[value] = replace(batch, axis=labels.index(label))
            elif value.uses() or value.is_graph_output():
                raise self._error(node, f"the batch axis of '{value.name}' is unknown")

    def _label(self, node: onnx_ir.Node, relation: Relation) -> tuple[int, BatchAxis]:
        """Return the axis label of the batch in the inputs of a node, and its position."""
        found = dict[tuple[int, int, int], BatchAxis]()
        for index, value in enumerate(node.inputs):
            if value is None or value not in self.axes:
                continue
            batch = self.axes[value]
            label = relation.label(index, batch.axis)
            if label is None:
                raise self._error(node, f"it reorders samples of input {index}")
            if label in relation.mixed:
                raise self._error(node, f"it {relation.mixed[label]} the batch")
            found[label, batch.before, batch.after] = batch
        if len(found) > 1:
            places = ", ".join(map(str, found.values()))
            raise self._error(node, f"its inputs have the batch on different axes: {places}")
        (((label, _, _), batch),) = found.items()
        return label, batch

    def _error(self, node: onnx_ir.Node, why: str) -> ConversionError:
        return ConversionError(
            f"the saved batch of {self.batch} cannot be made dynamic: {node.op_type} '{node.name}': {why}",
            hint="change the model so that this operation treats each sample independently",
        )

    def _shape(self, value: Value | None) -> tuple[int, ...]:
        """Return the static shape of a value.

        Raises:
            ConversionError: The shape is unknown.
        """
        if value is None or value.shape is None or not value.shape.is_static():
            raise ConversionError(f"the shape of '{value.name if value else ''}' is unknown")
        return tuple(int(dim) for dim in value.shape.numpy())

    def _constant(self, node: onnx_ir.Node, index: int) -> list[int]:
        """Return the integers of a constant input; empty if the input is omitted."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            return []
        if value.const_value is None:
            raise self._error(node, f"'{value.name}' is computed, expected a constant")
        return [int(number) for number in value.const_value.numpy().ravel()]

    # Operators whose constant inputs may contain the batch size. Each method schedules the repair, and returns None if
    # the axis relation already determines the result.

    def reshape(self, node: onnx_ir.Node) -> BatchAxis:
        """Find the batch axis of a Reshape, which preserves the order of elements."""
        batch = self.axes[node.inputs[0]]  # type: ignore[index]
        source, target = self._shape(node.inputs[0]), self._shape(node.outputs[0])
        if not math.prod(source):
            raise self._error(node, "its input is empty")
        found = reshape_places(source, target, batch.axis, batch.after, self.batch)[::-1]
        if not found:
            raise self._error(node, f"{list(source)} -> {list(target)} does not preserve the batch")
        places = [BatchAxis(axis, target[axis] // (self.batch * after), after) for axis, after in found]
        # A batch of 1 may be any axis of size 1, or a factor of a larger axis. Try axes of size 1 first.
        places.sort(key=lambda place: place.before * place.after != 1)
        if len(places) > 1:
            self.open_choices[node] = len(places)
        place = places[self._choices.get(node, 0)]
        self._replace_constant(node, 1, [-1 if axis == place.axis else size for axis, size in enumerate(target)])
        return place

    def flatten(self, node: onnx_ir.Node) -> BatchAxis:
        """Find the batch axis of a Flatten, whose output is `[first axes, last axes]`."""
        batch = self.axes[node.inputs[0]]  # type: ignore[index]
        shape = self._shape(node.inputs[0])
        at = node.attributes.get_int("axis", 1)
        at += len(shape) if at < 0 else 0
        start, stop, axis = (0, at, 0) if batch.axis < at else (at, len(shape), 1)
        before, after = math.prod(shape[start : batch.axis]), math.prod(shape[batch.axis + 1 : stop])
        return BatchAxis(axis, before * batch.before, batch.after * after)

    def squeeze(self, node: onnx_ir.Node) -> BatchAxis | None:
        """Make implicit axes of a Squeeze explicit, so that it does not remove a batch of 1."""
        if self._constant(node, 1):
            return None
        batch = self.axes[node.inputs[0]]  # type: ignore[index]
        shape = self._shape(node.inputs[0])
        axes = [axis for axis, size in enumerate(shape) if size == 1 and axis != batch.axis]
        self._repairs.append(lambda: node.resize_inputs(2))
        self._replace_constant(node, 1, axes)
        return replace(batch, axis=batch.axis - sum(axis < batch.axis for axis in axes))

    def slice(self, node: onnx_ir.Node) -> BatchAxis | None:
        """Open the end of a Slice that takes the whole batch."""
        batch = self.axes[node.inputs[0]]  # type: ignore[index]
        shape = self._shape(node.inputs[0])
        starts, ends, given, steps = (self._constant(node, index) for index in range(1, 5))
        axes = [axis % len(shape) for axis in given or range(len(starts))]
        if batch.axis not in axes:
            return None
        at = axes.index(batch.axis)
        if starts[at] != 0 or (steps and steps[at] != 1) or ends[at] < shape[batch.axis]:
            raise self._error(node, "it selects some samples of the batch")
        self._replace_constant(node, 2, [_END if place == at else end for place, end in enumerate(ends)])
        return batch

    def gather(self, node: onnx_ir.Node) -> BatchAxis | None:
        """Replace a Gather or GatherND that selects every sample in order with an Identity."""
        data, indices = node.inputs[0], node.inputs[1]
        nd = node.op_type == "GatherND"
        axis = node.attributes.get_int("batch_dims" if nd else "axis", 0) % len(self._shape(data))
        every = self._shape(indices) == ((self.batch, 1) if nd else (self.batch,))
        if self.axes[data] != BatchAxis(axis) or not every or indices is None or indices.const_value is None:  # type: ignore[index]
            return None
        if self._constant(node, 1) != list(range(self.batch)):
            return None
        self._repairs.append(lambda: _become_identity(node))
        return BatchAxis(axis)

    def expand(self, node: onnx_ir.Node) -> BatchAxis | None:
        """Make an Expand keep the batch size of its input."""
        relation = relate(node)
        batch = self.axes[node.inputs[0]]  # type: ignore[index]
        axis = relation.label(0, batch.axis) if relation else None
        if axis is None:
            return None
        target = list(self._shape(node.outputs[0]))
        target[axis] = 1  # broadcasts to the input's size
        self._replace_constant(node, 1, target)
        return replace(batch, axis=axis)

    def resize(self, node: onnx_ir.Node) -> BatchAxis | None:
        """Restrict the sizes of a Resize to the other axes."""
        batch = self.axes[node.inputs[0]]  # type: ignore[index]
        shape, sizes = self._shape(node.inputs[0]), self._constant(node, 3)
        axes = [axis % len(shape) for axis in node.attributes.get_ints("axes", tuple(range(len(shape))))]
        if not sizes or batch.axis not in axes or sizes[axes.index(batch.axis)] != shape[batch.axis]:
            return None
        kept = {axis: size for axis, size in zip(axes, sizes, strict=True) if axis != batch.axis}
        self._replace_constant(node, 3, list(kept.values()))
        self._repairs.append(lambda: node.attributes.add(onnx_ir.AttrInt64s("axes", list(kept))))
        return batch

    # Constants that have to be expanded to the batch.

    def _carry(self, node: onnx_ir.Node, index: int, batch: BatchAxis) -> None:
        """Expand an input without the batch to the batch of each request.

        Raises:
            ExpandedToBatch: The input is computed from a constant that was expanded to the saved batch.
        """
        value = node.inputs[index]
        if value is None:
            return
        shape, source = self._shape(value), self._unexpanded(node, value, batch)
        self._repairs.append(lambda: self._expand_input(node, index, source, shape, batch))

    def _expand_input(
        self, node: onnx_ir.Node, index: int, source: Value, shape: Sequence[int], batch: BatchAxis
    ) -> None:
        name = f"{node.outputs[0].name}/batch/{index}"  # nodes may have no name, or all the same
        expand = onnx_ir.node("Expand", [source, self._target(node, name, shape, batch)], name=name)
        result = expand.outputs[0]
        result.name, result.shape, result.type = name, onnx_ir.Shape(shape), source.type
        _name_batch(result, batch)
        self.model.graph.insert_before(node, [expand])
        node.replace_input_with(index, result)

    def _unexpanded(self, node: onnx_ir.Node, value: Value, batch: BatchAxis) -> Value:
        """Return a value as it was before its expansion to the saved batch."""
        if self._shape(value)[batch.axis] == 1:
            return value
        producer = value.producer()
        if producer is not None and producer.op_type == "Expand" and producer.inputs[0] is not None:
            source = producer.inputs[0]
            axis = batch.axis - len(self._shape(value)) + len(self._shape(source))
            if axis < 0 or self._shape(source)[axis] == 1:
                return source
        if (row := self._equal_row(value, batch)) is not None:
            return row
        above = self._expanded_above(value)
        if above is None:
            raise self._error(node, f"'{value.name}' contains the saved batch, but not from an Expand")
        raise above

    def _equal_row(self, value: Value, batch: BatchAxis) -> Value | None:
        """Return one row of a constant whose rows are all equal, or None."""
        if value.const_value is None or batch.before * batch.after != 1:
            return None
        array = value.const_value.numpy()
        row = array.take([0], batch.axis)
        if not np.array_equal(np.broadcast_to(row, array.shape), array):
            return None
        name = f"{value.name}/row"
        if name in self.model.graph.initializers:
            return self.model.graph.initializers[name]
        return self._add_weight(name, onnx_ir.Tensor(row, dtype=value.dtype, name=name))

    def _expanded_above(self, value: Value) -> ExpandedToBatch | None:
        """Return the nearest Expand to the saved batch upstream of a value."""
        waiting = [value]
        for computed in waiting:
            producer = computed.producer()
            if producer is None:
                continue
            if producer.op_type == "Expand" and computed not in self.expanded:
                shape = self._shape(computed)
                before = (1,) * len(shape) + self._shape(producer.inputs[0])
                for axis, (old, new) in enumerate(zip(before[-len(shape) :], shape, strict=True)):
                    if old == 1 and new == self.batch:
                        return ExpandedToBatch(computed, BatchAxis(axis))
            waiting += [source for source in producer.inputs if source is not None and source not in waiting]
        return None

    def _expand_here(self, node: onnx_ir.Node) -> BatchAxis:
        """Make an Expand of a constant use the batch size of the request."""
        (result,) = node.outputs
        batch, shape = self.expanded[result], self._shape(result)
        self._repairs.append(lambda: node.replace_input_with(1, self._target(node, f"{node.name}/batch", shape, batch)))
        return batch

    def _target(self, node: onnx_ir.Node, name: str, shape: Sequence[int], batch: BatchAxis) -> Value:
        """Build nodes that compute a shape with the request's batch size, INT64 `[rank]`."""
        size, factor = self._batch_size(), batch.before * batch.after
        if factor != 1:
            times = onnx_ir.node("Mul", [size, self._integers(f"{name}/factor", [factor])], name=f"{name}/size")
            self.model.graph.insert_before(node, [times])
            size = times.outputs[0]
        parts = [self._integers(f"{name}/dim{axis}", [dim]) for axis, dim in enumerate(shape)]
        parts[batch.axis] = size
        joined = onnx_ir.node("Concat", parts, {"axis": 0}, name=f"{name}/shape")
        self.model.graph.insert_before(node, [joined])
        return joined.outputs[0]

    def _batch_size(self) -> Value:
        """Build nodes that compute the request's batch size, INT64 `[1]`."""
        if self._size is None:
            node = onnx_ir.node("Shape", [self.model.graph.inputs[0]], {"start": 0, "end": 1}, name="batch/size")
            self.model.graph.insert_before(self.model.graph[0], [node])
            self._size = node.outputs[0]
        return self._size

    def _replace_constant(self, node: onnx_ir.Node, index: int, numbers: Sequence[int]) -> None:
        """Replace a constant input of a node; the old constant may have other readers."""
        name = f"{node.outputs[0].name}/batch/{index}"  # nodes may have no name, or all the same
        self._repairs.append(lambda: node.replace_input_with(index, self._integers(name, numbers)))

    def _integers(self, name: str, numbers: Sequence[int]) -> Value:
        return self._add_weight(name, onnx_ir.tensor(np.asarray(numbers, np.int64), name=name))

    def _add_weight(self, name: str, tensor: onnx_ir.TensorProtocol) -> Value:
        value = Value(name=name, shape=tensor.shape, type=onnx_ir.TensorType(tensor.dtype), const_value=tensor)  # type: ignore[arg-type]
        self.model.graph.register_initializer(value)
        return value


_SPECIAL: dict[str, Callable[[BatchAnalysis, onnx_ir.Node], BatchAxis | None]] = {
    "Expand": BatchAnalysis.expand,
    "Flatten": BatchAnalysis.flatten,
    "Gather": BatchAnalysis.gather,
    "GatherND": BatchAnalysis.gather,
    "Reshape": BatchAnalysis.reshape,
    "Resize": BatchAnalysis.resize,
    "Slice": BatchAnalysis.slice,
    "Squeeze": BatchAnalysis.squeeze,
}


def _inner_nodes(attribute: onnx_ir.Attr) -> Iterator[onnx_ir.Node]:
    """Yield the nodes of a subgraph attribute, for example a branch of an If."""
    if attribute.type == onnx_ir.AttributeType.GRAPH:
        yield from attribute.as_graph().all_nodes()


def _become_identity(node: onnx_ir.Node) -> None:
    node.op_type = "Identity"
    node.resize_inputs(1)
    node.attributes.clear()
