"""Division of a graph into parts that are computed one after another: stages, cut at every all-reduce.

A part computes with the same nodes as the whole graph. What passes from part to part keeps its name.
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
    """A part of a graph, by the names of its tensors.

    Attributes:
        stage: The stage that it belongs to.
        inputs: What it reads: inputs of the graph, and what earlier parts compute.
        outputs: What it computes and later parts read, or users.
        reduced: Of outputs that are summed over all shards: name -> the name of the sum.
    """

    stage: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduced: dict[str, str]


def find_parts(model: onnx_ir.Model, cuts: Sequence[int]) -> tuple[PartTensors, ...]:
    """The parts of a graph.

    Args:
        model: The graph, its nodes in the order in which they are computed.
        cuts: Positions of the first node of each stage but the first.

    Raises:
        LoweringError: An output of the graph is one of its inputs, or a weight: no part would compute it.
    """
    groups, reduced = _groups(model, cuts)
    users = {str(value.name) for value in model.graph.outputs}
    given = {str(value.name) for value in model.graph.inputs}
    computed = {str(value.name) for node in model.graph for value in node.outputs}
    if left := sorted(users - computed):
        raise LoweringError(
            "the graph cannot be split", attempts=(f"its output '{left[0]}' is computed by no node",),
            hint="leave `parallel` out",
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
            inputs += [name for name in given if name not in set().union(*reads)]  # a request brings it all the same
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
        part: One of its parts.
        target: The file; its weights may be put beside it.

    Raises:
        LoweringError: The element type of a tensor that passes from part to part is not known.
        OSError: It cannot be written.
    """
    graph = onnx_ir.convenience.extract(model.graph, inputs=list(part.inputs), outputs=list(part.outputs))
    graph.name = model.graph.name
    if unknown := [str(value.name) for value in graph.inputs if value.dtype is None]:
        raise LoweringError(
            "the graph cannot be split",
            attempts=(f"the element type of '{unknown[0]}', which would pass from part to part, is not known",),
            hint="leave `parallel` out",
        )
    save(onnx_ir.Model(graph, ir_version=model.ir_version), target)


def _groups(model: onnx_ir.Model, cuts: Sequence[int]) -> tuple[list[tuple[int, list[onnx_ir.Node]]], dict[str, str]]:
    """The nodes of each part with its stage, and what is summed up between parts: name -> name of the sum."""
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
    """Return the names that nodes read of others and of the graph's inputs, in order."""
    values = (value for node in nodes for value in values_read(node))
    return {str(value.name): None for value in values if not value.is_initializer()}
