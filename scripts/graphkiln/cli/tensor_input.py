"""`--input`: tensors from files, from standard input, or written out on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from graphkiln_backend.graph.arrays import parse_npy, read_npz
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ManifestError
from graphkiln_backend.graph.files import GIB, read_bytes, read_stream
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.images.formats import SUFFIXES

if TYPE_CHECKING:
    from graphkiln_client import Model

_STDIN = "-"
_LIMIT = 4 * GIB
# Of numpy's arrays.
_MOST_DIMENSIONS = 32
_EXPECTED = {
    DType.BOOL: "true or false",
    DType.BYTES: 'texts in quotes, such as "a"',
    **dict.fromkeys((DType.FP16, DType.BF16, DType.FP32, DType.FP64), "numbers"),
}
_OF_IMAGES = "graphkiln classify, detect, segment and embed take images; for a tensor, write one with numpy.save"
_OF_OTHERS = "write one with numpy.save"


@dataclass(frozen=True, slots=True)
class Literal:
    """A tensor as JSON: lists in lists, numbers, texts; its type is that of the model's input."""

    value: Any


Given: TypeAlias = "Mapping[str, AnyArray | Literal]"


def parse_inputs(texts: Sequence[str]) -> Given:
    """Read the values of `--input`: NAME=FILE, NAME=JSON, or FILE.npz with an array for each input.

    Raises:
        InvalidInput: A value has another form, or names an input twice.
    """
    given: dict[str, AnyArray | Literal] = {}
    for text in texts:
        for name, value in _parse(text).items():
            if name in given:
                raise InvalidInput(f"--input gives '{name}' twice")
            given[name] = value
    return given


def to_feeds(given: Given, model: Model) -> dict[str, AnyArray]:
    """Make arrays of the values of `parse_inputs`; literals take types and shapes of the model's metadata.

    Raises:
        InvalidInput: A literal does not fit its input, or there is no such input.
        ClientError: The metadata cannot be read.
    """
    if not any(isinstance(value, Literal) for value in given.values()):
        return {name: value for name, value in given.items() if not isinstance(value, Literal)}
    rows = {row["name"]: row for row in model.metadata["inputs"]}
    return {name: to_array(name, value, rows) if isinstance(value, Literal) else value for name, value in given.items()}


def to_array(name: str, literal: Literal, rows: Mapping[str, Mapping[str, Any]]) -> AnyArray:
    """The tensor of an input's literal; leading dimensions that may be 1 need no brackets.

    Raises:
        InvalidInput: It does not fit the input's type or shape, or there is no such input.
    """
    if name not in rows:
        raise InvalidInput(f"the model has no input '{name}'", hint=did_you_mean(name, rows))
    dtype, declared = DType(rows[name]["datatype"]), [int(size) for size in rows[name]["shape"]]
    shape, elements = _elements(literal.value, f"input '{name}'")
    for element in elements:
        _check_element(element, dtype, name)
    padded = [1] * (len(declared) - len(shape)) + shape
    fits = len(padded) == len(declared) and all(
        size in (-1, given) for size, given in zip(declared, padded, strict=True)
    )
    if not fits:
        raise InvalidInput(f"input '{name}' has the shape {shape}, the model expects {declared} (-1: any size)")
    return _cast(elements, dtype, name).reshape(padded)


def _parse(text: str) -> Given:
    name, equals, value = text.partition("=")
    if not equals and text.endswith(".npz"):
        return read_archive(text)
    if not (name and equals and value):
        raise InvalidInput(
            f"--input {text}: expected NAME=FILE, NAME=JSON or FILE.npz",
            hint="for example --input INPUT_0=image.npy, or --input 'INPUT_0=[[1, 2, 3]]'",
        )
    if value != _STDIN and not _is_file(value) and (literal := _parse_json(value)) is not None:
        return {name: literal}
    return {name: _read_file(value)}


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except OSError:  # longer than any path
        return False


