"""Optimizations of a few nodes: clean-up, and fusions into convolutions, products and layer norms.

Residual additions stay: ONNX's Conv has no input for them, and ONNX Runtime and OpenVINO fuse them at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, IdentityEliminationPass, OutputFixPass
from onnxscript.rewriter import MatchResult, RewritePass, RewriteRuleClassBase
from onnxscript.rewriter.pattern import Constant, OrValue
from onnxscript.rewriter.rules import common
from onnxscript.rewriter.rules.common import (
    fuse_batchnorm_into_conv_rule,
    fuse_batchnorm_into_conv_transpose_rule,
    fuse_batchnorm_into_gemm_rule,
    fuse_pad_into_conv_rule,
    matmul_add_to_gemm_rule,
    normalize_pad_format_conv_rule,
    transpose_a_matmul_add_to_gemm_rule,
    transpose_ab_matmul_add_to_gemm_rule,
    transpose_b_matmul_add_to_gemm_rule,
)

from graphkiln_backend.passes.base import Pass, count
from graphkiln_backend.passes.edge import Edge


@dataclass(frozen=True)
class PadIntoConv(Pass):
    """Move constant zero padding of spatial axes into the following convolution."""

    name = "pad-into-conv"
    summary = "zero padding into the convolution behind it"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph without a Pad."""
        return "" if count(model, "Pad") else "no Pad"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Rewrite `Conv(Pad(x))`."""
        RewritePass((normalize_pad_format_conv_rule, fuse_pad_into_conv_rule))(model)
        return Edge()

    def remark(self, model: onnx_ir.Model) -> str:
        """Report the Pads that were left."""
        left = count(model, "Pad")
        return f"{left} left: not before a convolution, or not with zeros" if left else ""


@dataclass(frozen=True)
class FoldBatchNorm(Pass):
    """Fold batch norms into the weights and bias of the preceding convolution or matrix product."""

    name = "fold-batch-norm"
    summary = "batch norms into the convolutions before them"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph without batch norms, or with one in training mode, which the rules do not check for."""
        norms = [node for node in model.graph if node.op_type == "BatchNormalization"]
        if any("training_mode" in node.attributes and node.attributes["training_mode"].as_int() for node in norms):
            return "batch norms in training mode"
        return "" if norms else "no batch norm"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Fold every batch norm that follows a convolution or product."""
        rules = (
            fuse_batchnorm_into_conv_rule,
            fuse_batchnorm_into_conv_transpose_rule,
            fuse_batchnorm_into_gemm_rule,
        )
        RewritePass(rules)(model)
        return Edge()

    def remark(self, model: onnx_ir.Model) -> str:
        """Report the batch norms that were left."""
        left = count(model, "BatchNormalization")
        return f"{left} left: not after a convolution" if left else ""


@dataclass(frozen=True)
class CleanUp(Pass):
    """Remove redundant casts, transposes, reshapes, expands and identities; merge common subexpressions."""

    name = "clean-up"
    summary = "casts, transposes and reshapes without effect"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Repeat until nothing changes."""
        rules = (
            common.no_op_cast_rule,
            common.transpose_transpose_rule,
            common.no_op_transpose_rule,
            common.reshape_reshape_rule,
            common.unsqueeze_unsqueeze_rule,
            common.no_op_expand_rule,
            common.dropout_inference_rule,
            common.dropout_zero_rule,
        )
        RewritePass(rules)(model)
        _eliminate_identities(model)
        CommonSubexpressionEliminationPass()(model)
        if any(_repeats(graph) for graph in model.graph.subgraphs()):
            OutputFixPass()(model)
        return Edge()


def _repeats(graph: onnx_ir.Graph) -> bool:
    """Return True if two outputs of a loop body are one value, for which ONNX Runtime returns wrong results."""
    return len(set(graph.outputs)) < len(graph.outputs)


def _eliminate_identities(model: onnx_ir.Model) -> None:
    """Eliminate identities and restore output names, since two outputs of one value would get the same name."""
    names = [value.name for value in model.graph.outputs]
    IdentityEliminationPass()(model)
    if [value.name for value in model.graph.outputs] != names:
        OutputFixPass()(model)
        for value, name in zip(model.graph.outputs, names, strict=True):
            value.name = name


