"""Inputs and outputs by other names, in another layout: passes that change the edge of a graph.

Each says what it does twice: as nodes, and in numpy for the proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir
from onnx_ir.passes.common import OutputFixPass

from graphkiln_backend.graph.dtypes import AnyArray

_NCHW_TO_NHWC, _NHWC_TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


@dataclass(frozen=True)
class Rename:
    """Renames inputs and outputs.

    Attributes:
        inputs: Old name -> new name.
        outputs: Old name -> new name.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    name: str = "rename"
    summary: str = "inputs to INPUT_<i>, outputs to OUTPUT_<i>"

    def requires(self, model: onnx_ir.Model) -> str:
        """A name that changes."""
        values = (*model.graph.inputs, *model.graph.outputs)
        new = {**self.inputs, **self.outputs}
        return "" if any(new.get(str(value.name), value.name) != value.name for value in values) else "named so already"

    def __call__(self, model: onnx_ir.Model) -> None:
        """Other values that have such a name already get another one."""
        OutputFixPass()(model)
        edge = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)}
        taken = {*self.inputs.values(), *self.outputs.values()}
        for node in model.graph:
            for value in node.outputs:
                if id(value) not in edge and value.name in taken:
                    value.name = f"{value.name}_inner"
        for values, names in ((model.graph.inputs, self.inputs), (model.graph.outputs, self.outputs)):
            for value in values:
                value.name = names.get(str(value.name), value.name)

    def ensures(self, model: onnx_ir.Model) -> str:
        """Every name is there."""
        found = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
        missing = {*self.inputs.values(), *self.outputs.values()} - found
        return f"missing: {', '.join(sorted(missing))}" if missing else ""

    def to_source(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """By their old names."""
        old = {new: before for before, new in self.inputs.items()}
        return {old.get(name, name): array for name, array in feeds.items()}

    def from_source(self, outputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """By their new names."""
        return {self.outputs.get(name, name): array for name, array in outputs.items()}


@dataclass(frozen=True)
class Nhwc:
    """Takes and gives images as `[batch, height, width, channels]`.

    Attributes:
        inputs: Whether inputs of rank 4 are turned.
        outputs: Whether outputs of rank 4 are turned.
    """

    inputs: bool
    outputs: bool
    name: str = "nhwc"
    summary: str = "images in and out as [batch, height, width, channels]"

    def requires(self, model: onnx_ir.Model) -> str:
        """A tensor of rank 4 at the edge."""
        ranks = [len(value.shape) for value in (*model.graph.inputs, *model.graph.outputs) if value.shape is not None]
        return "" if 4 in ranks else "no input or output of rank 4"

    def __call__(self, model: onnx_ir.Model) -> None:
        """Puts transposes at the edge; runtimes move them inwards."""
        if self.inputs:
            for value in [value for value in model.graph.inputs if _rank(value) == 4]:
                prepend(model, value, "Transpose", {"perm": _NHWC_TO_NCHW}, shape=_turned(value, _NCHW_TO_NHWC))
        if self.outputs:
            for value in [value for value in model.graph.outputs if _rank(value) == 4]:
                append(model, value, "Transpose", {"perm": _NCHW_TO_NHWC}, shape=_turned(value, _NCHW_TO_NHWC))

    def ensures(self, model: onnx_ir.Model) -> str:  # noqa: ARG002 - by construction
        """Nothing."""
        return ""

    def to_source(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """As `[batch, channels, height, width]`."""
        return {n: a.transpose(_NHWC_TO_NCHW).copy() if self.inputs and a.ndim == 4 else a for n, a in feeds.items()}

    def from_source(self, outputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """As `[batch, height, width, channels]`."""
        turn = self.outputs
        return {n: a.transpose(_NCHW_TO_NHWC).copy() if turn and a.ndim == 4 else a for n, a in outputs.items()}


@dataclass(frozen=True)
class Softmax:
    """Turns scores into probabilities, along the last axis of the first output."""

    name: str = "softmax"
    summary: str = "scores to probabilities"

    def requires(self, model: onnx_ir.Model) -> str:
        """That it is not there yet."""
        producer = model.graph.outputs[0].producer()
        return "the output is a Softmax already" if producer is not None and producer.op_type == "Softmax" else ""

    def __call__(self, model: onnx_ir.Model) -> None:
        """Appends a Softmax."""
        value = model.graph.outputs[0]
        append(model, value, "Softmax", {"axis": -1}, shape=value.shape)

    def ensures(self, model: onnx_ir.Model) -> str:  # noqa: ARG002
        """Nothing."""
        return ""

    def to_source(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """The same."""
        return dict(feeds)

    def from_source(self, outputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """Probabilities of the first one."""
        name, scores = next(iter(outputs.items()))
        exponents = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
        return {**outputs, name: (exponents / exponents.sum(axis=-1, keepdims=True)).astype(scores.dtype)}


@dataclass(frozen=True)
class TopK:
    """Answers the k largest scores of the first output and their indices, instead of all scores.

    Attributes:
        k: How many.
        index_name: Name of the new output of indices, INT64 `[batch, k]`.
    """

    k: int
    index_name: str = "INDEX_0"
    name: str = "top-k"
    summary: str = "the k best scores and their indices"

    def requires(self, model: onnx_ir.Model) -> str:  # noqa: ARG002
        """Nothing."""
        return ""

    def __call__(self, model: onnx_ir.Model) -> None:
        """Replaces the first output by two."""
        value = model.graph.outputs[0]
        axes = list(value.shape or ())
        size = onnx_ir.Value(name=f"{value.name}_k", const_value=onnx_ir.tensor(np.array([self.k], np.int64)))
        model.graph.register_initializer(size)
        shape = onnx_ir.Shape([*axes[:-1], self.k])
        top = append(model, value, "TopK", {"axis": -1}, shape=shape, constants=[size], outputs=2)
        indices = top.outputs[1]
        indices.name, indices.dtype, indices.shape = self.index_name, onnx_ir.DataType.INT64, shape
        model.graph.outputs.insert(1, indices)

    def ensures(self, model: onnx_ir.Model) -> str:  # noqa: ARG002
        """Nothing."""
        return ""

    def to_source(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """The same."""
        return dict(feeds)

    def from_source(self, outputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """The best of the first one, and where they were."""
        (name, scores), *others = outputs.items()
        order = np.argsort(-scores, axis=-1, kind="stable")[..., : self.k]
        best = np.take_along_axis(scores, order, axis=-1)
        return {name: best, self.index_name: order.astype(np.int64), **dict(others)}


def prepend(
    model: onnx_ir.Model,
    value: onnx_ir.Value,
    op_type: str,
    attributes: Mapping[str, Any],
    *,
    shape: onnx_ir.Shape | None,
    dtype: onnx_ir.DataType | None = None,
) -> onnx_ir.Node:
    """Puts a node between an input of the graph and everything that reads it; the input keeps its name.

    Args:
        model: The graph.
        value: The input.
        op_type: Of the node.
        attributes: Of the node.
        shape: What the input becomes.
        dtype: What the input becomes; as before when None.
    """
    name = value.name
    fresh = onnx_ir.Value(name=name, shape=shape, type=onnx_ir.TensorType(dtype) if dtype else value.type)
    node = onnx_ir.node(op_type, [fresh], attributes)
    result = node.outputs[0]
    result.name, result.shape, result.type = f"{name}_{op_type.lower()}", value.shape, value.type
    onnx_ir.convenience.replace_all_uses_with(value, result)
    position = list(model.graph.inputs).index(value)
    value.name = f"{name}_before"
    model.graph.inputs[position] = fresh
    model.graph.insert_before(model.graph[0], node)
    return node


def append(
    model: onnx_ir.Model,
    value: onnx_ir.Value,
    op_type: str,
    attributes: Mapping[str, Any],
    *,
    shape: onnx_ir.Shape | None,
    constants: list[onnx_ir.Value] | None = None,
    outputs: int = 1,
) -> onnx_ir.Node:
    """Puts a node behind an output of the graph; its first result takes the output's place and name.

    Args:
        model: The graph.
        value: The output.
        op_type: Of the node.
        attributes: Of the node.
        shape: What the output becomes.
        constants: Further inputs of the node.
        outputs: How many results the node has.
    """
    name = value.name
    position = list(model.graph.outputs).index(value)
    node = onnx_ir.node(op_type, [value, *(constants or [])], attributes, num_outputs=outputs)
    result = node.outputs[0]
    value.name = f"{name}_before_{op_type.lower()}"
    result.name, result.shape, result.type = name, shape, value.type
    model.graph.append(node)
    model.graph.outputs[position] = result
    return node


def _rank(value: onnx_ir.Value) -> int:
    return len(value.shape) if value.shape is not None else -1


def _turned(value: onnx_ir.Value, order: tuple[int, ...]) -> onnx_ir.Shape:
    return onnx_ir.Shape([(value.shape or ())[axis] for axis in order])
