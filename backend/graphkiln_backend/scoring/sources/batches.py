"""Images in memory: columns of tables and data frames, as they are handed to functions of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import Content, Row
from graphkiln_backend.scoring.sources.base import Columns
from graphkiln_backend.scoring.sources.parquet import column_of, find_image_column
from graphkiln_backend.scoring.sources.places import load_image, locate

_EXPECTED = "expected encoded images (bytes), {bytes, path}, paths, or uint8 pixels [height, width, 3]"
_WHERE = "the batch"
_PIXEL_RANKS = (2, 3)  # of one row


def rows_of(column: Any) -> list[Row]:
    """Return a row for each value of a column, with its position as the id. Values are converted when they are read.

    Args:
        column: An Arrow, NumPy, pandas, Polars or Daft column, or a sequence, of encoded images, paths, or pixels.

    Raises:
        ScoringError: Values of this type are no images.
    """
    return [Row(id=str(index), load=load) for index, load in enumerate(_loaders(column))]


def image_column(batch: pa.Table, name: str) -> pa.ChunkedArray:
    """Return the named column or struct field of a table; without a name, the only one with bytes.

    Raises:
        ScoringError: There is no such column, or more than one.
    """
    if name:
        Columns(image=name).check(_names(batch.schema), _WHERE)
    else:
        name = find_image_column(batch.schema, Columns(), _WHERE).name
    return column_of(batch, name)


def array_of_images(batch: Mapping[str, Any], name: str) -> str:
    """Return the name of the array of images: the given one, or the only one with images.

    Raises:
        ScoringError: There is no such array, or more than one.
    """
    if name:
        Columns(image=name).check(batch, _WHERE)
        return name
    found = [each for each, values in batch.items() if _has_images(values)]
    if len(found) != 1:
        what = f"{len(found)} arrays" if found else "no array"
        raise ScoringError(f"{_WHERE} has {what} of images", hint=f"image_column= names one of {', '.join(batch)}")
    return found[0]


def _has_images(values: Any) -> bool:
    if values.dtype != object:
        return bool(values.dtype == np.uint8 and values.ndim - 1 in _PIXEL_RANKS)
    first = next((value for value in values if not _is_null(value)), None)
    return isinstance(first, bytes | bytearray | np.ndarray | Mapping)


def _names(fields: Iterable[pa.Field], above: str = "") -> list[str]:
    """Names of columns and of struct fields."""
    names: list[str] = []
    for field in fields:
        names.append(f"{above}{field.name}")
        names += _names(field.type, f"{above}{field.name}.") if pa.types.is_struct(field.type) else []
    return names


def _loaders(column: Any) -> Sequence[Callable[[], Content]]:
    if hasattr(column, "to_arrow"):  # Polars and Daft; pixels of Daft are an extension of Arrow that only Daft can read
        arrow = column.to_arrow()
        column = column.to_pylist() if isinstance(arrow.type, pa.BaseExtensionType) else arrow
    if isinstance(column, pa.ChunkedArray):
        return [load for chunk in column.chunks for load in _loaders(chunk)]
    if isinstance(column, pa.Array):
        _check_type(column)
        return [partial(_load_element, column, index) for index in range(len(column))]
    if hasattr(column, "to_numpy"):  # pandas
        column = column.to_numpy()
    if isinstance(column, np.ndarray):
        _check_array(column)
    values = list(column)
    _check_value(next((value for value in values if not _is_null(value)), None))
    return [partial(_load_value, value) for value in values]


def _check_type(column: pa.Array) -> None:
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        while pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        if kind != pa.uint8():
            raise ScoringError(f"{_WHERE} has images of {column.type}", hint=_EXPECTED)
    elif isinstance(kind, pa.BaseExtensionType):
        valid = next((index for index in range(len(column)) if column[index].is_valid), None)
        if valid is not None:
            _check_value(_value_of(column, valid))
    elif not pa.types.is_null(kind):
        try:
            find_image_column(pa.schema([("image", kind)]), Columns(image="image"), _WHERE)
        except ScoringError as error:  # it names the column, whose name is not known here
            raise ScoringError(f"{_WHERE} has images of {kind}", hint=_EXPECTED) from error


def _check_array(column: np.ndarray[Any, Any]) -> None:
    if column.dtype.kind == "S":
        raise ScoringError(
            f"{_WHERE} has images of {column.dtype}, from which NumPy removes zeros at the end",
            hint="use dtype=object for an array of bytes",
        )
    is_pixels = column.dtype == np.uint8 and column.ndim - 1 in _PIXEL_RANKS
    if not is_pixels and not (column.dtype.kind in "OU" and column.ndim == 1):
        raise ScoringError(f"{_WHERE} has images of {column.dtype}{list(column.shape)}", hint=_EXPECTED)


def _check_value(value: Any) -> None:
    """Check the first value of a column; a single wrong value is the error of its row."""
    if isinstance(value, np.ndarray):
        is_image = value.dtype == np.uint8 and value.ndim in _PIXEL_RANKS
        found = f"{value.dtype}{list(value.shape)}"
    else:
        is_image = value is None or isinstance(value, bytes | bytearray | memoryview | str | Mapping)
        found = type(value).__name__
    if not is_image:
        raise ScoringError(f"{_WHERE} has images of {found}", hint=_EXPECTED)


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)  # noqa: PLR0124 - NaN of pandas


def _load_element(column: pa.Array, index: int) -> Content:
    try:
        return _load_value(_value_of(column, index))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the image path is not UTF-8: {error}") from error


def _value_of(column: pa.Array, index: int) -> Any:
    value = column[index]
    if not value.is_valid:
        return None
    if pa.types.is_fixed_size_list(column.type):  # pixels of Polars
        part, shape = column.slice(index, 1), []
        while pa.types.is_fixed_size_list(part.type):
            shape.append(part.type.list_size)
            part = part.flatten()
        return part.to_numpy(zero_copy_only=False).reshape(shape)
    # `as_py` of a tensor of Arrow is a flat list.
    return value.to_numpy() if hasattr(value, "to_numpy") else value.as_py()


def _load_value(value: Any) -> Content:
    if isinstance(value, Mapping):  # an image of Hugging Face data sets
        value = value.get("bytes") or value.get("path")
    if _is_null(value):
        raise InvalidInput("the row has no image")
    if isinstance(value, str):
        return load_image(locate("."), value)
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidInput(f"a {type(value).__name__} is not an image", hint=_EXPECTED)
