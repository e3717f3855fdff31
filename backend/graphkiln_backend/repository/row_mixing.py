"""Detect graphs that compute a row of a batch from other rows, by their nodes.

A dynamic first dimension need not be a batch: it may be the time of a sequence, or a node may reduce over all rows. The
axis of the rows is followed from the inputs as far as it is known; a node that works along it mixes rows. Unknown nodes
are not reported: before a graph serves, its session is tested with rows alone and together.

Source: ONNX operator schemas, versions 1 to 25.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphkiln_backend.graph.axes import Node, Relation, Shape, relate
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import onnx
else:
    np = LazyModule("numpy")
    onnx = LazyModule("onnx")

_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
_BREAKING = frozenset({"Shape", "Size"})  # their outputs depend on no value
_LARGEST_CONSTANT = 1024  # elements; axes and shapes are small
_ATTRIBUTES = frozenset({"INT", "INTS", "STRING"})


class Mixes(Exception):
    """A node computes a row from others."""

    def __init__(self, node: onnx.NodeProto, why: str) -> None:
        super().__init__(f"{node.op_type} '{node.name or node.output[0]}' {why}")


@dataclass(frozen=True, slots=True)
class Place:
    """Axis of the rows in a value with `rank` dimensions."""

    axis: int
    rank: int


def find_mixing(model: onnx.ModelProto) -> str:
    """Describe the first node that computes a row from others; empty if none is found.

    Args:
        model: A graph whose inputs have a dynamic first dimension. Its weights need not be loaded.
    """
    try:
        _read(model)
    except Mixes as found:
        return str(found)
    return ""


def find_row_outputs(model: onnx.ModelProto) -> frozenset[str]:
    """Return the outputs that certainly have one row per row of the inputs, even if the file declares another shape.

    Args:
        model: As for `find_mixing`.
    """
    try:
        places = _read(model).places
    except Mixes:
        return frozenset()
    return frozenset(value.name for value in model.graph.output if (at := places.get(value.name)) and at.axis == 0)


def _read(model: onnx.ModelProto) -> _Reader:
    given = {tensor.name for tensor in model.graph.initializer}
    versions = {opset.domain: opset.version for opset in model.opset_import}
    reader = _Reader(opset=versions.get("", versions.get("ai.onnx", 1)))
    for value in model.graph.input:
        rank = len(value.type.tensor_type.shape.dim)
        if value.name not in given and rank:
            reader.places[value.name] = Place(0, rank)
        elif value.name not in given:
            reader.unsure.add(value.name)
    for value in model.graph.value_info:
        if value.type.tensor_type.HasField("shape"):
            reader.shapes[value.name] = (None,) * len(value.type.tensor_type.shape.dim)
    for tensor in model.graph.initializer:
        reader.add_constant(tensor.name, tensor)
    for node in _needed(model.graph):
        reader.read(node)
    return reader


@dataclass
class _Reader:
    """Follows the axis of the rows through the nodes of a graph.

    Attributes:
        opset: Version of the domain ai.onnx.
        places: Axis of the rows by value.
        unsure: Values that depend on the inputs, but whose axis of rows is unknown.
        shapes: Shapes of constants; for other values only the declared rank.
        constants: Elements of small constants.
    """

    opset: int
    places: dict[str, Place] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    shapes: dict[str, Shape] = field(default_factory=dict)
    constants: dict[str, list[Any]] = field(default_factory=dict)

    def add_constant(self, name: str, tensor: onnx.TensorProto) -> None:
        """Store the shape of a constant, and its elements if it is small."""
        self.shapes[name] = tuple(tensor.dims)
        if tensor.data_location != onnx.TensorProto.EXTERNAL and np.prod(tensor.dims) <= _LARGEST_CONSTANT:
            self.constants[name] = onnx.numpy_helper.to_array(tensor).ravel().tolist()

    def read(self, node: onnx.NodeProto) -> None:
        """Follow the rows through a node; raise `Mixes` if it computes a row from others."""
        if node.op_type == "Constant":
            self._read_constant(node)
            return
        read = {name for name in (*node.input, *_read_inside(node)) if name}
        if node.op_type in _BREAKING or not self._depends(read):
            return
        self._check_decision(node)
        known = node.domain in _DOMAINS and read.isdisjoint(self.unsure)
        if known and (relation := relate(self._describe(node))):
            self._place(node, relation)
        self.unsure.update(name for name in node.output if name not in self.places)

    def _read_constant(self, node: onnx.NodeProto) -> None:
        for attribute in node.attribute:
            if attribute.name == "value":
                self.add_constant(node.output[0], attribute.t)
            elif attribute.name in ("value_int", "value_ints", "value_float", "value_floats"):
                array = np.asarray(onnx.helper.get_attribute_value(attribute))
                self.shapes[node.output[0]], self.constants[node.output[0]] = array.shape, array.ravel().tolist()

    def _describe(self, node: onnx.NodeProto) -> Node:
        types = onnx.AttributeProto.AttributeType
        return Node(
            operator=node.op_type,
            opset=self.opset,
            attributes={
                attribute.name: onnx.helper.get_attribute_value(attribute)
                for attribute in node.attribute
                if types.Name(attribute.type) in _ATTRIBUTES
            },
            inputs=[self._shape(name) for name in node.input],
            outputs=[None if name else () for name in node.output],
            read_constant=lambda index: self.constants.get(node.input[index]) if node.input[index] else [],
        )

    def _shape(self, name: str) -> Shape | None:
        if not name:
            return ()
        return (None,) * self.places[name].rank if name in self.places else self.shapes.get(name)

    def _place(self, node: onnx.NodeProto, relation: Relation) -> None:
        found = set[int | None]()
        for index, name in enumerate(node.input):
            if place := self.places.get(name):
                label = relation.label(index, place.axis)
                if label is not None and label in relation.mixed:
                    raise Mixes(node, f"{relation.mixed[label]} the rows")
                found.add(label)
        if None in found:
            return
        if len(found) > 1:
            raise Mixes(node, "combines rows with each other")
        (label,) = found
        for name, axes in zip(node.output, relation.outputs, strict=False):
            if axes and label in axes:
                self.places[name] = Place(axes.index(label), len(axes))

    def _check_decision(self, node: onnx.NodeProto) -> None:
        """Raise `Mixes` if a single decision for all rows depends on their values."""
        if node.op_type == "DynamicQuantizeLinear":
            raise Mixes(node, "chooses one scale for all rows")
        if node.op_type == "If" and self._depends(node.input[:1]):
            raise Mixes(node, "takes one branch for all rows, by their values")
        if node.op_type == "Loop" and self._depends((*node.input[:2], *_ends_by(node))):
            raise Mixes(node, "runs as often for all rows, by their values")
        if node.op_type == "Scan":
            self._check_scan(node)

    def _check_scan(self, node: onnx.NodeProto) -> None:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        scanned = attributes["num_scan_inputs"].i
        states = len(node.input) - scanned
        axes = list(attributes["scan_input_axes"].ints) if "scan_input_axes" in attributes else [0] * scanned
        for name, axis in zip(node.input[states:], axes, strict=False):
            if states and (place := self.places.get(name)) and place.axis == axis:
                raise Mixes(node, "goes from row to row, and keeps states")

    def _depends(self, names: Iterable[str]) -> bool:
        return any(name in self.places or name in self.unsure for name in names)


def _needed(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes that an output depends on, in order."""
    needed, found = {value.name for value in graph.output}, list[onnx.NodeProto]()
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed.update((*node.input, *_read_inside(node)))
            found.append(node)
    return found[::-1]


def _read_inside(node: onnx.NodeProto) -> list[str]:
    """Return the names that the subgraphs of a node read, including those of their own values."""
    names = list[str]()
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            names += [value.name for value in graph.output]
            for inner in graph.node:
                names += [*inner.input, *_read_inside(inner)]
    return names


def _ends_by(node: onnx.NodeProto) -> set[str]:
    """Return the names outside of a Loop that its termination depends on."""
    body = next(attribute.g for attribute in node.attribute if attribute.name == "body")
    needed = {body.output[0].name}
    for inner in reversed(body.node):
        if needed & set(inner.output) and inner.op_type not in _BREAKING:
            needed.update((*inner.input, *_read_inside(inner)))
    outside: Mapping[str, str] = {value.name: name for value, name in zip(body.input, node.input, strict=False)}
    return {outside.get(name, name) for name in needed}
