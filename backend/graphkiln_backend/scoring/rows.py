"""A row of the input, before anything was done with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One image of the input.

    Attributes:
        id: What the row is called in the output; no other row of the source has the same.
        load: Reads the encoded image. Called by another thread than the one that found the row. Raises `InputChanged`
            or `SourceUnavailable`, which concern the whole unit; any other `GraphkilnError` or `OSError` is the error
            of this row alone.
        kept: Columns of the input that are carried along: for each an array of one element, whose type stands even
            where the element is null.
    """

    id: str
    load: Callable[[], bytes]
    kept: Mapping[str, pa.Array] = field(default_factory=dict)
