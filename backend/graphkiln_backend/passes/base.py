"""Base of passes, why_skip -> call -> remark, and the loop that runs passes.

A pass rewrites a graph in place and returns what it did to the graph's edge. `why_skip` says why there is nothing to
do, `remark` what was not reached. After every pass the graph is checked by ONNX's own checker, so that a broken one is
the fault of a pass with a name.

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
# Source: ONNX Runtime 1.31, `get_all_operator_schema`, without those that `onnx.defs` knows.
_RUNTIME_OPERATORS = frozenset(
    (
        *("Affine", "Crop", "DynamicSlice", "GRUUnit", "GivenTensorFill", "ImageScaler", "ParametricSoftplus"),
        *("Scale", "ScaledTanh", "SimplifiedLayerNormalization"),
    )
)
_PROTOBUF_LIMIT = 2**31 - 1


class Pass(ABC):
    """One rewrite of a graph."""

    name: ClassVar[str]  # on the command line
    summary: ClassVar[str]  # a few words for users

    def why_skip(self, model: onnx_ir.Model) -> str:  # noqa: ARG002 - for those that always run
        """Return why to skip this graph, which the pass has nothing to do for; empty to run."""
        return ""

    @abstractmethod
    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Rewrite the graph in place; return the change of its inputs and outputs, `Edge()` for none."""

    def remark(self, model: onnx_ir.Model) -> str:  # noqa: ARG002 - for those that always reach all
        """Return what the pass could not do, or how much it did; empty for nothing to say."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassReport:
    """Result of a pass.

    Attributes:
        name: The pass.
        nodes_before: Number of nodes.
        nodes_after: Number of nodes.
        seconds: Time it took.
        note: Why it had nothing to do, or what was left, or empty.
        ran: Whether it had something to do.
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
        reports: One for each pass, in order.
        edge: How the inputs and outputs changed.
    """

    reports: tuple[PassReport, ...]
    edge: Edge

    def then(self, other: Rewritten) -> Rewritten:
        """Join two results, these passes first."""
        return Rewritten(reports=(*self.reports, *other.reports), edge=self.edge.then(other.edge))


def run_passes(model: onnx_ir.Model, passes: Sequence[Pass]) -> Rewritten:
    """Run passes in order, in place.

    Raises:
        ConversionError: A pass failed, or left an invalid graph; the message names it.
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
            raise ConversionError(
                f"the pass '{graph_pass.name}' failed: {type(error).__name__}: {error}",
                hint=f"leave it out (--skip {graph_pass.name}) and report it",
            ) from error
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
        raise ConversionError(
            f"the pass '{name}' left a graph that is not valid: {error}",
            hint=f"leave it out (--skip {name}) and report it",
        ) from error


def _with_all_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The checker asks for the shape of each output; runtimes do not, and that of an `If` may have no fixed rank."""
    for value in proto.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    return proto


def _without_runtime_operators(proto: onnx.ModelProto) -> onnx.ModelProto:
    """For the checker: ONNX Runtime has operators in ONNX's own domain that ONNX does not know.

    Such as SimplifiedLayerNormalization, which its optimizer of transformers leaves in the graphs that it fuses.
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
