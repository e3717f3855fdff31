"""Pad into convolution: zeros that a Pad node writes into memory become the convolution's own padding."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules.common import fuse_pad_into_conv_rule, normalize_pad_format_conv_rule

from graphkiln_backend.passes.base import count
from graphkiln_backend.passes.edge import Edge


@dataclass(frozen=True)
class PadIntoConv:
    """Moves constant zero padding of the spatial axes into the convolution behind it."""

    name: str = "pad-into-conv"
    summary: str = "zero padding into the convolution behind it"

    def requires(self, model: onnx_ir.Model) -> str:
        """A Pad."""
        return "" if count(model, "Pad") else "no Pad"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Rewrites `Conv(Pad(x))`."""
        RewritePass((normalize_pad_format_conv_rule, fuse_pad_into_conv_rule))(model)
        return Edge()

    def ensures(self, model: onnx_ir.Model) -> str:
        """Says how many Pads stay: not zeros, or not before a convolution."""
        left = count(model, "Pad")
        return f"{left} stand before no convolution, or pad with other values" if left else ""
