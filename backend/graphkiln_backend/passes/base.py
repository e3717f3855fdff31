"""Interface of graph passes, and the loop that runs them.

A pass rewrites a graph in place and returns the change to the graph's inputs and outputs (an `Edge`). `why_skip`
returns the reason to skip a graph; `remark` reports nodes that were left. The ONNX checker runs after every pass, so
that an invalid graph is attributed to the pass that produced it.

Source: the pattern of onnx/ir-py, `passes/_pass_infra.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx
import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass, TopologicalSortPass

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes.edge import Edge

_RUNTIME_DOMAIN = "ai.onnxruntime"
# Source: ONNX Runtime 1.31, `get_all_operator_schema`, minus the operators in `onnx.defs`.
_RUNTIME_OPERATORS = frozenset(
    (
        *("Affine", "Crop", "DynamicSlice", "GRUUnit", "GivenTensorFill", "ImageScaler", "ParametricSoftplus"),
        *("Scale", "ScaledTanh", "SimplifiedLayerNormalization"),
    )
)
_PROTOBUF_LIMIT = 2**31 - 1


class PassError(ConversionError):
    """A pass failed, or produced an invalid graph.

    Attributes:
        name: Name of the pass.
        problem: What happened.
    """

    def __init__(self, name: str, problem: str) -> None:
        hint = f"skip the pass (--skip {name}) and report the error"
        super().__init__(f"the pass '{name}' {problem}", hint=hint)
        self.name, self.problem = name, f"it {problem}"


class Pass(ABC):
    """One rewrite of a graph."""

    name: ClassVar[str]  # on the command line
    summary: ClassVar[str]  # a few words for users

    def why_skip(self, model: onnx_ir.Model) -> str:  # noqa: ARG002 - the default always runs
        """Return the reason to skip this graph; empty to run."""
        return ""

    @abstractmethod
    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Rewrite the graph in place; return the change to its inputs and outputs, `Edge()` for none."""

    def remark(self, model: onnx_ir.Model) -> str:  # noqa: ARG002 - the default has no remark
        """Return a note on the nodes that were rewritten or left; may be empty."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassReport:
    """Result of a pass.

    Attributes:
        name: Name of the pass.
        note: Reason for skipping, or the remark; may be empty.
        ran: False if the pass was skipped.
    """

    name: str
    nodes_before: int
    nodes_after: int
    seconds: float
    note: str = ""
    ran: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """Result of several passes on a graph.

    Attributes:
        reports: One per pass, in order.
        edge: Combined change to the inputs and outputs.
    """

    reports: tuple[PassReport, ...]
    edge: Edge

    def then(self, other: Rewritten) -> Rewritten:
        """Concatenate two results; `other` ran second."""
        return Rewritten(reports=(*self.reports, *other.reports), edge=self.edge.then(other.edge))


def run_passes(model: onnx_ir.Model, passes: Sequence[Pass]) -> Rewritten:
    """Run passes in order, in place.

    Raises:
        PassError: A pass failed or produced an invalid graph.
        ConversionError: A pass refuses the graph.
    """
    reports, edge = [], Edge()
    for graph_pass in passes:
        report, change = _run(model, graph_pass)
        reports.append(report)
        edge = edge.then(change)
    return Rewritten(reports=tuple(reports), edge=edge)


def _run(model: onnx_ir.Model, graph_pass: Pass) -> tuple[PassReport, Edge]:
    before, begun, edge = model.graph.num_nodes(), time.perf_counter(), Edge()
    note = graph_pass.why_skip(model)
    ran = not note
    if ran:
        try:
            edge = graph_pass(model)
            _tidy(model)
            note = graph_pass.remark(model)
        except ConversionError:
            raise
        except Exception as error:
            raise PassError(graph_pass.name, f"failed: {type(error).__name__}: {error}") from error
        _check(model, graph_pass.name)
    report = PassReport(
        name=graph_pass.name,
        nodes_before=before,
        nodes_after=model.graph.num_nodes(),
        seconds=time.perf_counter() - begun,
        note=note,
        ran=ran,
    )
    return report, edge


def _tidy(model: onnx_ir.Model) -> None:
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    TopologicalSortPass()(model)


def _check(model: onnx_ir.Model, name: str) -> None:
    if weight_bytes(model) > _PROTOBUF_LIMIT // 2:
        return  # cannot be serialized in memory; the runtime will check it
    try:
        onnx.checker.check_model(_without_runtime_operators(_with_all_shapes(onnx_ir.to_proto(model))))
    except onnx.checker.ValidationError as error:
        raise PassError(name, f"produced an invalid graph: {error}") from error


def _with_all_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Add placeholder output shapes: the checker requires them, but an output of `If` may have no fixed rank."""
    for value in proto.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    return proto


def _without_runtime_operators(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Move ONNX Runtime's operators out of ONNX's domain, where the checker would reject them.

    ONNX Runtime's transformer optimizer emits SimplifiedLayerNormalization there, for example.
    """
    unknown = [node for node in proto.graph.node if not node.domain and node.op_type in _RUNTIME_OPERATORS]
    for node in unknown:
        node.domain = _RUNTIME_DOMAIN
    if unknown:
        proto.opset_import.add(domain=_RUNTIME_DOMAIN, version=1)
    return proto


def weight_bytes(model: onnx_ir.Model) -> int:
    """Bytes of the main graph's weights."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def count(model: onnx_ir.Model, op_type: str) -> int:
    """Count the nodes of a type in the main graph."""
    return sum(node.op_type == op_type for node in model.graph)
