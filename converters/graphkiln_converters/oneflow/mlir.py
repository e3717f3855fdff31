"""Reads `model.mlir`: the text form of MLIR with OneFlow's dialect, as `flow.save` writes a graph.

The grammar is `mlir.lark`. Attributes and types of other dialects are kept as text: nobody here needs them.

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
from typing import Any, NoReturn, cast

import numpy as np
from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedInput, VisitError

from graphkiln_backend.graph.errors import ConversionError

_DIALECT = "oneflow."
_ESCAPE = re.compile(r'\\(["\\nt]|[0-9A-Fa-f]{2})')
_ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}
_SHAPED = re.compile(r"(?:tensor|vector)<\s*(?:((?:(?:\d+|\?)x)*))([a-z]+\d*)\s*(?:,.*)?>")
_LONGEST_PACK = 1 << 16


@dataclass(frozen=True, slots=True)
class Opaque:
    """An attribute or type of a dialect that nobody here reads, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of a value.

    Attributes:
        shape: Sizes; None for one that varies.
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
        kind: Its name without the dialect, such as `conv2d`; of another dialect, with it.
        operands: Names of the values that it takes.
        results: Names of the values that it makes.
        attributes: Its attributes.
        operand_types: Of its operands.
        result_types: Of its results.
        line: Where it stands in the file, from 1.
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
        name: What OneFlow called it.
        arguments: Its inputs in the order of the signature, by name.
        operations: In the order of the file.
        returns: Names of the values that it answers, in the order of the signature.
    """

    name: str
    arguments: Mapping[str, TensorType]
    operations: tuple[Operation, ...]
    returns: tuple[str, ...]


def parse(text: str) -> Job:
    """Reads a graph.

    Raises:
        ConversionError: The text is not MLIR, or not of one job; the message holds line and column.
    """
    try:
        job = cast("Job", _parser().parse(text))  # the transformer makes it one
    except VisitError as error:
        if isinstance(error.orig_exc, ConversionError):
            raise error.orig_exc from error
        raise
    except UnexpectedInput as error:
        raise ConversionError(
            f"{_place(error.line, error.column)} {_found(text, error)}",
            hint="the file is cut short or changed: save the graph again (flow.save)",
        ) from error
    _check_values(job)
    return job


@cache
def _parser() -> Lark:
    grammar = files(__package__).joinpath("mlir.lark").read_text()
    return Lark(grammar, parser="lalr", transformer=_Reader(), maybe_placeholders=True)


def _place(line: int, column: int) -> str:
    return f"line {line}, column {column}:" if line > 0 else "at the end:"


def _found(text: str, error: UnexpectedInput) -> str:
    position = error.pos_in_stream
    rest = text[position : position + 30].split("\n", maxsplit=1)[0] if position is not None and position >= 0 else ""
    return f"expected {_wanted(error)}, found '{rest}'" if rest else f"the text ends, expected {_wanted(error)}"


def _wanted(error: UnexpectedInput) -> str:
    names = sorted(getattr(error, "accepts", None) or getattr(error, "expected", None) or getattr(error, "allowed", []))
    return " or ".join(name.lower() for name in names[:4]) + (" or ..." if len(names) > 4 else "")


def _check_values(job: Job) -> None:
    known = set(job.arguments)
    for each in job.operations:
        for name in each.operands:
            if name not in known:
                raise ConversionError(f"line {each.line}: {each.kind} takes {name}, which nothing before it makes")
        known.update(each.results)
    for name in job.returns:
        if name not in known:
            raise ConversionError(f"the graph answers {name}, which nothing makes")


def _fail(token: Token, message: str) -> NoReturn:
    raise ConversionError(f"{_place(token.line or 0, token.column or 0)} {message}")


def _counted(token: Token, names: Sequence[object], types: Sequence[object], what: str) -> None:
    if len(names) != len(types):
        _fail(token, f"{len(names)} {what} but {len(types)} types")


@v_args(inline=True)
class _Reader(Transformer[Token, Job]):
    """Turns what the grammar finds into values, from the inside out."""

    def start(self, *items: Job | None) -> Job:
        return next(item for item in items if item is not None)

    def nothing(self, *_: object) -> None:
        return None

    def module(self, *items: object) -> Job:
        return next(item for item in items if isinstance(item, Job))

    def job(self, token: Token, name: Token, *items: Any) -> Job:
        arguments: dict[str, TensorType] = {}
        for argument in (item for item in items if isinstance(item, _Argument)):
            if argument.name in arguments:
                _fail(token, f"two arguments are called {argument.name}")
            arguments[argument.name] = argument.type
        made = set(arguments)
        operations = tuple(item for item in items if isinstance(item, Operation))
        for operation in operations:
            for result in operation.results:
                if result in made:
                    _fail(token, f"line {operation.line}: {result} is made twice")
                made.add(result)
        answers = next(item for item in items if isinstance(item, _Answers))
        return Job(name=name[1:], arguments=arguments, operations=operations, returns=answers.names)

    def argument(self, name: Token, type_: object, *_: object) -> _Argument:
        return _Argument(str(name), _tensor(name, type_))

    def answers(self, token: Token, *items: object) -> _Answers:
        names = tuple(str(item) for item in items if isinstance(item, Token))
        types = [item for item in items if isinstance(item, TensorType | Opaque)]
        _counted(token, names, types, "values are returned")
        return _Answers(names)

    def operation(self, results: list[str] | None, name: Token, *items: Any) -> Operation:
        operands = tuple(str(item) for item in items if isinstance(item, Token))
        operand_types, result_types = (item for item in items if isinstance(item, tuple))
        attributes: dict[str, Attribute] = {}
        for item in items:
            attributes |= item if isinstance(item, dict) else {}
        _counted(name, operands, operand_types, "operands")
        _counted(name, results or (), result_types, "results")
        return Operation(
            kind=_text(name).removeprefix(_DIALECT),
            operands=operands,
            results=tuple(results or ()),
            attributes=attributes,
            operand_types=tuple(_tensor(name, each) for each in operand_types),
            result_types=tuple(_tensor(name, each) for each in result_types),
            line=name.line or 0,
        )

    def results(self, *packs: list[str]) -> list[str]:
        return [name for pack in packs for name in pack]

    def result(self, name: Token, count: Token | None) -> list[str]:
        if count is None:
            return [str(name)]
        if not count.isdecimal() or int(count) > _LONGEST_PACK:
            _fail(count, f"'{count}' is no number of results")
        return [f"{name}#{index}" for index in range(int(count))]

    def properties(self, dictionary: dict[str, Attribute]) -> dict[str, Attribute]:
        return dictionary

    def dictionary(self, *entries: tuple[str, Attribute] | None) -> dict[str, Attribute]:
        return dict(entry for entry in entries if entry is not None)

    def entry(self, name: Token, value: Attribute | None) -> tuple[str, Attribute]:
        return _text(name) if name.type == "STRING" else str(name), True if value is None else value

    def number(self, token: Token, type_: object) -> int | float:
        return _number(token, type_.name if isinstance(type_, Opaque) else "")

    def string(self, token: Token, _: object) -> str:
        return _text(token)

    def true(self) -> bool:
        return True

    def false(self) -> bool:
        return False

    def array(self, *values: Attribute | None) -> list[Attribute]:
        return [value for value in values if value is not None]

    def dense(self, value: Attribute | None, type_: object) -> list[Any]:
        shape = type_.shape if isinstance(type_, TensorType) else ()
        count = math.prod(dim or 0 for dim in shape)
        if value is None or isinstance(value, str):  # raw bytes: of weights inside the text, which OneFlow never writes
            return []
        if isinstance(value, list):
            return list(np.ravel(np.asarray(value, object)))
        return [value] * count if count <= _LONGEST_PACK else []

    def packed(self, _: Token, *values: Attribute | None) -> list[Attribute]:
        return [value for value in values if value is not None]

    def symbol(self, token: Token) -> str:
        return str(token[1:])

    def opaque(self, *items: object) -> Opaque:
        return Opaque(str(items[0]) if items and isinstance(items[0], Token) else "")

    def list(self, *items: object) -> tuple[object, ...]:
        return tuple(item for item in items if item is not None)

    def shaped(self, token: Token) -> TensorType | Opaque:
        match = _SHAPED.fullmatch(token)
        if match is None:
            return Opaque(str(token))
        dims = match[1].split("x")[:-1]
        return TensorType(tuple(None if dim == "?" else int(dim) for dim in dims), match[2])

    def junk(self, *_: object) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _Argument:
    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class _Answers:
    names: tuple[str, ...]


def _tensor(token: Token, type_: object) -> TensorType:
    if not isinstance(type_, TensorType):
        name = type_.name if isinstance(type_, Opaque) else "a function"
        _fail(token, f"'{name}' is no tensor: only tensors go in and out of operations")
    return type_


def _text(token: Token) -> str:
    def unescaped(match: re.Match[str]) -> str:
        return _ESCAPES.get(match[1]) or chr(int(match[1], 16))

    return _ESCAPE.sub(unescaped, token[1:-1])


def _number(token: Token, type_: str) -> int | float:
    """A number; of a float type, hexadecimal digits are its bits. Source: MLIR, "Floating Point Types"."""
    digits = token.lower()
    if "0x" in digits and type_ in _BITS:
        size, format_ = _BITS[type_]
        bits = int(digits, 16)
        if not 0 <= bits < 1 << (8 * size):
            _fail(token, f"'{token}' has more bits than {type_}")
        if type_ == "bf16":
            bits, size = bits << 16, 4
        return float(struct.unpack(format_, bits.to_bytes(size, "little"))[0])
    if type_ in _BITS or (not type_ and set(digits) & set(".e") and "0x" not in digits):
        return float(digits)
    try:
        return int(digits, 0) if "0x" in digits else int(digits)
    except ValueError:
        _fail(token, f"'{token}' is no {type_ or 'integer'}")


_BITS = {"f16": (2, "<e"), "bf16": (2, "<f"), "f32": (4, "<f"), "f64": (8, "<d")}
