"""What every encoder module offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from graphkiln_backend.graph.dtypes import AnyArray

Size = tuple[int, int]  # height and width of an upright image, in pixels


class Encoder(Protocol):
    """Turns the outputs of a batch into columns."""

    @property
    def schema(self) -> pa.Schema:
        """The columns that it writes, the same for every batch."""
        ...

    @property
    def outputs(self) -> Sequence[str]:
        """The outputs that it needs."""
        ...

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size]) -> list[pa.Array]:
        """One array per column of the schema, a value per row of the batch.

        Args:
            outputs: By name, each with a row of the batch in its first dimension.
            sizes: Of the image of each row, which answers about places are brought back to.

        Raises:
            ExecutionError: An output is not what the graph says of it.
        """
        ...
