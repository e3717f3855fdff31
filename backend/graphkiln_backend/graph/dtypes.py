"""Element types by Triton's names, and their equivalents in numpy and the runtimes.

Source: KServe v2 protocol, "Tensor Data Types"; `onnx.TensorProto.DataType`; ONNX Runtime's `NodeArg.type`.
"""

from __future__ import annotations

import enum
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    import ml_dtypes
    import numpy as np
    import numpy.typing as npt
else:
    ml_dtypes = LazyModule("ml_dtypes")
    np = LazyModule("numpy")

AnyArray: TypeAlias = "npt.NDArray[np.generic]"


class DType(enum.StrEnum):
    """Element type of a tensor, by Triton's name.

    `BF16` arrays have the dtype `ml_dtypes.bfloat16`, like in tritonclient. `BYTES` arrays contain objects (`bytes` or
    `str`).
    """

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    BF16 = "BF16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype of this element type."""
        return _numpy_types()[self]

    @property
    def bytes(self) -> int:
        """Size of an element in bytes; 0 for text."""
        return _BYTES[self]

    @property
    def is_float(self) -> bool:
        """True for floating-point types."""
        return self in _FLOATS

    @property
    def config_name(self) -> str:
        """Name in a config.pbtxt: `TYPE_FP32`; `TYPE_STRING` for BYTES."""
        return "TYPE_STRING" if self is DType.BYTES else f"TYPE_{self.value}"

    @classmethod
    def from_numpy(cls, dtype: np.dtype[np.generic]) -> DType:
        """Return the element type of an array. Unicode, bytes and object arrays are BYTES.

        Raises:
            ManifestError: The dtype (complex numbers, dates, ...) has no equivalent.
        """
        if dtype.kind in "OSU":
            return cls.BYTES
        try:
            return _names()[dtype]
        except KeyError:
            pass
        raise ManifestError(f"numpy dtype {dtype} has no tensor type", hint=f"use one of {', '.join(cls)}")

    @classmethod
    def from_onnxruntime(cls, type_name: str) -> DType:
        """Return the element type of an ONNX Runtime `NodeArg.type` such as `tensor(float)`.

        Raises:
            ManifestError: The value is a sequence, a map or an element type that Triton does not support.
        """
        try:
            return _ONNXRUNTIME[type_name]
        except KeyError:
            raise ManifestError(f"{type_name} is not a tensor that Triton can carry") from None

    @classmethod
    def from_openvino(cls, type_name: str) -> DType:
        """Return the element type of an OpenVINO type such as `f32`.

        Raises:
            ManifestError: Triton does not support the element type.
        """
        try:
            return _OPENVINO[type_name]
        except KeyError:
            raise ManifestError(f"OpenVINO's element type {type_name} is not one that Triton can carry") from None

    @classmethod
    def from_config(cls, number: int) -> DType:
        """Return the element type of the number of a `DataType` in a model configuration.

        Raises:
            ManifestError: There is no such data type.

        Source: Triton's `model_config.proto`.
        """
        try:
            return _CONFIG_ORDER[number]
        except KeyError:
            raise ManifestError(f"data type {number} of a config.pbtxt is not known") from None

    @classmethod
    def from_onnx(cls, number: int) -> DType:
        """Return the element type of an `onnx.TensorProto.DataType`.

        Raises:
            ManifestError: Triton does not support the element type (complex, 4- or 8-bit float, ...).
        """
        try:
            return _ONNX[number]
        except KeyError:
            name = _OTHER_ONNX.get(number, f"of number {number}, which is not known,")
            raise ManifestError(
                f"the ONNX element type {name} is not one that Triton can carry",
                hint="cast it at the border of the graph (Cast); inside, it may stay" if name[:1] in "FUI" else "",
            ) from None