_TWO = Constant(2, rel_tol=0, abs_tol=0)  # by default a pattern takes 2.00001 for 2


class _MeanOfSum(RewriteRuleClassBase):
    """Match `ReduceSum(x) * (1 / n)`, OneFlow's mean."""

    def pattern(self, op: Any, x: Any, axes: Any, share: Any) -> Any:
        return op.Mul(op.ReduceSum(x, axes, _outputs=["summed"]), share)

    def check(self, op: Any, x: Any, axes: Any, share: Any, summed: Any, **_: Any) -> MatchResult:  # noqa: ARG002
        result = MatchResult()
        if axes.const_value is None or share.const_value is None or x.shape is None:
            return result.fail("not constant")
        number = 1
        for axis in axes.const_value.numpy().reshape(-1):
            if not isinstance(x.shape[int(axis)], int):
                return result.fail("dynamic size")
            number *= x.shape[int(axis)]
        shares = share.const_value.numpy()
        if shares.size != 1 or shares.reshape(()) != shares.dtype.type(1 / number):
            return result.fail("not the mean")
        return result

    def rewrite(self, op: Any, x: Any, axes: Any, summed: Any, **_: Any) -> Any:
        # All attributes are explicit, so that common subexpressions with means of other exporters are recognized.
        return op.ReduceMean(x, axes, **summed.producer().attributes)


class _Scaled(RewriteRuleClassBase):
    """Match `(x - mean) * (1 / sqrt(mean((x - mean)^2) + epsilon)) * scale`, or the same with a division."""

    def pattern(self, op: Any, x: Any, epsilon: Any, scale: Any) -> Any:
        centered = op.Sub(x, op.ReduceMean(x, [-1], keepdims=1))
        square = OrValue([op.Mul(centered, centered), op.Pow(centered, _TWO)])
        deviation = op.Sqrt(op.Add(op.ReduceMean(square, [-1], keepdims=1), epsilon))
        return op.Mul(OrValue([op.Mul(centered, op.Reciprocal(deviation)), op.Div(centered, deviation)]), scale)

    def check(self, op: Any, x: Any, epsilon: Any, scale: Any, **_: Any) -> MatchResult:  # noqa: ARG002
        result = MatchResult()
        if epsilon.const_value is None or epsilon.const_value.size != 1:
            return result.fail("epsilon is not a scalar constant")
        return result if _is_of_last_axis(scale, x) else result.fail("the scale is not of the last axis")

    def rewrite(self, op: Any, x: Any, epsilon: Any, scale: Any, **_: Any) -> Any:
        return op.LayerNormalization(x, scale, axis=-1, epsilon=float(epsilon.const_value.numpy().reshape(())))


class _Shifted(RewriteRuleClassBase):
    """Match a layer norm plus a constant."""

    def pattern(self, op: Any, x: Any, scale: Any, shift: Any) -> Any:
        return op.Add(op.LayerNormalization(x, scale, _outputs=["normed"]), shift)

    def check(self, op: Any, x: Any, shift: Any, **_: Any) -> MatchResult:  # noqa: ARG002
        result = MatchResult()
        return result if _is_of_last_axis(shift, x) else result.fail("the shift is not of the last axis")

    def rewrite(self, op: Any, x: Any, scale: Any, shift: Any, normed: Any) -> Any:
        return op.LayerNormalization(x, scale, shift, **normed.producer().attributes)


def _is_of_last_axis(value: Any, x: Any) -> bool:
    constant = value.const_value
    return constant is not None and x.shape is not None and list(constant.shape) == [x.shape[-1]]


@dataclass(frozen=True)
class FuseLayerNorm(Pass):
    """Replace decomposed layer norms of the last axis with LayerNormalization, which engines have kernels for."""

    name = "fuse-layer-norm"
    summary = "layer norms that are written out into one node"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph without a square root, or without a mean (or a sum, in OneFlow's form)."""
        means = count(model, "ReduceMean") + count(model, "ReduceSum")
        return "" if means and count(model, "Sqrt") else "no mean with a square root"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Rewrite means first, then the norms, then additions to them."""
        for rule in (_MeanOfSum, _Scaled, _Shifted):
            RewritePass((rule.rule(),))(model)  # type: ignore[no-untyped-call]
            CommonSubexpressionEliminationPass()(model)  # merge means that were computed twice
        return Edge()


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
