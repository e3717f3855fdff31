"""Reads from a profile of ONNX Runtime what really ran: which kernels, where, on which element types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from graphkiln_backend.engines.base import Placement

_PRODUCTS = (
    {"Conv", "FusedConv", "NhwcConv", "NhwcFusedConv", "ConvTranspose", "ConvInteger", "QLinearConv", "QConv"}
    | {"MatMul", "FusedMatMul", "Gemm", "FusedGemm", "GemmFastGelu", "MatMulInteger", "MatMulIntegerToFloat"}
    | {"QLinearMatMul", "QGemm", "DynamicQuantizeMatMul", "Einsum"}
)
"""Operators that multiply and add, as ONNX Runtime names them after its own rewriting."""
_INTEGER_TYPES = {"int8", "uint8"}
_TYPE_NAMES = {"float": "fp32", "float16": "fp16", "bfloat16": "bf16", "double": "fp64"}


def read_placement(kernels: list[dict[str, Any]], asked: str, fused: Mapping[str, int]) -> Placement:
    """Counts the kernels of a profile.

    Args:
        kernels: The profile's events of nodes.
        asked: Provider that the graph should run on.
        fused: The graph's products by element type, where the provider shows whole graphs as single kernels: those
            that did not run elsewhere ran inside them.
    """
    ran = [event for event in kernels if event["name"].endswith("_kernel_time")]
    time_by_precision: Counter[str] = Counter()
    for event in ran:
        time_by_precision[_precision(event["args"])] += event["dur"] + 1
    products = [event for event in ran if event["args"].get("op_name") in _PRODUCTS]
    counts = Counter(_precision(event["args"]) for event in products)
    elsewhere = [event for event in products if event["args"].get("provider") != asked]
    if fused and any(event["args"].get("provider") == asked for event in ran):
        counts = Counter(fused) - Counter(_precision(event["args"]) for event in elsewhere)
    return Placement(
        nodes=dict(Counter(event["args"].get("provider", "unknown") for event in ran)),
        precision=time_by_precision.most_common(1)[0][0] if time_by_precision else "unknown",
        products=dict(counts),
        elsewhere=tuple(event["name"].removesuffix("_kernel_time") for event in elsewhere),
    )


def _precision(arguments: dict[str, Any]) -> str:
    """The narrowest arithmetic type among a kernel's inputs: integer kernels also read float scales."""
    types = {name for tensor in arguments.get("input_type_shape", []) for name in tensor}
    if types & _INTEGER_TYPES:
        return "int8"
    for name in ("bfloat16", "float16", "float", "double"):
        if name in types:
            return _TYPE_NAMES[name]
    return "integer"
