"""Outputs as they are: a column for each, by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.signature import ANY_RANK, TensorSpec
from graphkiln_backend.scoring.encoders.arrays import arrow_type, elements, lists
from graphkiln_backend.scoring.encoders.base import Size

SHAPE = b"shape"
"""The key of a field's metadata that holds the shape of a row, as JSON."""


class Tensors:
    """A column per output; what it holds follows from the output's shape without its first dimension.

    | shape of a row   | column                                                                     |
    |------------------|----------------------------------------------------------------------------|
    | none             | the element                                                                |
    | fixed sizes      | a list of one length, in row-major order; the field's metadata: `shape`    |
    | sizes that vary  | a list, in row-major order, and `NAME_shape` with the sizes                |

    Elements keep their type; texts are strings, and bf16, which Arrow does not have, becomes fp32.

    Args:
        specs: The outputs. The first dimension of each is the row.
        reserved: Names of columns that others write; an output of such a name goes to `output:NAME`.
    """

    def __init__(self, specs: Sequence[TensorSpec], reserved: Sequence[str] = ()) -> None:
        self.outputs: Sequence[str] = tuple(spec.name for spec in specs)
        self._columns = [_column(spec, _column_name(spec.name, reserved)) for spec in specs]
        self.schema = pa.schema([field for column in self._columns for field in column.fields])

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size] = ()) -> list[pa.Array]:
        """The rows of each output."""
        del sizes
        return [array for column in self._columns for array in column.arrays(outputs[column.output])]


def _column_name(output: str, reserved: Sequence[str]) -> str:
    return f"output:{output}" if output in reserved else output


class _Elements:
    """An output of one element per row."""

    def __init__(self, spec: TensorSpec, name: str) -> None:
        self.output = spec.name
        self.fields = [pa.field(name, arrow_type(spec.dtype))]

    def arrays(self, values: AnyArray) -> list[pa.Array]:
        _check(self.output, values, ())
        return [elements(values)]


class _Fixed:
    """An output whose rows all have one shape."""

    def __init__(self, spec: TensorSpec, name: str) -> None:
        self.output = spec.name
        self._shape = tuple(int(size) for size in spec.shape[1:])
        kind = pa.list_(arrow_type(spec.dtype))
        self.fields = [pa.field(name, kind, metadata={SHAPE: json.dumps(self._shape)})]

    def arrays(self, values: AnyArray) -> list[pa.Array]:
        _check(self.output, values, self._shape)
        return [lists(values)]


class _Varying:
    """An output whose rows have a shape of their own in each batch."""

    def __init__(self, spec: TensorSpec, name: str) -> None:
        self.output = spec.name
        kinds = {name: pa.list_(arrow_type(spec.dtype)), f"{name}_shape": pa.list_(pa.int32())}
        self.fields = [pa.field(name, kind) for name, kind in kinds.items()]

    def arrays(self, values: AnyArray) -> list[pa.Array]:
        shapes = np.tile(np.asarray(values.shape[1:], np.int32), (len(values), 1))
        return [lists(values), lists(shapes)]


_Column = _Elements | _Fixed | _Varying


def _column(spec: TensorSpec, name: str) -> _Column:
    row = spec.shape[1:]
    if spec.shape == (ANY_RANK,) or any(isinstance(size, str) for size in row):
        return _Varying(spec, name)
    if not row:
        return _Elements(spec, name)
    return _Varying(spec, name) if 0 in row else _Fixed(spec, name)  # a list of length 0 has no rows that count


def _check(output: str, values: AnyArray, row: tuple[int, ...]) -> None:
    if values.shape[1:] != row:
        raise ExecutionError(f"output '{output}' has the shape {list(values.shape)}, expected {list(row)} for each row")
