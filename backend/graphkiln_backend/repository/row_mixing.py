"""Whether a graph computes a row of a batch from its neighbors, read from its nodes alone.

A first dimension that varies need not be a batch: it may be the time of a sequence, or a node may take all rows
together. The axis of the rows is followed from the inputs, as far as it is sure where it is; what a node does along it
tells. What is not sure says nothing: a session of the graph is tried with rows alone and together before it serves.

Source: ONNX operator schemas, versions 1 to 25.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.repository.row_rules import RULES, Mixes, Place, Places

if TYPE_CHECKING:
    import numpy as np
    import onnx
else:
    np = LazyModule("numpy")
    onnx = LazyModule("onnx")

_BREAKING = frozenset({"Shape", "Size"})
"""What they compute depends on no value."""
_ONE_SCALE = frozenset({"DynamicQuantizeLinear"})
"""Operators that choose one number for the whole tensor."""
_LARGEST_CONSTANT = 1024
"""Elements of constants that are read: axes and shapes are small."""


def find_mixing(model: onnx.ModelProto) -> str:
    """Which node computes a row from others, and how; empty where none is known to.

    Args:
        model: A graph whose inputs all have a first dimension that varies. Its weights need not be loaded.
    """
    try:
        _read(model)
    except Mixes as found:
        return str(found)
    return ""


def find_row_outputs(model: onnx.ModelProto) -> frozenset[str]:
    """The outputs that surely have a row for each row of the inputs, whatever shape the file tells.

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
    reader = _Reader(version=versions.get("", versions.get("ai.onnx", 1)))
    for value in model.graph.input:
        if value.name not in given:
            reader.places[value.name] = Place(0, len(value.type.tensor_type.shape.dim))
    for value in model.graph.value_info:
        if value.type.tensor_type.HasField("shape"):
            reader.ranks[value.name] = len(value.type.tensor_type.shape.dim)
    for tensor in model.graph.initializer:
        reader.know(tensor.name, tensor)
    reader.read(_needed(model.graph))
    return reader


@dataclass
class _Reader:
    """Follows the rows through the nodes of a graph.

    Attributes:
        version: Opset of ONNX's own operators.
        places: Value -> the axis of its rows.
        unsure: Values that depend on those of the inputs, and nobody knows where their rows are.
        ranks: Number of dimensions, where the graph tells it.
        constants: Small constants.
    """

    version: int
    places: dict[str, Place] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    ranks: dict[str, int] = field(default_factory=dict)
    constants: dict[str, AnyArray] = field(default_factory=dict)

    def know(self, name: str, tensor: onnx.TensorProto) -> None:
        """Takes note of a constant."""
        self.ranks[name] = len(tensor.dims)
        if tensor.data_location != onnx.TensorProto.EXTERNAL and np.prod(tensor.dims) <= _LARGEST_CONSTANT:
            self.constants[name] = onnx.numpy_helper.to_array(tensor)

    def read(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Raises `Mixes` at the first node that computes a row from others."""
        for node in nodes:
            if node.op_type == "Constant":
                self._read_constant(node)
            elif node.op_type not in _BREAKING:
                self._read_node(node)

    def _read_constant(self, node: onnx.NodeProto) -> None:
        for attribute in node.attribute:
            if attribute.name == "value":
                self.know(node.output[0], attribute.t)
            elif attribute.name in ("value_int", "value_ints", "value_float", "value_floats"):
                array = np.asarray(onnx.helper.get_attribute_value(attribute))
                self.ranks[node.output[0]], self.constants[node.output[0]] = array.ndim, array

    def _read_node(self, node: onnx.NodeProto) -> None:
        read = {name for name in (*node.input, *_read_inside(node)) if name}
        if read.isdisjoint(self.places) and read.isdisjoint(self.unsure):
            return
        self._check_decision(node)
        rule = RULES.get(node.op_type) if node.domain in ("", "ai.onnx", "ai.onnx.ml") else None
        found = rule(node, self._look(node)) if rule and read.isdisjoint(self.unsure) else None
        places = found if isinstance(found, tuple) else (found,) * len(node.output)
        self.places |= {name: place for name, place in zip(node.output, places, strict=False) if place}
        self.unsure.update(name for name in node.output if name not in self.places)

    def _look(self, node: onnx.NodeProto) -> Places:
        names = list(node.input)
        return Places(
            version=self.version,
            places=tuple(self.places.get(name) for name in names),
            ranks=tuple(place.rank if (place := self.places.get(name)) else self.ranks.get(name) for name in names),
            constants=tuple(self.constants.get(name) for name in names),
        )

    def _check_decision(self, node: onnx.NodeProto) -> None:
        """Raises `Mixes` where one decision is taken for all rows, by their values."""
        if node.op_type in _ONE_SCALE:
            raise Mixes(node, "chooses one scale for all rows")
        if node.op_type == "If" and self._depends(node.input[:1]):
            raise Mixes(node, "takes one branch for all rows, by their values")
        if node.op_type == "Loop" and self._depends((*node.input[:2], *_ends_by(node))):
            raise Mixes(node, "runs as often for all rows, by their values")
        if node.op_type == "Scan" and self._depends(node.input):
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
    """The nodes that an output depends on, in order."""
    needed, found = {value.name for value in graph.output}, list[onnx.NodeProto]()
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed.update((*node.input, *_read_inside(node)))
            found.append(node)
    return found[::-1]


def _read_inside(node: onnx.NodeProto) -> list[str]:
    """What the subgraphs of a node read, their own values among it."""
    names = list[str]()
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            names += [value.name for value in graph.output]
            for inner in graph.node:
                names += [*inner.input, *_read_inside(inner)]
    return names


def _ends_by(node: onnx.NodeProto) -> set[str]:
    """What decides, inside a Loop, whether it goes on: names outside of it."""
    body = next(attribute.g for attribute in node.attribute if attribute.name == "body")
    needed = {body.output[0].name}
    for inner in reversed(body.node):
        if needed & set(inner.output) and inner.op_type not in _BREAKING:
            needed.update((*inner.input, *_read_inside(inner)))
    outside: Mapping[str, str] = {value.name: name for value, name in zip(body.input, node.input, strict=False)}
    return {outside.get(name, name) for name in needed}
