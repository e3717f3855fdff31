"""`--input`: tensors from files, from standard input, or as JSON on the command line."""

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
# Limit of numpy.
_MOST_DIMENSIONS = 32
_EXPECTED = {
    DType.BOOL: "true or false",
    DType.BYTES: 'strings in quotes, such as "a"',
    **dict.fromkeys((DType.FP16, DType.BF16, DType.FP32, DType.FP64), "numbers"),
}
_IMAGE_HINT = "graphkiln classify, detect, segment and embed take images; write tensors with numpy.save"
_FILE_HINT = "write tensors with numpy.save"


@dataclass(frozen=True, slots=True)
class Literal:
    """A tensor as JSON (nested lists, numbers, strings), with the data type of the model's input."""

    value: Any


Given: TypeAlias = "Mapping[str, AnyArray | Literal]"


def parse_inputs(texts: Sequence[str], model: Model) -> Given:
    """Parse the values of `--input`: NAME=FILE, NAME=JSON, or FILE.npz with one array per input.

    Names of inputs and files may contain `=`: a text with several ends its name behind the longest name that the model
    has, or else at the first `=`.

    Raises:
        InvalidInput: A value is invalid, or an input is given twice.
        ClientError: The metadata cannot be read, which is needed for texts with several `=`.
    """
    given: dict[str, AnyArray | Literal] = {}
    for text in texts:
        for name, value in _parse(text, model).items():
            if name in given:
                raise InvalidInput(f"--input gives '{name}' twice")
            given[name] = value
    return given


def to_feeds(given: Given, model: Model) -> dict[str, AnyArray]:
    """Convert the output of `parse_inputs` to arrays; literals get the data types and shapes of the model's metadata.

    Raises:
        InvalidInput: A literal does not fit its input, or the model has no such input.
        ClientError: The metadata cannot be read.
    """
    if not any(isinstance(value, Literal) for value in given.values()):
        return {name: value for name, value in given.items() if not isinstance(value, Literal)}
    rows = {row["name"]: row for row in model.metadata["inputs"]}
    return {name: to_array(name, value, rows) if isinstance(value, Literal) else value for name, value in given.items()}


def to_array(name: str, literal: Literal, rows: Mapping[str, Mapping[str, Any]]) -> AnyArray:
    """Convert a literal to a tensor; leading dimensions of 1 may be omitted.

    Raises:
        InvalidInput: The literal does not fit the data type or shape, or the model has no such input.
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
        raise InvalidInput(f"input '{name}' has shape {shape}, but the model expects {declared} (-1: any size)")
    return _cast(elements, dtype, name).reshape(padded)


def _parse(text: str, model: Model) -> Given:
    name, equals, value = text.partition("=")
    if value.count("="):
        known = (row["name"] for row in model.metadata["inputs"])
        name = max((row for row in known if text.startswith(f"{row}=")), key=len, default=name)
        value = text[len(name) + 1 :]
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
    except OSError:  # too long for a path
        return False


def _parse_json(text: str) -> Literal | None:
    """Parse a literal; return None for other text."""
    try:
        return Literal(json.loads(text))
    except RecursionError:
        raise InvalidInput(f"{text[:20]}...: brackets are nested too deeply") from None
    except ValueError:
        if text[0] in '["{':  # hardly a file name
            raise InvalidInput(f"{text[:80]} is not JSON", hint="""for example --input 'TEXT=["a", "b"]'""") from None
        return None


def _read_file(file: str) -> AnyArray:
    try:
        content = read_stream(sys.stdin.buffer, _LIMIT) if file == _STDIN else read_bytes(file, _LIMIT)
        return parse_npy(content)
    except OSError as error:
        raise InvalidInput(
            f"cannot read {file}: {error.strerror or error}",
            hint="" if Path(file).suffix else "strings need quotes: --input 'NAME=\"text\"'",
        ) from error
    except ManifestError as error:
        raise InvalidInput(
            f"{file} is not an .npy file of numbers or strings: {error.message}",
            hint=error.hint or (_IMAGE_HINT if Path(file).suffix.lower() in SUFFIXES else _FILE_HINT),
        ) from error


def read_archive(file: str | Path) -> dict[str, AnyArray]:
    """Read the arrays of an .npz file.

    Raises:
        InvalidInput: The file does not exist, or contains other data than numbers and strings.
    """
    if not Path(file).is_file():
        raise InvalidInput(f"there is no file {file}")
    try:
        return dict(read_npz(Path(file)))
    except ManifestError as error:
        raise InvalidInput(f"{file} is not an .npz file of numbers or strings: {error.message}") from error


def _elements(value: Any, what: str) -> tuple[list[int], list[Any]]:
    """Return the shape and the elements of nested lists."""
    depth, inner = 0, value
    while isinstance(inner, list):
        depth, inner = depth + 1, inner[0] if inner else None
    if depth > _MOST_DIMENSIONS:
        raise InvalidInput(f"{what} has more than {_MOST_DIMENSIONS} dimensions")
    array = np.array(value, np.object_)
    elements = array.ravel().tolist()
    if any(isinstance(element, list) for element in elements):
        raise InvalidInput(f"{what}: lists at the same level must have the same length")
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
    """Create a flat array; raise for a number out of range."""
    if dtype is DType.BYTES:
        return np.array([element.encode() for element in elements], np.object_)
    if dtype is DType.BOOL:
        return np.array(elements, np.bool_)
    array = _to_floats(elements, dtype) if dtype.is_float else _to_integers(elements, dtype)
    if array is None:
        raise InvalidInput(f"input '{name}' is {dtype}: a number is out of range")
    return array


def _to_integers(elements: list[int], dtype: DType) -> AnyArray | None:
    """Convert integers; return None if one is out of range."""
    limits = np.iinfo(dtype.numpy.name)
    in_range = all(limits.min <= element <= limits.max for element in elements)
    return np.array(elements, dtype.numpy) if in_range else None


def _to_floats(elements: list[float], dtype: DType) -> AnyArray | None:
    """Convert floats; return None if one would become infinite."""
    try:
        wide = np.array(elements, np.float64)
    except OverflowError:
        return None
    with np.errstate(over="ignore"):
        array: AnyArray = wide.astype(dtype.numpy)
    return array if np.array_equal(np.isfinite(wide), np.isfinite(array.astype(np.float64))) else None
