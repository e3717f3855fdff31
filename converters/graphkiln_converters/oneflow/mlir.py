"""Parser of `model.mlir`, the MLIR text with OneFlow's dialect that `flow.save` writes.

The grammar is `mlir.lark`. Attributes and types of other dialects are kept by name, without interpretation.

Source: MLIR Language Reference (mlir.llvm.org/docs/LangRef); OneFlow 0.9.0.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NoReturn

import numpy as np
from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedInput, VisitError

from graphkiln_backend.graph.errors import ConversionError

# Contents of a saved graph: OneFlow's job, its operations, and their attributes and types.


@dataclass(frozen=True, slots=True)
class Opaque:
    """An uninterpreted attribute or type of a dialect."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorType:
    """Type of a value.

    Attributes:
        shape: Sizes; None for a dynamic one.
        element: MLIR's name of the element type, such as `f32` or `si64`.
    """

    shape: tuple[int | None, ...]
    element: str

    def __str__(self) -> str:
        dims = "".join(f"{'?' if dim is None else dim}x" for dim in self.shape)
        return f"tensor<{dims}{self.element}>"


Attribute = bool | int | float | str | list[Any] | dict[str, Any] | TensorType | Opaque


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation.

    Attributes:
        kind: Name without OneFlow's dialect, such as `conv2d`; names of other dialects are complete.
        operands: Names of the operands.
        results: Names of the results.
        attributes: Attributes by name.
        operand_types: Types of the operands.
        result_types: Types of the results.
        line: Line in the file, from 1.
    """

    kind: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    attributes: Mapping[str, Attribute]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A saved graph.

    Attributes:
        name: OneFlow's name of the graph.
        arguments: Types of the inputs by name, in the order of the signature.
        operations: Operations in the order of the file.
        returns: Names of the returned values, in the order of the signature.
    """

    name: str
    arguments: Mapping[str, TensorType]
    operations: tuple[Operation, ...]
    returns: tuple[str, ...]


# Literals of MLIR's text form: strings, numbers, and shaped types.
#
# Source: MLIR Language Reference (mlir.llvm.org/docs/LangRef).

_ESCAPE = re.compile(r'\\(["\\nt]|[0-9A-Fa-f]{2})')
_ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}
_SHAPED = re.compile(r"(?:tensor|vector)<\s*(?:((?:(?:\d+|\?)x)*))([a-z]+\d*)\s*(?:,.*)?>")
# Float type -> size in bytes and format for `struct`; bf16 is the upper half of an f32.
_FLOATS = {"f16": (2, "<e"), "bf16": (2, "<f"), "f32": (4, "<f"), "f64": (8, "<d")}


def read_string(literal: str) -> str:
    """Read a quoted string with escapes."""

    def unescaped(match: re.Match[str]) -> str:
        return _ESCAPES.get(match[1]) or chr(int(match[1], 16))

    return _ESCAPE.sub(unescaped, literal[1:-1])


