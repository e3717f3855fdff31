"""Pass pipeline: the passes of a conversion in order, and the fusions that need no file of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, IdentityEliminationPass, OutputFixPass
from onnxscript.rewriter import MatchResult, RewritePass, RewriteRuleClassBase
from onnxscript.rewriter.pattern import OrValue
from onnxscript.rewriter.rules import common
from onnxscript.rewriter.rules.common import (
    fuse_batchnorm_into_conv_rule,
    fuse_batchnorm_into_conv_transpose_rule,
    fuse_batchnorm_into_gemm_rule,
    fuse_pad_into_conv_rule,
    normalize_pad_format_conv_rule,
)

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.passes.addition import AddIntoProducer
from graphkiln_backend.passes.base import Pass, count
from graphkiln_backend.passes.constants import FoldConstants, ShareWeights
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.passes.edge_passes import EmbedPreprocess, Nhwc, PruneOutputs, Rename, Softmax, TopK


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
        square = OrValue([op.Mul(centered, centered), op.Pow(centered, 2)])
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


# Passes that run by default. None changes an output.
OPTIMIZATIONS: tuple[Pass, ...] = (
    FoldConstants(),
    CleanUp(),
    FuseLayerNorm(),
    FoldBatchNorm(),
    PadIntoConv(),
    AddIntoProducer(),
    ShareWeights(),
)


def edge_passes(
    model: onnx_ir.Model,
    *,
    outputs: tuple[str, ...] = (),
    keep_names: bool = False,
    preprocess: Preprocess | None = None,
    softmax: bool = False,
    top_k: int = 0,
    nhwc: bool = False,
) -> tuple[Pass, ...]:
    """Return the requested passes that change inputs and outputs.

    Args:
        model: The graph, with the names of its source.
        outputs: Outputs to keep; empty for all.
        keep_names: Keep the source's names instead of `INPUT_<i>` and `OUTPUT_<i>`.
        preprocess: Normalization to embed, or None to leave it to the client.
        softmax: Return probabilities.
        top_k: Number of best scores to return with their indices; 0 for all scores.
        nhwc: Convert images and feature maps to `[batch, height, width, channels]`.
    """
    passes: list[Pass] = []
    names = [str(value.name) for value in model.graph.outputs]
    if outputs:
        passes.append(PruneOutputs(outputs))
        names = [name for name in names if name in outputs]
    if not keep_names:
        inputs = {str(value.name): f"INPUT_{number}" for number, value in enumerate(model.graph.inputs)}
        passes.append(Rename(inputs, {name: f"OUTPUT_{number}" for number, name in enumerate(names)}))
    if softmax:
        passes.append(Softmax())
    if top_k:
        passes.append(TopK(top_k))
    if preprocess:
        passes.append(EmbedPreprocess(preprocess))
    if nhwc:
        passes.append(Nhwc(inputs=preprocess is None, outputs=True))
    return tuple(passes)


def without(passes: Sequence[Pass], skipped: Sequence[str]) -> tuple[Pass, ...]:
    """Remove passes by name.

    Raises:
        ConversionError: No pass has the name.
    """
    names = [graph_pass.name for graph_pass in passes]
    for name in skipped:
        if name not in names:
            raise ConversionError(f"there is no pass '{name}' to skip", hint=did_you_mean(name, names))
    return tuple(graph_pass for graph_pass in passes if graph_pass.name not in skipped)


def catalog() -> tuple[tuple[Pass, str], ...]:
    """Return every pass with the condition under which it runs, in order, for `graphkiln convert --explain`."""
    return (
        *((graph_pass, "always") for graph_pass in OPTIMIZATIONS),
        (PruneOutputs(()), "--outputs"),
        (Rename(), "without --keep-names"),
        (Softmax(), "--softmax"),
        (TopK(1), "--top-k"),
        (EmbedPreprocess(Preprocess()), "--input uint8-nhwc"),
        (Nhwc(inputs=True, outputs=True), "--layout nhwc"),
    )
