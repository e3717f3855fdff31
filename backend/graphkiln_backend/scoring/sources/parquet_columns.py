"""Which column of a table holds images, and what stands in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.reader import Columns

_BYTES, _PATH = "bytes", "path"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageColumn:
    """A column of images.

    Attributes:
        name: Of the column, or of what stands in a struct.
        is_path: Whether it holds nothing but paths.
        is_struct: Whether it holds `{bytes, path}`, as data sets of Hugging Face do.
    """

    name: str
    is_path: bool
    is_struct: bool

    def value(self, column: pa.Array, index: int) -> tuple[bytes | None, str | None]:
        """The encoded image of a row, or its path; neither where the row has none."""
        value = column[index].as_py()
        if self.is_struct:
            return (value.get(_BYTES), value.get(_PATH)) if value else (None, None)
        return (None, value) if self.is_path else (value, None)


def find_image_column(schema: pa.Schema, columns: Columns, where: str) -> ImageColumn:
    """The column that is named, or the only one that can be meant.

    Raises:
        ScoringError: There is no such column, or more than one.
    """
    columns.check([name for name, _ in _fields(schema)], where)
    if columns.image:
        return _describe(columns.image, type_of(schema, columns.image), where)
    found = [field for field in schema if _is_bytes(plain_type(field.type)) or _is_image_struct(field.type)]
    if len(found) != 1:
        what = f"{len(found)} columns" if found else "no column"
        raise ScoringError(
            f"{where} has {what} of image bytes", hint=f"--image-column with bytes or paths: {', '.join(schema.names)}"
        )
    Columns(image=found[0].name).check(schema.names, where)
    return _describe(found[0].name, found[0].type, where)


def as_ids(column: pa.Array, name: str, where: str) -> list[str]:
    """The ids in a column of text or integers.

    Raises:
        ScoringError: It holds anything else, or nothing in some row.
    """
    values = plain(column)
    if not (_is_text(values.type) or pa.types.is_integer(values.type)):
        raise ScoringError(f"{where}: column '{name}' of {values.type} cannot name rows", hint="text and integers can")
    if values.null_count:
        raise ScoringError(f"{where}: column '{name}' names rows, but is empty in some")
    try:
        return list(map(str, values.to_pylist()))
    except UnicodeDecodeError as error:
        raise ScoringError(f"{where}: column '{name}' names rows, and is no UTF-8: {error}") from error


def type_of(schema: pa.Schema, name: str) -> pa.DataType:
    """The type of a column, or of what stands in a struct: `image.path`."""
    return next(kind for each, kind in _fields(schema) if each == name)


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column, or what stands in a struct; null where the struct is."""
    if name in batch.schema.names:
        return batch.column(name)
    above = next(each for each in batch.schema.names if name.startswith(f"{each}."))
    column = batch.column(above)
    for part in name.removeprefix(f"{above}.").split("."):
        column = column.flatten()[column.type.get_field_index(part)]
    return column


def plain(column: pa.Array) -> pa.Array:
    """A column whose values stand for themselves: those of a dictionary, as categories have, are looked up."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of such a column. How wide a dictionary's numbers are differs from file to file."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _describe(name: str, kind: pa.DataType, where: str) -> ImageColumn:
    if _is_image_struct(kind):
        return ImageColumn(name=name, is_path=False, is_struct=True)
    values = plain_type(kind)
    if _is_bytes(values) or _is_text(values):
        return ImageColumn(name=name, is_path=_is_text(values), is_struct=False)
    raise ScoringError(f"{where}: column '{name}' of {kind} holds no images", hint="bytes, text, {bytes, path}")


def _fields(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """The columns, then what stands in structs, by names such as `image.path`."""
    waiting = deque((field.name, field.type) for field in schema)
    while waiting:
        name, kind = waiting.popleft()
        yield name, kind
        if pa.types.is_struct(kind):
            waiting.extend((f"{name}.{inner.name}", inner.type) for inner in kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_image_struct(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) and kind.get_field_index(_BYTES) >= 0 and _is_bytes(kind.field(_BYTES).type))
