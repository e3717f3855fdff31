"""Measure a worker on this machine: rows from all over the source are scored, and nothing is written."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Self

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.scoring.model import describe_session, read_model, with_local_model
from graphkiln_backend.scoring.opening import open_source
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.scratch import Scratch, scratch_folder
from graphkiln_backend.scoring.units import Unit
from graphkiln_backend.system.resources import usable_cores

MEASURED_S = 10.0
_MOST_PIECES = 10
# Scored first, and not counted: memory and caches warm up, and their time says how many rows a second has.
_FIRST_ROWS = 64
# Two-sided 95% of Student's distribution, for 1 to 9 degrees of freedom.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """The measured rate of a worker.

    Attributes:
        rows: How many were measured.
        errors: Rows of these with an error.
        pieces: In how many pieces, from all over the source.
        per_s: Rows per second.
        interval: With 95% confidence; None for a single piece.
    """

    rows: int
    errors: int
    pieces: int
    per_s: float
    interval: tuple[float, float] | None

    @property
    def least(self) -> float:
        """The lower end, where it says something; else half of what was measured."""
        return self.interval[0] if self.interval and self.interval[0] > 0 else self.per_s / 2

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Rate:
        """The rate of some pieces: all their rows in all their time; its interval from how they differ."""
        rows, seconds = sum(piece.rows for piece in pieces), sum(piece.seconds for piece in pieces)
        rates = [piece.rows / piece.seconds for piece in pieces]
        per_s, interval = rows / seconds, None
        if len(rates) > 1:
            margin = _STUDENT[len(rates) - 2] * statistics.stdev(rates) / math.sqrt(len(rates))
            interval = (max(per_s - margin, 0.0), per_s + margin)
        errors = sum(piece.errors for piece in pieces)
        return cls(rows=rows, errors=errors, pieces=len(pieces), per_s=per_s, interval=interval)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Some rows that were scored one after the other.

    Attributes:
        errors: Rows of these with an error.
        seconds: From the first read to the table of answers.
    """

    rows: int
    errors: int
    seconds: float


class Sampler:
    """A worker of this machine that commits nothing. Use it as a context manager.

    Args:
        request: The run.
        place: Given whether the model runs on a GPU where there is one, says how many cores a worker has.

    Attributes:
        model: Name and version.
        configuration: Digest of all that changes an answer.
        session: Engine, device and precision.
        start_s: How long it took to be ready.

    Raises:
        GraphkilnError: The model cannot be lowered here, or computes wrongly.
    """

    def __init__(self, request: ScoreRequest, place: Callable[[bool], int]) -> None:
        begun = time.monotonic()
        self._source = open_source(request)
        with ExitStack() as opened:
            folder = opened.enter_context(scratch_folder(Scratch.SAMPLE)).path
            cache = opened.enter_context(CacheSettings(folder=request.cache).checked().open(folder / "cache"))
            local = with_local_model(request, folder)
            model = read_model(local, cache, usable_cores())
            cores = place(model.wants_gpu)
            if cores != usable_cores():
                model = read_model(local, cache, cores)
            self.configuration = model.configuration(request)
            self.model = f"{model.name} version {model.version}"
            proven = model.build(cache)
            opened.enter_context(proven.session)
            self._scorer = opened.enter_context(model.scorer(proven, request, cores, cache))
            self._opened = opened.pop_all()
        self.session = describe_session(proven)
        self.start_s = time.monotonic() - begun

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def measure(
        self, units: Sequence[Unit], seconds: float = MEASURED_S, clock: Callable[[], float] = time.perf_counter
    ) -> Rate:
        """Score rows of some units for a while.

        Args:
            units: Units of the source, from all over it.
            seconds: About how long.
            clock: Seconds that only grow.

        Raises:
            GraphkilnError: A unit cannot be read at all, or the session failed.
        """
        end = clock() + seconds
        first = self._score(units[0], 0, _FIRST_ROWS, clock)
        most = max(_FIRST_ROWS, int(first.rows / max(first.seconds, 1e-6) * seconds / _MOST_PIECES))
        pieces: list[Piece] = []
        for unit, begin in islice(_spans(units, most), _MOST_PIECES):
            pieces.append(self._score(unit, begin, begin + most, clock))
            if clock() >= end:
                break
        return Rate.of(pieces)

    def _score(self, unit: Unit, begin: int, end: int, clock: Callable[[], float]) -> Piece:
        begun = clock()
        table = self._scorer.answer(islice(self._source.rows(unit), begin, end)).table
        errors = len(table) - table.column("error").null_count
        return Piece(rows=len(table), errors=errors, seconds=max(clock() - begun, 1e-6))


def _spans(units: Sequence[Unit], rows: int) -> Iterator[tuple[Unit, int]]:
    """Positions of pieces: the first ones of all units, then the second ones, ..."""
    for begin in range(0, max(unit.rows for unit in units), rows):
        yield from ((unit, begin) for unit in units if unit.rows > begin)
