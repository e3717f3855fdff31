"""Batch-norm folding: scale and shift of a trained batch norm become the weights and bias of what stands before it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules.common import (
    fuse_batchnorm_into_conv_rule,
    fuse_batchnorm_into_conv_transpose_rule,
    fuse_batchnorm_into_gemm_rule,
)

from graphkiln_backend.passes.base import count
from graphkiln_backend.passes.edge import Edge


@dataclass(frozen=True)
class FoldBatchNorm:
    """Folds batch norms into the convolution or matrix product before them."""

    name: str = "fold-batch-norm"
    summary: str = "batch norms into the convolutions before them"

    def requires(self, model: onnx_ir.Model) -> str:
        """A batch norm, and none that has its statistics from the request: the rules do not look at that."""
        norms = [node for node in model.graph if node.op_type == "BatchNormalization"]
        if any("training_mode" in node.attributes and node.attributes["training_mode"].as_int() for node in norms):
            return "batch norms in training mode"
        return "" if norms else "no batch norm"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Rewrites the weights."""
        rules = (
            fuse_batchnorm_into_conv_rule,
            fuse_batchnorm_into_conv_transpose_rule,
            fuse_batchnorm_into_gemm_rule,
        )
        RewritePass(rules)(model)
        return Edge()

    def ensures(self, model: onnx_ir.Model) -> str:
        """None is left that stands behind a convolution; those behind something else cannot be folded."""
        left = count(model, "BatchNormalization")
        return f"{left} stand behind no convolution" if left else ""
