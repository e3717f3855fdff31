"""Which operators multiply integers, and where their inputs stand."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Places:
    """Where a product's inputs stand.

    Attributes:
        activation: Place of the activation.
        activation_zero: Of its zero point.
        weight: Of the weight.
        weight_zero: Of its zero point.
    """

    activation: int
    activation_zero: int
    weight: int
    weight_zero: int


# Products of integers that are cut off; `ConvInteger` is not. Source: operators of ONNX 1.23 and ONNX Runtime 1.32.
PRODUCTS = {
    "QLinearMatMul": Places(0, 2, 3, 5),
    "QLinearConv": Places(0, 2, 3, 5),
    "QGemm": Places(0, 2, 3, 5),
    "MatMulInteger": Places(0, 2, 1, 3),
    "MatMulIntegerToFloat": Places(0, 4, 1, 5),
    "DynamicQuantizeMatMul": Places(0, 0, 1, 3),
    "QAttention": Places(0, 6, 1, 7),
}
_NAMES = re.compile("|".join(PRODUCTS).encode())


def has_integer_products(graph_path: Path) -> bool:
    """Whether products stand in a file as integers; a weight or name that reads like one counts, too."""
    if not graph_path.is_file() or not graph_path.stat().st_size:
        return False  # which ONNX Runtime says
    with graph_path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _NAMES.search(content) is not None
