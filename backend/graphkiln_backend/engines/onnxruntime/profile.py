"""Reads from a profile of ONNX Runtime what really ran: which kernels, where, on which element types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from graphkiln_backend.engines.base import KernelType, Placement
from graphkiln_backend.graph.precision import Precision

_PRODUCTS = (
    {"Conv", "FusedConv", "NhwcConv", "NhwcFusedConv", "ConvTranspose", "ConvInteger", "QLinearConv", "QConv"}
    | {"MatMul", "FusedMatMul", "Gemm", "FusedGemm", "GemmFastGelu", "MatMulInteger", "MatMulIntegerToFloat"}
    | {"QLinearMatMul", "QGemm", "DynamicQuantizeMatMul", "Einsum"}
)
"""Operators that multiply and add, as ONNX Runtime names them after its own rewriting."""
_KERNEL_TIME = "_kernel_time"
"""Ends the name of the event of a kernel that ran."""
_KERNEL_TYPES: tuple[tuple[str, KernelType], ...] = (
    ("int8", Precision.INT8),
    ("uint8", Precision.INT8),
    ("bfloat16", Precision.BF16),
    ("float16", Precision.FP16),
    ("float", Precision.FP32),
    ("double", "fp64"),
)
"""ONNX Runtime's names of element types, the narrowest first."""


def summarize_profile(
    events: Sequence[dict[str, Any]], provider: str, fused_products: Mapping[KernelType, int]
) -> Placement:
    """Counts the kernels of a profile.

    Args:
        events: The profile.
        provider: The execution provider that the graph should run on.
        fused_products: The graph's products by element type, where the provider shows whole graphs as single kernels:
            those that did not run elsewhere ran inside them.
    """
    kernels = [event for event in events if _is_kernel(event)]
    duration_by_type: Counter[KernelType] = Counter()
    for kernel in kernels:
        duration_by_type[_kernel_type(kernel)] += kernel["dur"] + 1
    products = [kernel for kernel in kernels if kernel["args"].get("op_name") in _PRODUCTS]
    elsewhere = [kernel for kernel in products if _provider(kernel) != provider]
    counts: Counter[KernelType] = Counter(map(_kernel_type, products))
    if fused_products and any(_provider(kernel) == provider for kernel in kernels):
        counts = Counter(fused_products) - Counter(map(_kernel_type, elsewhere))
    return Placement(
        nodes=dict(Counter(map(_provider, kernels))),
        precision=duration_by_type.most_common(1)[0][0] if duration_by_type else "unknown",
        products=dict(counts),
        elsewhere=tuple(kernel["name"].removesuffix(_KERNEL_TIME) for kernel in elsewhere),
    )


def seconds_of_nodes(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each node by name: the median of the times that it ran.

    Args:
        events: The profile, of one run or several.
    """
    from statistics import median  # 5 ms, which a server need not pay

    durations: dict[str, list[float]] = {}
    for event in filter(_is_kernel, events):
        durations.setdefault(event["name"].removesuffix(_KERNEL_TIME), []).append(event["dur"] / 1e6)
    return {name: median(taken) for name, taken in durations.items()}


def _is_kernel(event: dict[str, Any]) -> bool:
    return event.get("cat") == "Node" and "args" in event and event["name"].endswith(_KERNEL_TIME)


def _provider(kernel: dict[str, Any]) -> str:
    return str(kernel["args"].get("provider", "unknown"))


def _kernel_type(kernel: dict[str, Any]) -> KernelType:
    """The narrowest arithmetic type among a kernel's inputs: integer kernels also read float scales."""
    types = {name for tensor in kernel["args"].get("input_type_shape", []) for name in tensor}
    return next((kernel_type for name, kernel_type in _KERNEL_TYPES if name in types), "integer")
