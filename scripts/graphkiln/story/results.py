"""What was measured, as it is kept on disk during a story, and the rows of its table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graphkiln.story.judgment import Judgment
from graphkiln.story.variants import Variant
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import ManifestError, MeasurementError
from graphkiln_backend.graph.files import read_text
from graphkiln_backend.graph.precision import Precision

_REFERENCE = "eager"
"""Key of the variant that all cumulative factors are relative to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One measurement of one variant.

    Attributes:
        number: Of the round; the variants of one round were measured one after the other.
        per_second: Images per second.
        latencies_ms: Of each image.
        cores: CPU seconds per second, of the process and, where there is one, of the server.
        memory_mb: Memory of both at the end.
    """

    number: int
    per_second: float
    latencies_ms: tuple[float, ...]
    cores: float
    memory_mb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What was observed of one variant.

    Attributes:
        refused: Why it cannot be executed here, or empty.
        judgment: Of its predictions, or None before.
        rounds: Its measurements.
    """

    refused: str = ""
    judgment: Judgment | None = None
    rounds: tuple[Round, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether its predictions were judged, and passed."""
        return self.judgment is not None and self.judgment.passed


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A story, complete or as far as it came. The field names are the keys of its file.

    Attributes:
        facts: The machine, the versions, the request; for people.
        derivative: `OUTPUT:INPUT`, what gradients are of and with respect to; empty before the model was opened.
        precision: The lowest precision that was proven, or None before.
        seen: Observations by key of the variant.
    """

    facts: dict[str, Any]
    derivative: str = ""
    precision: Precision | None = None
    seen: dict[str, Observation] = field(default_factory=dict)

    def observation(self, key: str) -> Observation:
        """Of a variant; an empty one where nothing was observed."""
        return self.seen.get(key, Observation())

    def write(self, path: Path) -> None:
        """Writes it, whole or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(encode(self)))
        partial.rename(path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Reads one.

        Raises:
            MeasurementError: The file cannot be read, is damaged, or of another version of graphkiln.
        """
        try:
            return decode(cls, json.loads(read_text(path)))
        except (OSError, ValueError, RecursionError, ManifestError) as error:
            raise MeasurementError(
                f"cannot resume from {path}: {error}", hint="start anew, without --resume"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One variant as people see it. The field names are the keys of `--json`; what was not measured is None.

    Attributes:
        key: Of the variant.
        step: Number of the step.
        title: A few words.
        switch: Whether it shows one optimization by itself.
        per_second: Images per second, the median of the rounds.
        rounds: Images per second of each round, by its number: what the factors are computed from.
        p50_ms: Median latency of an image.
        p99_ms: 99th percentile.
        own: Speed-up over its baseline, the median over the rounds that both have.
        beside: Key of the baseline.
        cumulative: Speed-up over step 0, likewise.
        source: Speed-up that the source reports.
        cores: CPU seconds per second.
        memory_mb: Memory in MB.
        judgment: Of its predictions.
        refused: Why it was not executed.
    """

    key: str
    step: int
    title: str
    switch: bool
    per_second: float | None
    rounds: dict[int, float]
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
        """Whether it was measured, and its predictions passed the policy."""
        return self.per_second is not None and self.judgment is not None and self.judgment.passed


def build_rows(variants: Sequence[Variant], record: Record) -> tuple[Row, ...]:
    """The table of a story: factors are relative to the nearest baseline that counts."""
    rows: list[Row] = []
    for variant in variants:
        rows.append(_row(variant, record, _baseline(variant, rows, variants)))
    return tuple(rows)


def build_document(
    variants: Sequence[Variant], record: Record, commands: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The document that `--json` prints; `commands` repeat a variant, by its key."""
    rows = build_rows(variants, record)
    steps = [{**encode(row), "counts": row.counts, "commands": list(commands[row.key])} for row in rows]
    return {"facts": record.facts, "precision": record.precision, "steps": steps}


def _baseline(variant: Variant, before: Sequence[Row], variants: Sequence[Variant]) -> str:
    """Key of the baseline; where that one does not count, of its own baseline, and so on."""
    counting = {row.key for row in before if row.counts}
    parents = {other.key: other.baseline for other in variants}
    key = variant.baseline
    while key and key not in counting:
        key = parents.get(key, "")
    return key


def _row(variant: Variant, record: Record, baseline: str) -> Row:
    observation = record.observation(variant.key)
    rounds = observation.rounds
    latencies = [latency for measured in rounds for latency in measured.latencies_ms]
    passed, chained = observation.passed, observation.passed and not variant.switch
    return Row(
        key=variant.key,
        step=variant.step,
        title=variant.title,
        switch=variant.switch,
        per_second=_median(measured.per_second for measured in rounds),
        rounds={measured.number: measured.per_second for measured in rounds},
        p50_ms=float(np.percentile(latencies, 50)) if latencies else None,
        p99_ms=float(np.percentile(latencies, 99)) if latencies else None,
        own=_speed_up(observation, record.observation(baseline)) if passed else None,
        beside=baseline,
        cumulative=_speed_up(observation, record.observation(_REFERENCE)) if chained else None,
        source=variant.reported,
        cores=_median(measured.cores for measured in rounds),
        memory_mb=_median(measured.memory_mb for measured in rounds),
        judgment=observation.judgment,
        refused=observation.refused,
    )


def _speed_up(observation: Observation, reference: Observation) -> float | None:
    """Round by round, so that a machine that slows down slows both sides; None without a common round."""
    rates = {measured.number: measured.per_second for measured in reference.rounds}
    return _median(
        measured.per_second / rates[measured.number] for measured in observation.rounds if measured.number in rates
    )


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
