"""Arrow's types as Delta's: files and schema must agree, or other readers refuse the files, or read other values.

Delta has no unsigned numbers, half floats or nanoseconds: what is written is wide enough for every value; times have
microseconds. Source: "Schema Serialization Format" of the Delta transaction protocol.
"""

from __future__ import annotations

import pyarrow as pa

_TYPES = {
    pa.null(): pa.string(),
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}


def as_delta(table: pa.Table) -> pa.Table:
    """A table whose columns have types that Delta has."""
    return table.cast(delta_schema(table.schema), safe=False)  # which is for nanoseconds alone: all else is wider


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of such a table."""
    return pa.schema([_field(field) for field in schema], schema.metadata)


def _field(field: pa.Field) -> pa.Field:
    return field.with_type(_type(field.type))


def _type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _type(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([_field(field) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_field(kind.value_field))
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    return pa.binary() if pa.types.is_fixed_size_binary(kind) else _TYPES.get(kind, kind)
