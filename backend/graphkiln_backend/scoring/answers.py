"""The answers of a unit while they are collected: columns of those rows that have some, and the table of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.rows import Row

# A copy of what is larger is memory that a worker may not have, and lists count their elements in 32 bits.
_COMBINED_BYTES = 256 << 20


class Answers:
    """Collects what a unit's rows are answered.

    Args:
        schema: Columns of the answers.
        model: Name of the model.
        version: Its number.
    """

    def __init__(self, schema: pa.Schema, model: str, version: int) -> None:
        self._schema, self._model, self._version = schema, model, version
        self._ids: list[str] = []
        self._kept: dict[str, list[pa.Array]] = {}
        self._errors: list[str | None] = []
        self._answered: list[list[pa.Array]] = [[] for _ in schema]

    def add(self, rows: Sequence[Row], errors: Sequence[str | None]) -> None:
        """Adds rows in their order.

        Args:
            rows: The rows.
            errors: Why a row has no answer; None for one that has.
        """
        for row in rows:
            self._ids.append(row.id)
            for name, value in row.kept.items():
                self._kept.setdefault(name, []).append(value)
        self._errors += errors

    def add_columns(self, columns: Sequence[pa.Array]) -> None:
        """Adds the answers of rows that have some, in their order.

        Args:
            columns: An array for each column of the schema.
        """
        for collected, column in zip(self._answered, columns, strict=True):
            collected.append(column)

    def table(self) -> pa.Table:
        """A row per row that was added.

        Raises:
            ScoringError: A column of the input has the name of another column.
        """
        fields = [pa.field("id", pa.string()), *self._kept_fields(), *self._schema]
        fields += [pa.field("model", pa.string()), pa.field("version", pa.int64()), pa.field("error", pa.string())]
        schema = pa.schema(fields)
        check_names(schema.names)
        rows = len(self._ids)
        columns = [
            pa.array(self._ids, pa.string()),
            *map(pa.chunked_array, self._kept.values()),
            *self._spread(),
            pa.repeat(self._model, rows),
            pa.repeat(pa.scalar(self._version, pa.int64()), rows),
            pa.array(self._errors, pa.string()),
        ]
        table = pa.table(columns, schema=schema)
        return table.combine_chunks() if table.nbytes <= _COMBINED_BYTES else table

    def _kept_fields(self) -> list[pa.Field]:
        return [pa.field(name, values[0].type) for name, values in self._kept.items()]

    def _spread(self) -> list[pa.ChunkedArray]:
        """The answers' columns, null where a row has none."""
        columns = [
            pa.chunked_array(collected, field.type)
            for collected, field in zip(self._answered, self._schema, strict=True)
        ]
        scored = np.asarray([error is None for error in self._errors], dtype=bool)
        if scored.all():
            return columns
        if not scored.any():
            return [pa.chunked_array([pa.nulls(len(scored), field.type)]) for field in self._schema]
        positions = pa.array(np.cumsum(scored) - 1, mask=~scored)
        return [column.take(positions) for column in columns]


def check_names(names: Sequence[str]) -> None:
    """Checks that no two columns have one name.

    Raises:
        ScoringError: A column of the input has the name of another column.
    """
    for name in names:
        if names.count(name) > 1:
            hint = "rename it in the input, or leave it out of --keep-columns"
            raise ScoringError(f"the input has a column '{name}', and so has the output", hint=hint)