def read_number(literal: str, type_name: str) -> int | float:
    """Read a number; hexadecimal digits of a float type are its bits.

    Raises:
        ValueError: The number is not of the type.

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
        raise ValueError(f"'{literal}' is not a number of type {type_name or 'integer'}") from error


def _float_from_bits(bits: int, literal: str, type_name: str) -> float:
    size, layout = _FLOATS[type_name]
    if not 0 <= bits < 1 << (8 * size):
        raise ValueError(f"'{literal}' has more bits than {type_name}")
    if type_name == "bf16":
        bits, size = bits << 16, 4
    (number,) = struct.unpack(layout, bits.to_bytes(size, "little"))
    return float(number)


def read_shaped_type(literal: str) -> TensorType | Opaque:
    """Read `tensor<...>` or `vector<...>`; opaque in a form that OneFlow does not use."""
    match = _SHAPED.fullmatch(literal)
    if match is None:
        return Opaque(literal)
    return TensorType(tuple(None if dim == "?" else int(dim) for dim in match[1].split("x")[:-1]), match[2])


_DIALECT = "oneflow."
# Maximum number of results of an operation, and of expanded elements of a splat.
_MAX_PACK = 1 << 16


def parse(text: str) -> Job:
    """Parse a graph.

    Raises:
        ConversionError: The text is not MLIR with one job; the message names line and column.
    """
    try:
        job = _parser().parse(text)
    except VisitError as error:
        if isinstance(error.orig_exc, ConversionError):
            raise error.orig_exc from error
        raise
    except UnexpectedInput as error:
        raise ConversionError(
            f"{_position(error.line, error.column)} {_mismatch(text, error)}",
            hint="the file is truncated or modified: save the graph again (flow.save)",
        ) from error
    if not isinstance(job, Job):
        raise TypeError(f"the grammar's start is a {type(job).__name__}, not a job")
    _check_values(job)
    return job


@cache
def _parser() -> Lark:
    grammar = files(__package__).joinpath("mlir.lark").read_text("utf-8")
    return Lark(grammar, parser="lalr", transformer=_JobTransformer(), maybe_placeholders=True)


def _position(line: int, column: int) -> str:
    return f"line {line}, column {column}:" if line > 0 else "at the end:"


def _mismatch(text: str, error: UnexpectedInput) -> str:
    start = error.pos_in_stream
    rest = text[start : start + 30].split("\n", maxsplit=1)[0] if start is not None and start >= 0 else ""
    return f"expected {_expected(error)}, found '{rest}'" if rest else f"the text ends, expected {_expected(error)}"


def _expected(error: UnexpectedInput) -> str:
    names = sorted(getattr(error, "accepts", None) or getattr(error, "expected", None) or getattr(error, "allowed", []))
    return " or ".join(name.lower() for name in names[:4]) + (" or ..." if len(names) > 4 else "")


def _check_values(job: Job) -> None:
    """Check that every value is defined once (static single assignment), before it is used."""
    defined = set(job.arguments)
    for operation in job.operations:
        for name in operation.operands:
            if name not in defined:
                raise ConversionError(
                    f"line {operation.line}: {operation.kind} takes {name}, which is not defined before it"
                )
        for name in operation.results:
            if name in defined:
                raise ConversionError(f"line {operation.line}: {name} is defined twice")
            defined.add(name)
    for name in job.returns:
        if name not in defined:
            raise ConversionError(f"the graph returns {name}, which is not defined")


def _fail(token: Token, message: str) -> NoReturn:
    raise ConversionError(f"{_position(token.line or 0, token.column or 0)} {message}")


def _check_count(token: Token, names: Sequence[object], types: Sequence[object], what: str) -> None:
    if len(names) != len(types):
        _fail(token, f"{len(names)} {what} but {len(types)} types")


@dataclass(frozen=True, slots=True)
class _Argument:
    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class _Returns:
    names: tuple[str, ...]


@v_args(inline=True)
class _JobTransformer(Transformer[Token, Job]):
    """Convert the parse tree to values, from the leaves up; one method for each rule of the grammar."""

    def start(self, *items: Job | None) -> Job:
        return next(item for item in items if item is not None)

    def discarded(self, *_: object) -> None:
        return None

    def module(self, *items: object) -> Job:
        return next(item for item in items if isinstance(item, Job))

    def job(self, token: Token, name: Token, *items: object) -> Job:
        arguments: dict[str, TensorType] = {}
        for argument in (item for item in items if isinstance(item, _Argument)):
            if argument.name in arguments:
                _fail(token, f"two arguments have the name {argument.name}")
            arguments[argument.name] = argument.type
        operations = tuple(item for item in items if isinstance(item, Operation))
        returns = next(item for item in items if isinstance(item, _Returns))
        return Job(name=name[1:], arguments=arguments, operations=operations, returns=returns.names)

    def argument(self, name: Token, type_: object, *_: object) -> _Argument:
        return _Argument(str(name), _tensor_type(name, type_))

    def returns(self, token: Token, *items: object) -> _Returns:
        names = tuple(str(item) for item in items if isinstance(item, Token))
        types = [item for item in items if isinstance(item, TensorType | Opaque)]
        _check_count(token, names, types, "values are returned")
        return _Returns(names)

    def operation(self, results: list[str] | None, name: Token, *items: Any) -> Operation:
        operands = tuple(str(item) for item in items if isinstance(item, Token))
        operand_types, result_types = (item for item in items if isinstance(item, tuple))
        attributes: dict[str, Attribute] = {}
        for item in items:
            attributes |= item if isinstance(item, dict) else {}
        _check_count(name, operands, operand_types, "operands")
        _check_count(name, results or (), result_types, "results")
        return Operation(
            kind=read_string(name).removeprefix(_DIALECT),
            operands=operands,
            results=tuple(results or ()),
            attributes=attributes,
            operand_types=tuple(_tensor_type(name, type_) for type_ in operand_types),
            result_types=tuple(_tensor_type(name, type_) for type_ in result_types),
            line=name.line or 0,
        )

    def results(self, *packs: list[str]) -> list[str]:
        return [name for pack in packs for name in pack]

    def result(self, name: Token, count: Token | None) -> list[str]:
        if count is None:
            return [str(name)]
        if not count.isdecimal() or int(count) > _MAX_PACK:
            _fail(count, f"'{count}' is not a valid number of results")
        return [f"{name}#{index}" for index in range(int(count))]

    def properties(self, dictionary: dict[str, Attribute]) -> dict[str, Attribute]:
        return dictionary

    def dictionary(self, *entries: tuple[str, Attribute] | None) -> dict[str, Attribute]:
        return dict(entry for entry in entries if entry is not None)

    def entry(self, name: Token, value: Attribute | None) -> tuple[str, Attribute]:
        return read_string(name) if name.type == "STRING" else str(name), True if value is None else value

    def number(self, token: Token, type_: object) -> int | float:
        try:
            return read_number(token, type_.name if isinstance(type_, Opaque) else "")
        except ValueError as error:
            _fail(token, str(error))

    def string(self, token: Token, _: object) -> str:
        return read_string(token)

    def true(self) -> bool:
        return True

    def false(self) -> bool:
        return False

    def array(self, *values: Attribute | None) -> list[Attribute]:
        return [value for value in values if value is not None]

    def dense_elements(self, value: Attribute | None, type_: object) -> list[Any]:
        shape = type_.shape if isinstance(type_, TensorType) else ()
        count = math.prod(dim or 0 for dim in shape)
        if value is None or isinstance(value, str):  # raw bytes of weights inside the text, which OneFlow never writes
            return []
        if isinstance(value, list):
            return list(np.ravel(np.asarray(value, object)))
        return [value] * count if count <= _MAX_PACK else []

    def dense_array(self, _: Token, *values: Attribute | None) -> list[Attribute]:
        return [value for value in values if value is not None]

    def symbol(self, token: Token) -> str:
        return str(token[1:])

    def opaque(self, *items: object) -> Opaque:
        return Opaque(str(items[0]) if items and isinstance(items[0], Token) else "")

    def list(self, *items: object) -> tuple[object, ...]:
        return tuple(item for item in items if item is not None)

    def shaped(self, token: Token) -> TensorType | Opaque:
        return read_shaped_type(str(token))

    def skipped(self, *_: object) -> None:
        return None


def _tensor_type(token: Token, type_: object) -> TensorType:
    if not isinstance(type_, TensorType):
        name = type_.name if isinstance(type_, Opaque) else "a function"
        _fail(token, f"'{name}' is not a tensor type: operands and results of operations must be tensors")
    return type_
