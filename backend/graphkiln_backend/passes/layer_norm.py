"""Layer norms that a source wrote out, mean by mean, become the one operator that engines have a kernel for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from onnxscript.rewriter import MatchResult, RewritePass, RewriteRuleClassBase
from onnxscript.rewriter.pattern import OrValue

from graphkiln_backend.passes.base import count
from graphkiln_backend.passes.edge import Edge


class _MeanOfSum(RewriteRuleClassBase):
    """`ReduceSum(x) * (1 / n)`: OneFlow's mean."""

    def pattern(self, op: Any, x: Any, axes: Any, share: Any) -> Any:
        return op.Mul(op.ReduceSum(x, axes, _outputs=["summed"]), share)

    def check(self, op: Any, x: Any, axes: Any, share: Any, summed: Any, **_: Any) -> MatchResult:  # noqa: ARG002
        result = MatchResult()
        if axes.const_value is None or share.const_value is None or x.shape is None:
            return result.fail("not constant")
        number = 1
        for axis in axes.const_value.numpy().reshape(-1):
            if not isinstance(x.shape[int(axis)], int):
                return result.fail("a size that varies")
            number *= x.shape[int(axis)]
        shares = share.const_value.numpy()
        if shares.size != 1 or shares.reshape(()) != shares.dtype.type(1 / number):
            return result.fail("not the mean")
        return result

    def rewrite(self, op: Any, x: Any, axes: Any, summed: Any, **_: Any) -> Any:
        # With all attributes, those at their defaults, too: else it is not the same as a mean that was written as one.
        return op.ReduceMean(x, axes, **summed.producer().attributes)


class _Scaled(RewriteRuleClassBase):
    """`(x - mean) * (1 / sqrt(mean((x - mean)^2) + epsilon)) * scale`, or the same with a division."""

    def pattern(self, op: Any, x: Any, epsilon: Any, scale: Any) -> Any:
        centered = op.Sub(x, op.ReduceMean(x, [-1], keepdims=1))
        square = OrValue([op.Mul(centered, centered), op.Pow(centered, 2)])
        deviation = op.Sqrt(op.Add(op.ReduceMean(square, [-1], keepdims=1), epsilon))
        return op.Mul(OrValue([op.Mul(centered, op.Reciprocal(deviation)), op.Div(centered, deviation)]), scale)

    def check(self, op: Any, x: Any, epsilon: Any, scale: Any, **_: Any) -> MatchResult:  # noqa: ARG002
        result = MatchResult()
        if epsilon.const_value is None or epsilon.const_value.size != 1:
            return result.fail("epsilon is not one constant")
        return result if _is_of_last_axis(scale, x) else result.fail("the scale is not of the last axis")

    def rewrite(self, op: Any, x: Any, epsilon: Any, scale: Any, **_: Any) -> Any:
        return op.LayerNormalization(x, scale, axis=-1, epsilon=float(epsilon.const_value.numpy().reshape(())))


class _Shifted(RewriteRuleClassBase):
    """A layer norm plus a constant."""

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
class FuseLayerNorm:
    """Finds layer norms of the last axis that are written out, and makes them one node."""

    name: str = "fuse-layer-norm"
    summary: str = "layer norms that are written out into one node"

    def requires(self, model: onnx_ir.Model) -> str:
        """A square root and a mean (or a sum, of which OneFlow makes its means)."""
        means = count(model, "ReduceMean") + count(model, "ReduceSum")
        return "" if means and count(model, "Sqrt") else "no mean with a square root"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Rewrites the means, then the norms, then what is added to them."""
        for rule in (_MeanOfSum, _Scaled, _Shifted):
            RewritePass((rule.rule(),))(model)  # type: ignore[no-untyped-call]
            CommonSubexpressionEliminationPass()(model)  # a mean that was written twice is one from here on
        return Edge()

    def ensures(self, model: onnx_ir.Model) -> str:  # noqa: ARG002 - other norms stay as they are
        """Nothing."""
        return ""
