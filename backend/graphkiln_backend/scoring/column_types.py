"""Convert the types of columns to those of a table format, at any depth."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

Leaf = Callable[[pa.DataType], pa.DataType]


def convert_schema(schema: pa.Schema, leaf: Leaf) -> pa.Schema:
    """Convert all types of a schema; lists of all kinds become lists, dictionaries their values.

    Args:
        schema: The columns.
        leaf: Converts a type that contains no other.
    """
    return pa.schema([_field(field, leaf) for field in schema], schema.metadata)


def _field(field: pa.Field, leaf: Leaf) -> pa.Field:
    return field.with_type(_type(field.type, leaf))


def _type(kind: pa.DataType, leaf: Leaf) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _type(kind.value_type, leaf)
    if pa.types.is_struct(kind):
        return pa.struct([_field(field, leaf) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_field(kind.key_field, leaf), _field(kind.item_field, leaf))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_field(kind.value_field, leaf))
    return leaf(kind)
