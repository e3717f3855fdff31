"""What was measured, as it is kept on disk while a story is told, and the rows that people see."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graphkiln.story.judging import Judgment
from graphkiln.story.ways import Way
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import ManifestError, MeasurementError
from graphkiln_backend.graph.precision import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One segment of one way.

    Attributes:
        number: Of the round; those of all ways with the same number were measured one after the other.
        per_second: Images answered per second.
        latencies_ms: Of each image.
        cores: CPU seconds per second, of the process and, where it is served, of the server.
        memory_mb: Memory of both at the end.
    """

    number: int
    per_second: float
    latencies_ms: tuple[float, ...]
    cores: float
    memory_mb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What was seen of one way.

    Attributes:
        refused: Why it cannot be done here, or empty.
        judgment: Of its answers, or None before.
        rounds: Its measurements.
    """

    refused: str = ""
    judgment: Judgment | None = None
    rounds: tuple[Round, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A story, whole or as far as it came.

    Attributes:
        facts: The machine, the versions, the request; for people.
        derivative: `OUTPUT:INPUT`, what gradients are of and by; empty before the model was opened.
        precision: The lowest precision that was proven, or None before.
        seen: By key of the way.
    """

    facts: dict[str, Any]
    derivative: str = ""
    precision: Precision | None = None
    seen: dict[str, Seen] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes it, whole or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(encode(self)))
        partial.rename(path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Reads one.

        Raises:
            MeasurementError: The file is of another version of graphkiln, or spoiled.
        """
        try:
            return decode(cls, json.loads(path.read_text()))
        except (OSError, ValueError, ManifestError) as error:
            raise MeasurementError(
                f"cannot resume from {path}: {error}", hint="start anew, without --resume"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way as people see it; what was not measured or judged is None.

    Attributes:
        key: Of the way.
        step: Number of the step.
        title: A few words.
        switch: Whether it is one switch by itself.
        per_second: Images per second, the median of the rounds.
        p50_ms: Median latency of an image.
        p99_ms: 99th percentile.
        own: Factor to the way that it is compared with, the median over the rounds.
        beside: Key of that way.
        cumulative: Factor to step 0, likewise.
        source: Factor that the source reports.
        cores: CPU seconds per second.
        memory_mb: Memory in MB.
        judgment: Whether its answers may count.
        refused: Why it was not done.
    """

    key: str
    step: int
    title: str
    switch: bool
    per_second: float | None
    p50_ms: float | None
    p99_ms: float | None
    own: float | None
    beside: str
    cumulative: float | None
    source: str
    cores: float | None
    memory_mb: float | None
    judgment: Judgment | None
    refused: str

    @property
    def counts(self) -> bool:
        """Whether it was measured, and its answers passed the policy."""
        return self.per_second is not None and self.judgment is not None and self.judgment.passed


def rows(ways: Sequence[Way], record: Record) -> tuple[Row, ...]:
    """The table of a story: factors are relative to the nearest way before that counts."""
    found: list[Row] = []
    for way in ways:
        beside = _base(way, found, ways)
        found.append(_row(way, record.seen, beside))
    return tuple(found)


def _base(way: Way, before: Sequence[Row], ways: Sequence[Way]) -> str:
    """The way that it is compared with; where that one does not count, the one that it was compared with."""
    counting = {row.key for row in before if row.counts}
    parents = {each.key: each.beside for each in ways}
    key = way.beside
    while key and key not in counting:
        key = parents.get(key, "")
    return key


def _row(way: Way, seen: Mapping[str, Seen], beside: str) -> Row:
    mine = seen.get(way.key, Seen())
    latencies = [latency for each in mine.rounds for latency in each.latencies_ms]
    passed = mine.judgment is not None and mine.judgment.passed
    return Row(
        key=way.key,
        step=way.step,
        title=way.title,
        switch=way.switch,
        per_second=_median(each.per_second for each in mine.rounds),
        p50_ms=float(np.percentile(latencies, 50)) if latencies else None,
        p99_ms=float(np.percentile(latencies, 99)) if latencies else None,
        own=_factor(mine, seen.get(beside)) if passed else None,
        beside=beside,
        cumulative=_factor(mine, seen.get("eager")) if passed and not way.switch else None,
        source=way.source,
        cores=_median(each.cores for each in mine.rounds),
        memory_mb=_median(each.memory_mb for each in mine.rounds),
        judgment=mine.judgment,
        refused=mine.refused,
    )


def _factor(mine: Seen, other: Seen | None) -> float | None:
    """Round by round, so that a machine that slows down slows both sides."""
    if other is None:
        return None
    theirs = {each.number: each.per_second for each in other.rounds}
    return _median(each.per_second / theirs[each.number] for each in mine.rounds if each.number in theirs)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def document(ways: Sequence[Way], record: Record, commands: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What `--json` prints."""
    steps = [{**encode(row), "counts": row.counts, "commands": list(commands[row.key])} for row in rows(ways, record)]
    return {"facts": record.facts, "precision": record.precision, "steps": steps}
