"""Pipeline parallelism: split a graph into parts that run in sequence, at stage boundaries and all-reduces.

Parts keep the nodes and tensor names of the whole graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.node_costs import ALL_REDUCE, values_read


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTensors:
    """Tensor names of a part of a graph.

    Attributes:
        stage: Index of the stage.
        inputs: Graph inputs and outputs of earlier parts that the part reads.
        outputs: Graph outputs and tensors for later parts that the part computes.
        reduced: Outputs that are summed over all shards -> name of the sum.
    """

    stage: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduced: dict[str, str]


def find_parts(model: onnx_ir.Model, cuts: Sequence[int]) -> tuple[PartTensors, ...]:
    """Return the parts of a graph.

    Args:
        model: A topologically sorted graph.
        cuts: Position of the first node of each stage after the first.

    Raises:
        LoweringError: An output of the graph is an input or a weight, so that no part computes it.
    """
    groups, reduced = _groups(model, cuts)
    users = {str(value.name) for value in model.graph.outputs}
    given = {str(value.name) for value in model.graph.inputs}
    computed = {str(value.name) for node in model.graph for value in node.outputs}
    if left := sorted(users - computed):
        raise LoweringError(
            "the graph cannot be split", attempts=(f"its output '{left[0]}' is computed by no node",),
            hint="remove `parallel` from the settings",
        )  # fmt: skip
    reads = [_read_names(nodes) for _, nodes in groups]
    parts = []
    for number, (stage, nodes) in enumerate(groups):
        written = [str(value.name) for node in nodes for value in node.outputs if value.name]
        later = users.union(*reads[number + 1 :], reduced)
        outputs = [name for name in written if name in later]
        own = set(written)
        inputs = [name for name in reads[number] if name not in own]
        if number == 0:
            inputs += [name for name in given if name not in set().union(*reads)]  # unused inputs go to the first part
        if outputs:
            parts.append(
                PartTensors(
                    stage=stage,
                    inputs=tuple(inputs),
                    outputs=tuple(outputs),
                    reduced={name: reduced[name] for name in outputs if name in reduced},
                )
            )
    return tuple(parts)


def write_part(model: onnx_ir.Model, part: PartTensors, target: Path) -> None:
    """Write a part as a separate graph.

    Args:
        model: The whole graph; not changed.
        part: The part to write.
        target: File to write; large weights are written beside it.

    Raises:
        LoweringError: The element type of a tensor between parts is unknown.
        OSError: The file cannot be written.
    """
    graph = onnx_ir.convenience.extract(model.graph, inputs=list(part.inputs), outputs=list(part.outputs))
    graph.name = model.graph.name
    if unknown := [str(value.name) for value in graph.inputs if value.dtype is None]:
        raise LoweringError(
            "the graph cannot be split",
            attempts=(f"the element type of '{unknown[0]}', a tensor between parts, is unknown",),
            hint="remove `parallel` from the settings",
        )
    save(onnx_ir.Model(graph, ir_version=model.ir_version), target)


def _groups(model: onnx_ir.Model, cuts: Sequence[int]) -> tuple[list[tuple[int, list[onnx_ir.Node]]], dict[str, str]]:
    """Return stage and nodes of each part, and the all-reduces between parts: partial sum -> sum."""
    groups: list[tuple[int, list[onnx_ir.Node]]] = [(0, [])]
    reduced: dict[str, str] = {}
    for position, node in enumerate(model.graph):
        stage = sum(cut <= position for cut in cuts)
        if node.op_type == ALL_REDUCE:
            reduced[str(node.inputs[0].name)] = str(node.outputs[0].name)  # type: ignore[union-attr]
            groups.append((stage, []))
            continue
        if stage != groups[-1][0]:
            groups.append((stage, []))
        groups[-1][1].append(node)
    return [(stage, nodes) for stage, nodes in groups if nodes], reduced


def _read_names(nodes: Sequence[onnx_ir.Node]) -> dict[str, None]:
    """Return the names of values that nodes read, without weights, in order."""
    values = (value for node in nodes for value in values_read(node))
    return {str(value.name): None for value in values if not value.is_initializer()}