def _parse_json(text: str) -> Literal | None:
    """A literal; None for what is no JSON."""
    try:
        return Literal(json.loads(text))
    except RecursionError:
        raise InvalidInput(f"{text[:20]}...: brackets are nested too deeply") from None
    except ValueError:
        if text[0] in '["{':  # no file begins like this
            raise InvalidInput(f"{text[:80]} is not JSON", hint="""for example --input 'TEXT=["a", "b"]'""") from None
        return None


def _read_file(file: str) -> AnyArray:
    try:
        content = read_stream(sys.stdin.buffer, _LIMIT) if file == _STDIN else read_bytes(file, _LIMIT)
        return parse_npy(content)
    except OSError as error:
        raise InvalidInput(
            f"cannot read {file}: {error.strerror or error}",
            hint="" if Path(file).suffix else "texts are written in quotes: --input 'NAME=\"text\"'",
        ) from error
    except ManifestError as error:
        raise InvalidInput(
            f"{file} is not an .npy file of numbers or texts: {error.message}",
            hint=error.hint or (_OF_IMAGES if Path(file).suffix.lower() in SUFFIXES else _OF_OTHERS),
        ) from error


def read_archive(file: str | Path) -> dict[str, AnyArray]:
    """Read the arrays of an .npz file.

    Raises:
        InvalidInput: There is no such file, or it holds something else than numbers and texts.
    """
    if not Path(file).is_file():
        raise InvalidInput(f"there is no file {file}")
    try:
        return dict(read_npz(Path(file)))
    except ManifestError as error:
        raise InvalidInput(f"{file} is not an .npz file of numbers or texts: {error.message}") from error


def _elements(value: Any, what: str) -> tuple[list[int], list[Any]]:
    """Shape and elements of nested lists."""
    depth, inner = 0, value
    while isinstance(inner, list):
        depth, inner = depth + 1, inner[0] if inner else None
    if depth > _MOST_DIMENSIONS:
        raise InvalidInput(f"{what} has more than {_MOST_DIMENSIONS} dimensions")
    array = np.array(value, np.object_)
    elements = array.ravel().tolist()
    if any(isinstance(element, list) for element in elements):
        raise InvalidInput(f"{what}: lists of one level must be of one length")
    return list(array.shape), elements


def _check_element(element: Any, dtype: DType, name: str) -> None:
    is_number = isinstance(element, int | float) and not isinstance(element, bool)
    fits = {
        DType.BOOL: isinstance(element, bool),
        DType.BYTES: isinstance(element, str),
    }.get(dtype, is_number if dtype.is_float else is_number and isinstance(element, int))
    if not fits:
        shown = json.dumps(element)[:40]
        raise InvalidInput(f"input '{name}' is {dtype}: expected {_EXPECTED.get(dtype, 'integers')}, got {shown}")


def _cast(elements: list[Any], dtype: DType, name: str) -> AnyArray:
    """A flat array; a number out of the type's range is an error."""
    if dtype is DType.BYTES:
        return np.array([element.encode() for element in elements], np.object_)
    if dtype is DType.BOOL:
        return np.array(elements, np.bool_)
    array = _to_floats(elements, dtype) if dtype.is_float else _to_integers(elements, dtype)
    if array is None:
        raise InvalidInput(f"input '{name}' is {dtype}: a number is out of its range")
    return array


def _to_integers(elements: list[int], dtype: DType) -> AnyArray | None:
    """None where one is out of range."""
    limits = np.iinfo(dtype.numpy.name)
    in_range = all(limits.min <= element <= limits.max for element in elements)
    return np.array(elements, dtype.numpy) if in_range else None


def _to_floats(elements: list[float], dtype: DType) -> AnyArray | None:
    """None where one would become infinite."""
    try:
        wide = np.array(elements, np.float64)
    except OverflowError:
        return None
    with np.errstate(over="ignore"):
        array: AnyArray = wide.astype(dtype.numpy)
    return array if np.array_equal(np.isfinite(wide), np.isfinite(array.astype(np.float64))) else None
