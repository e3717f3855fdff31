"""Fuse constant additions: into the bias of a convolution, or with a matrix product into a Gemm.

Residual additions stay: ONNX's Conv has no input for them, and ONNX Runtime and OpenVINO fuse them at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir
from onnxscript.rewriter import MatchResult, RewritePass, RewriteRuleClassBase
from onnxscript.rewriter.rules.common import (
    matmul_add_to_gemm_rule,
    transpose_a_matmul_add_to_gemm_rule,
    transpose_ab_matmul_add_to_gemm_rule,
    transpose_b_matmul_add_to_gemm_rule,
)

from graphkiln_backend.passes.base import Pass, count
from graphkiln_backend.passes.edge import Edge


class _ConvAdd(RewriteRuleClassBase):
    """`Conv(x, w[, b]) + c` with `c` constant per channel."""

    def pattern(self, op: Any, x: Any, constant: Any) -> Any:
        return op.Add(op.Conv(x, _allow_other_inputs=True, _outputs=["convolved"]), constant)

    def check(self, op: Any, *_: Any, convolved: Any, constant: Any, **__: Any) -> MatchResult:  # noqa: ARG002
        result = MatchResult()
        node = convolved.producer()
        weight = node.inputs[1].const_value if node is not None and node.inputs[1] is not None else None
        bias = node.inputs[2] if node is not None and len(node.inputs) > 2 else None
        if constant.const_value is None or weight is None or (bias is not None and bias.const_value is None):
            return result.fail("not constant")
        channels, spatial = weight.shape[0], len(weight.shape) - 2
        shape = list(constant.const_value.shape)
        if shape[-spatial - 1 :] != [channels, *[1] * spatial] or any(size != 1 for size in shape[: -spatial - 1]):
            return result.fail("not one value per channel")
        return result

    def rewrite(self, op: Any, x: Any, constant: Any, convolved: Any) -> Any:
        node = convolved.producer()
        bias = constant.const_value.numpy().reshape(-1)
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            bias = bias + node.inputs[2].const_value.numpy()
        name = f"{convolved.name}_bias"
        value = op.initializer(onnx_ir.tensor(np.ascontiguousarray(bias), name=name), name=name)
        return op.Conv(x, node.inputs[1], value, **node.attributes)


@dataclass(frozen=True)
class AddIntoProducer(Pass):
    """Fuse constant additions into the preceding convolution or matrix product."""

    name = "add-into-producer"
    summary = "constant additions into the convolution or product before them"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph without an Add."""
        return "" if count(model, "Add") else "no Add"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Rewrite `Conv + constant` and `MatMul + constant`."""
        rules = (
            *_ConvAdd.rule().commute(),  # type: ignore[no-untyped-call]
            transpose_ab_matmul_add_to_gemm_rule,
            transpose_a_matmul_add_to_gemm_rule,
            transpose_b_matmul_add_to_gemm_rule,
            matmul_add_to_gemm_rule,
        )
        RewritePass(rules)(model)
        return Edge()
