"""The columns that an estimator of scikit-learn takes: numbers, categories, documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.text import as_text
from graphkiln_converters.sources.base import InputSpec

_MOST_WORDS = 256


def column_inputs(estimator: Any, location: str, number: DType) -> tuple[InputSpec, ...]:
    """One input `[rows, columns]`, or one for each column where some are text.

    Args:
        estimator: The estimator.
        location: The file, for the error.
        number: Element type of numbers.

    Raises:
        ConversionError: It is not fitted, or takes no table.
    """
    first = _first_step(estimator)
    if _reads_documents(first):
        return (InputSpec(name="text", dtype=DType.BYTES, shape=(1,), words=_words_of(first, 0)),)
    count = getattr(estimator, "n_features_in_", None)
    if not isinstance(count, int):
        raise ConversionError(f"{location} is not fitted, or takes something else than a table of columns")
    words = {column: found for column in range(count) if (found := _words_in(estimator, column)) is not None}
    if not words:
        return (InputSpec(name="X", dtype=number, shape=(count,)),)
    names = _column_names(estimator, count)
    return tuple(
        InputSpec(name=name, dtype=DType.BYTES, shape=(1,), words=words[column])
        if column in words
        else InputSpec(name=name, dtype=number, shape=(1,))
        for column, name in enumerate(names)
    )


def _column_names(estimator: Any, count: int) -> list[str]:
    names = getattr(estimator, "feature_names_in_", None)
    return [f"column_{number}" for number in range(count)] if names is None else [str(name) for name in names]


def _first_step(estimator: Any) -> Any:
    while hasattr(estimator, "steps"):
        estimator = estimator.steps[0][1]
    return estimator


def _reads_documents(estimator: Any) -> bool:
    return hasattr(estimator, "build_analyzer")


def _words_in(estimator: Any, column: int) -> tuple[str, ...] | None:
    """The categories of a column, or None where it holds numbers."""
    first = _first_step(estimator)
    for transformer, columns in _parts(first):
        positions = _positions(first, columns)
        if column in positions:
            inner = _first_step(transformer)
            found = _words_of(inner, positions.index(column))
            if found:
                return found
    return _words_of(first, column) or None


def _parts(estimator: Any) -> Iterator[tuple[Any, Any]]:
    """The transformers of a ColumnTransformer, with their columns."""
    for _, transformer, columns in getattr(estimator, "transformers_", ()):
        if not isinstance(transformer, str):
            yield transformer, columns


def _positions(estimator: Any, columns: Any) -> list[int]:
    """The positions of columns as a ColumnTransformer is told them: by number, name, mask, or a slice of either."""
    names = [str(name) for name in getattr(estimator, "feature_names_in_", ())]
    count = estimator.n_features_in_
    if isinstance(columns, slice):
        return list(range(count))[_by_number(columns, names)]
    chosen = np.atleast_1d(np.asarray(columns))
    if chosen.dtype.kind == "b":
        chosen = np.flatnonzero(chosen)
    return [names.index(column) if isinstance(column, str) else int(column) % count for column in chosen.tolist()]


def _by_number(columns: slice, names: list[str]) -> slice:
    """A slice whose ends may be names; the last one is among them."""
    first = names.index(columns.start) if isinstance(columns.start, str) else columns.start
    last = names.index(columns.stop) + 1 if isinstance(columns.stop, str) else columns.stop
    return slice(first, last, columns.step)


def _words_of(estimator: Any, column: int) -> tuple[str, ...]:
    """What text an encoder knows in a column; empty where it takes numbers."""
    if _reads_documents(estimator):
        known = list(getattr(estimator, "vocabulary_", {}))[:_MOST_WORDS]
        return (*known, *(" ".join(known[start : start + 4]) for start in range(0, len(known), 3)), "unknown words")
    for attribute in ("categories_", "statistics_"):
        categories = getattr(estimator, attribute, None)
        if categories is not None and len(categories) > column:
            found = np.atleast_1d(np.asarray(categories[column]))
            if found.dtype.kind in "OU" and all(isinstance(word, str) for word in found.tolist()):
                return tuple(map(str, found))
    return ()


def table_of(estimator: Any, inputs: tuple[InputSpec, ...], feeds: Mapping[str, AnyArray]) -> Any:
    """The inputs of the graph as the estimator takes them: a table of numbers, of objects, or with named columns.

    Args:
        estimator: The estimator.
        inputs: Its inputs.
        feeds: `[rows, columns]` by input name.

    Raises:
        ConversionError: Its columns have names, which takes pandas.
    """
    columns = [as_text(feeds[spec.name]) for spec in inputs]
    if len(inputs) == 1:
        (table,) = columns
        if _reads_documents(_first_step(estimator)):
            return table[:, 0]
        return table.astype(np.float64) if table.dtype == np.float32 else table
    if hasattr(estimator, "feature_names_in_"):
        return _frame(inputs, columns)
    return np.concatenate([column.astype(np.object_) for column in columns], axis=1)


def _frame(inputs: tuple[InputSpec, ...], columns: list[AnyArray]) -> Any:
    try:
        import pandas as pd
    except ImportError as error:
        raise ConversionError(
            "the estimator was fitted to a table with named columns, which takes pandas", hint="pip install pandas"
        ) from error
    return pd.DataFrame({spec.name: column[:, 0] for spec, column in zip(inputs, columns, strict=True)})
