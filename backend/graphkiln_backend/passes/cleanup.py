"""Clean-up: casts, transposes, reshapes and copies that undo each other or do nothing."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, IdentityEliminationPass, OutputFixPass
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules import common

from graphkiln_backend.passes.edge import Edge


@dataclass(frozen=True)
class CleanUp:
    """Removes casts, transposes, reshapes, expands and identities without effect; computes equal things once."""

    name: str = "clean-up"
    summary: str = "casts, transposes and reshapes without effect"

    def requires(self, model: onnx_ir.Model) -> str:  # noqa: ARG002
        """Nothing."""
        return ""

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Rewrites until nothing changes."""
        rules = (
            common.cast_cast_rule,
            common.no_op_cast_rule,
            common.transpose_transpose_rule,
            common.no_op_transpose_rule,
            common.reshape_reshape_rule,
            common.unsqueeze_unsqueeze_rule,
            common.no_op_expand_rule,
            common.add_0_rule,
            common.sub_0_rule,
            common.mul_by_1_rule,
            common.div_by_1_rule,
            common.dropout_inference_rule,
            common.dropout_zero_rule,
        )
        RewritePass(rules)(model)
        _eliminate_identities(model)
        CommonSubexpressionEliminationPass()(model)
        if any(_repeats(graph) for graph in model.graph.subgraphs()):
            OutputFixPass()(model)
        return Edge()

    def ensures(self, model: onnx_ir.Model) -> str:  # noqa: ARG002
        """Nothing."""
        return ""


def _repeats(graph: onnx_ir.Graph) -> bool:
    """Whether two outputs of a body are one value, which ONNX Runtime's loops compute wrongly."""
    return len(set(graph.outputs)) < len(graph.outputs)


def _eliminate_identities(model: onnx_ir.Model) -> None:
    """Outputs keep their names, also two of one value: the elimination would give both the same."""
    names = [value.name for value in model.graph.outputs]
    IdentityEliminationPass()(model)
    if [value.name for value in model.graph.outputs] != names:
        OutputFixPass()(model)
        for value, name in zip(model.graph.outputs, names, strict=True):
            value.name = name
