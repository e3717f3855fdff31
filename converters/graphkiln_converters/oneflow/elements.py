"""Element types by the three names that OneFlow's files give them.

Source: OneFlow 0.9.0, `oneflow/core/common/data_type.proto`; MLIR, "Builtin Dialect", types.
"""

from __future__ import annotations

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError

_BY_PROTO_NUMBER = {
    1: DType.INT8,
    2: DType.FP32,
    3: DType.FP64,
    4: DType.INT8,
    5: DType.INT32,
    6: DType.INT64,
    7: DType.UINT8,
    9: DType.FP16,
    11: DType.BF16,
    12: DType.BOOL,
    13: DType.UINT16,
    14: DType.UINT32,
    15: DType.UINT64,
    17: DType.INT16,
}
BY_PROTO_NAME = {
    "kChar": DType.INT8,
    "kFloat": DType.FP32,
    "kDouble": DType.FP64,
    "kInt8": DType.INT8,
    "kInt32": DType.INT32,
    "kInt64": DType.INT64,
    "kUInt8": DType.UINT8,
    "kFloat16": DType.FP16,
    "kBFloat16": DType.BF16,
    "kBool": DType.BOOL,
    "kUInt16": DType.UINT16,
    "kUInt32": DType.UINT32,
    "kUInt64": DType.UINT64,
    "kInt16": DType.INT16,
}
"""Name of the enumerator, as in the `meta` of a state tensor -> type."""
_BY_MLIR = {
    "f16": DType.FP16,
    "bf16": DType.BF16,
    "f32": DType.FP32,
    "f64": DType.FP64,
    "i1": DType.BOOL,
    **{f"{sign}{bits}": DType[f"INT{bits}"] for sign in ("i", "si") for bits in (8, 16, 32, 64)},
    **{f"ui{bits}": DType[f"UINT{bits}"] for bits in (8, 16, 32, 64)},
}


def dtype_from_mlir(element: str) -> DType:
    """The type of an MLIR element type, such as `f32`.

    Raises:
        ConversionError: No tensor can have it.
    """
    if element not in _BY_MLIR:
        raise ConversionError(f"no tensor can have elements of type {element}", hint=f"known: {', '.join(_BY_MLIR)}")
    return _BY_MLIR[element]


def dtype_from_number(number: int) -> DType:
    """The type of a number of OneFlow's enumeration `DataType`.

    Raises:
        ConversionError: No tensor can have it.
    """
    if number not in _BY_PROTO_NUMBER:
        raise ConversionError(f"no tensor can have elements of OneFlow's data type {number}")
    return _BY_PROTO_NUMBER[number]
