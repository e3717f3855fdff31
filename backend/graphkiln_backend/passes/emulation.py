"""Emulates a lower precision with fp32 kernels, so that a lowered graph can be proven on any CPU."""

from __future__ import annotations

import onnx_ir

from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.casts import LOW_TYPES, Casts


def emulate(model: onnx_ir.Model, target: Precision) -> None:
    """Lets a lowered graph run where only fp32 kernels exist: values are kept in the type, sums are done in fp32.

    That is what processors with units for the type do, too. ONNX Runtime on a CPU has no bf16 kernels, and computes
    fp16 in fp32 without rounding what passes from one node to the next: overflow would go unseen.
    """
    casts = Casts(model, target)
    for node in list(model.graph):
        if node.op_type == "Cast":
            continue
        was_low = [value.dtype == LOW_TYPES[target] for value in node.outputs]
        casts.raise_inputs(node)
        for value, low in zip(node.outputs, was_low, strict=True):
            if low:
                casts.round_output(node, value)
