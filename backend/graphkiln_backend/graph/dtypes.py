"""Element types by Triton's names, and their equivalents in numpy and the runtimes.

Source: KServe v2 protocol, "Tensor Data Types"; `onnx.TensorProto.DataType`; ONNX Runtime's `NodeArg.type`.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

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

_LENGTH = struct.Struct("<I")


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
            return _by_numpy_type()[dtype]
        except KeyError:
            raise ManifestError(
                f"numpy dtype {dtype} has no tensor type", hint=f"use one of {', '.join(cls)}"
            ) from None

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
            return _CONFIG[number]
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


# Element type; bytes; numbers in config.pbtxt and in ONNX; names in numpy, ONNX Runtime and OpenVINO.
_TYPES = (
    (DType.BOOL, 1, 1, 9, "bool", "bool", "boolean"),
    (DType.UINT8, 1, 2, 2, "uint8", "uint8", "u8"),
    (DType.UINT16, 2, 3, 4, "uint16", "uint16", "u16"),
    (DType.UINT32, 4, 4, 12, "uint32", "uint32", "u32"),
    (DType.UINT64, 8, 5, 13, "uint64", "uint64", "u64"),
    (DType.INT8, 1, 6, 3, "int8", "int8", "i8"),
    (DType.INT16, 2, 7, 5, "int16", "int16", "i16"),
    (DType.INT32, 4, 8, 6, "int32", "int32", "i32"),
    (DType.INT64, 8, 9, 7, "int64", "int64", "i64"),
    (DType.FP16, 2, 10, 10, "float16", "float16", "f16"),
    (DType.BF16, 2, 14, 16, "bfloat16", "bfloat16", "bf16"),
    (DType.FP32, 4, 11, 1, "float32", "float", "f32"),
    (DType.FP64, 8, 12, 11, "float64", "double", "f64"),
    (DType.BYTES, 0, 13, 8, "object", "string", None),
)
_FLOATS = {DType.FP16, DType.BF16, DType.FP32, DType.FP64}
_BYTES = {dtype: size for dtype, size, *_ in _TYPES}
_CONFIG = {number: dtype for dtype, _, number, *_ in _TYPES}
_ONNX = {number: dtype for dtype, _, _, number, *_ in _TYPES}
_ONNXRUNTIME = {f"tensor({name})": dtype for dtype, *_, name, _ in _TYPES}
_OPENVINO = {name: dtype for dtype, *_, name in _TYPES if name}


@cache
def _numpy_types() -> dict[DType, np.dtype[np.generic]]:
    """Created at first use, because importing numpy takes 0.1 s, and `serve` does not need it."""
    return {dtype: np.dtype(ml_dtypes.bfloat16 if dtype is DType.BF16 else name) for dtype, *_, name, _, _ in _TYPES}


@cache
def _by_numpy_type() -> dict[np.dtype[np.generic], DType]:
    return {dtype: member for member, dtype in _numpy_types().items()}


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


def join_text(words: Sequence[Any]) -> bytes:
    """Join text elements, each with its length before it. Source: KServe v2, "Tensor Data" (BYTES)."""
    encoded = [word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass") for word in words]
    return b"".join(part for word in encoded for part in (_LENGTH.pack(len(word)), word))


def split_text(data: bytes) -> list[bytes]:
    """Split what `join_text` has joined."""
    words, begin = [], 0
    while begin < len(data):
        (length,) = _LENGTH.unpack_from(data, begin)
        begin += _LENGTH.size + length
        words.append(data[begin - length : begin])
    return words