@cache
def _numpy_types() -> dict[DType, np.dtype[np.generic]]:
    """Created at first use, because importing numpy takes 0.1 s, and `serve` does not need it."""
    return {
        DType.BOOL: np.dtype(np.bool_),
        DType.UINT8: np.dtype(np.uint8),
        DType.UINT16: np.dtype(np.uint16),
        DType.UINT32: np.dtype(np.uint32),
        DType.UINT64: np.dtype(np.uint64),
        DType.INT8: np.dtype(np.int8),
        DType.INT16: np.dtype(np.int16),
        DType.INT32: np.dtype(np.int32),
        DType.INT64: np.dtype(np.int64),
        DType.FP16: np.dtype(np.float16),
        DType.BF16: np.dtype(ml_dtypes.bfloat16),
        DType.FP32: np.dtype(np.float32),
        DType.FP64: np.dtype(np.float64),
        DType.BYTES: np.dtype(np.object_),
    }


@cache
def _names() -> dict[np.dtype[np.generic], DType]:
    return {dtype: member for member, dtype in _numpy_types().items()}


# As in numpy, whose import takes 0.1 s.
_BYTES: dict[DType, int] = {
    DType.BOOL: 1,
    DType.UINT8: 1,
    DType.UINT16: 2,
    DType.UINT32: 4,
    DType.UINT64: 8,
    DType.INT8: 1,
    DType.INT16: 2,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.FP16: 2,
    DType.BF16: 2,
    DType.FP32: 4,
    DType.FP64: 8,
    DType.BYTES: 0,
}

_FLOATS = {DType.FP16, DType.BF16, DType.FP32, DType.FP64}

_ONNXRUNTIME: dict[str, DType] = {
    "tensor(bool)": DType.BOOL,
    "tensor(uint8)": DType.UINT8,
    "tensor(uint16)": DType.UINT16,
    "tensor(uint32)": DType.UINT32,
    "tensor(uint64)": DType.UINT64,
    "tensor(int8)": DType.INT8,
    "tensor(int16)": DType.INT16,
    "tensor(int32)": DType.INT32,
    "tensor(int64)": DType.INT64,
    "tensor(float16)": DType.FP16,
    "tensor(bfloat16)": DType.BF16,
    "tensor(float)": DType.FP32,
    "tensor(double)": DType.FP64,
    "tensor(string)": DType.BYTES,
}

_ONNX: dict[int, DType] = {
    1: DType.FP32,
    2: DType.UINT8,
    3: DType.INT8,
    4: DType.UINT16,
    5: DType.INT16,
    6: DType.INT32,
    7: DType.INT64,
    8: DType.BYTES,
    9: DType.BOOL,
    10: DType.FP16,
    11: DType.FP64,
    12: DType.UINT32,
    13: DType.UINT64,
    16: DType.BF16,
}

# ONNX types that Triton does not support, by `onnx.TensorProto.DataType`.
_OTHER_ONNX = {
    0: "UNDEFINED",
    14: "COMPLEX64",
    15: "COMPLEX128",
    17: "FLOAT8E4M3FN",
    18: "FLOAT8E4M3FNUZ",
    19: "FLOAT8E5M2",
    20: "FLOAT8E5M2FNUZ",
    21: "UINT4",
    22: "INT4",
    23: "FLOAT4E2M1",
    24: "FLOAT8E8M0",
    25: "UINT2",
    26: "INT2",
    27: "FLOAT6E2M3",
    28: "FLOAT6E3M2",
}

_CONFIG_ORDER = {
    number: DType(name)
    for number, name in enumerate(
        (
            *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
            *("FP16", "FP32", "FP64", "BYTES", "BF16"),
        ),
        start=1,
    )
}

_OPENVINO: dict[str, DType] = {
    "boolean": DType.BOOL,
    "u8": DType.UINT8,
    "u16": DType.UINT16,
    "u32": DType.UINT32,
    "u64": DType.UINT64,
    "i8": DType.INT8,
    "i16": DType.INT16,
    "i32": DType.INT32,
    "i64": DType.INT64,
    "f16": DType.FP16,
    "bf16": DType.BF16,
    "f32": DType.FP32,
    "f64": DType.FP64,
}
