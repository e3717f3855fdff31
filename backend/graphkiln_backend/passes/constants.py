"""Constant folding: what does not depend on an input is computed now."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir
from onnx_ir.passes.common import DeduplicateInitializersPass, InlinePass, LiftConstantsToInitializersPass
from onnxscript import optimizer

from graphkiln_backend.passes.edge import Edge

_MOST_ELEMENTS = 2**20


@dataclass(frozen=True)
class FoldConstants:
    """Computes what no input changes, and lifts constants to initializers, where other passes look for them."""

    name: str = "fold-constants"
    summary: str = "compute what no input changes"

    def requires(self, model: onnx_ir.Model) -> str:  # noqa: ARG002 - every graph may hold constants
        """Nothing."""
        return ""

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Folds; results of more than 2^20 elements are left to be computed, they would only swell the file."""
        InlinePass()(model)
        optimizer.fold_constants(
            model, onnx_shape_inference=True, input_size_limit=_MOST_ELEMENTS, output_size_limit=_MOST_ELEMENTS
        )
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        return Edge()

    def ensures(self, model: onnx_ir.Model) -> str:
        """No Constant node is left in the main graph."""
        left = sum(node.op_type == "Constant" for node in model.graph)
        return f"{left} constants left" if left else ""


@dataclass(frozen=True)
class ShareWeights:
    """Keeps equal weights once. After the folds: a weight that others use cannot be folded into."""

    name: str = "share-weights"
    summary: str = "equal weights are kept once"

    def requires(self, model: onnx_ir.Model) -> str:
        """Weights."""
        return "" if model.graph.initializers else "no weights"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Compares all of the same shape and type."""
        DeduplicateInitializersPass()(model)
        return Edge()

    def ensures(self, model: onnx_ir.Model) -> str:  # noqa: ARG002
        """Nothing."""
        return ""
