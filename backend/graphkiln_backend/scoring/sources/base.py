"""What every source module offers: ranges for the plan, rows for a worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from graphkiln_backend.scoring.rows import Row
from graphkiln_backend.scoring.units import InputRange, Unit


class Source(Protocol):
    """An input. It is opened by its text on the driver and again on each worker, and holds nothing in between.

    Its methods may be called by several threads at a time. What is wrong with a single row is found by that row's
    `load`; what is wrong with the input raises from these.
    """

    def ranges(self, rows: int) -> Iterator[InputRange]:
        """The ranges of the input in a fixed order, streamed: memory must not grow with their number.

        Args:
            rows: About how many rows a range has.

        Raises:
            ScoringError: The input cannot be listed.
        """
        ...

    def rows(self, unit: Unit) -> Iterator[Row]:
        """The rows of a unit, in a fixed order, exactly `unit.rows` of them.

        Raises:
            InputChanged: The input is no longer what was planned.
            SourceUnavailable: The input cannot be read just now.
            ScoringError: The unit cannot be read at all.
        """
        ...
