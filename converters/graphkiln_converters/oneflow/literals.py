"""The literals of MLIR's text form: strings, numbers, and shaped types.

Source: MLIR Language Reference (mlir.llvm.org/docs/LangRef).
"""

from __future__ import annotations

import re
import struct

from graphkiln_converters.oneflow.job import Opaque, TensorType

_ESCAPE = re.compile(r'\\(["\\nt]|[0-9A-Fa-f]{2})')
_ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}
_SHAPED = re.compile(r"(?:tensor|vector)<\s*(?:((?:(?:\d+|\?)x)*))([a-z]+\d*)\s*(?:,.*)?>")
_FLOATS = {"f16": (2, "<e"), "bf16": (2, "<f"), "f32": (4, "<f"), "f64": (8, "<d")}
"""Float type -> its size in bytes, and how `struct` reads it; bf16 is the upper half of an f32."""


def read_string(literal: str) -> str:
    """The content of a quoted string, with its escapes resolved."""

    def unescaped(match: re.Match[str]) -> str:
        return _ESCAPES.get(match[1]) or chr(int(match[1], 16))

    return _ESCAPE.sub(unescaped, literal[1:-1])


def read_number(literal: str, type_name: str) -> int | float:
    """A number; of a float type, hexadecimal digits are its bits.

    Args:
        literal: Its text.
        type_name: The type that it is written with, such as `si32`, or empty.

    Raises:
        ValueError: The type has no such number; the message says why.

    Source: MLIR Language Reference, "Floating Point Types".
    """
    digits = literal.lower()
    hexadecimal = "0x" in digits
    if hexadecimal and type_name in _FLOATS:
        return _float_from_bits(int(digits, 16), literal, type_name)
    if type_name in _FLOATS or (not type_name and set(digits) & set(".e") and not hexadecimal):
        return float(digits)
    try:
        return int(digits, 0) if hexadecimal else int(digits)
    except ValueError as error:
        raise ValueError(f"'{literal}' is no {type_name or 'integer'}") from error


def _float_from_bits(bits: int, literal: str, type_name: str) -> float:
    size, layout = _FLOATS[type_name]
    if not 0 <= bits < 1 << (8 * size):
        raise ValueError(f"'{literal}' has more bits than {type_name}")
    if type_name == "bf16":
        bits, size = bits << 16, 4
    (number,) = struct.unpack(layout, bits.to_bytes(size, "little"))
    return float(number)


def read_shaped_type(literal: str) -> TensorType | Opaque:
    """The type `tensor<...>` or `vector<...>`; opaque where it is written in a form that OneFlow does not use."""
    match = _SHAPED.fullmatch(literal)
    if match is None:
        return Opaque(literal)
    return TensorType(tuple(None if dim == "?" else int(dim) for dim in match[1].split("x")[:-1]), match[2])
