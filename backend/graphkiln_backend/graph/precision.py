"""Precisions: element types of convolutions and matrix products, and which can be lowered to which."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")


class Precision(enum.StrEnum):
    """A precision by the name that users write.

    `TF32` is fp32 with a short mantissa on NVIDIA's tensor cores: it is requested, never stored.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"

    @property
    def dtype(self) -> DType:
        """The element type of tensors in this precision."""
        return _DTYPES[self]

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype of tensors in this precision."""
        return self.dtype.numpy

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return self.numpy.itemsize

    @property
    def is_integer(self) -> bool:
        """True for integer arithmetic, which needs a calibrated graph."""
        return self is Precision.INT8

    @property
    def is_half(self) -> bool:
        """True for 16-bit floats, to which a saved fp32 graph can be lowered while it is loaded."""
        return self in (Precision.FP16, Precision.BF16)

    @property
    def kernels(self) -> Precision:
        """The precision that a runtime reports: none distinguishes tf32 from fp32."""
        return Precision.FP32 if self is Precision.TF32 else self

    def lowers_to(self, target: Precision) -> bool:
        """Return true if a graph saved in this precision can be lowered to another one while it is loaded."""
        return self is Precision.FP32 and target.is_half


# The precisions that a graph can be saved in.
SAVED = (Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8)

_DTYPES = {
    Precision.FP32: DType.FP32,
    Precision.TF32: DType.FP32,
    Precision.FP16: DType.FP16,
    Precision.BF16: DType.BF16,
    Precision.INT8: DType.INT8,
}
