"""What a search found as a document: what `--json` prints, and what the table and the page are made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from graphkiln.reporting.json_text import finite
from graphkiln.tuning.accuracy_floor import undecided
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.result import Result, Row
from graphkiln.tuning.standing import Point
from graphkiln.tuning.trials import Measured, OpenLoop
from graphkiln.tuning.tuner import Tuning
from graphkiln_backend.graph.files import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What a configuration costs.

    Attributes:
        price_per_hour: Of the machine, in any currency; None where nobody says.
    """

    price_per_hour: float | None = None

    def of(self, measured: Measured) -> dict[str, float]:
        """Per thousand requests: `price_per_1000` and `watt_hours_per_1000`, each where it can be known."""
        found: dict[str, float] = {}
        per_second = measured.throughput.value
        if self.price_per_hour is not None and per_second:
            found["price_per_1000"] = self.price_per_hour / 3600 / per_second * 1000
        if measured.energy_j is not None and per_second:
            found["watt_hours_per_1000"] = measured.energy_j / measured.seconds / per_second * 1000 / 3600
        return found


def document_of(result: Result, tuning: Tuning, command: str, costs: Costs) -> dict[str, Any]:
    """A search as JSON data: no value in it is infinite.

    Args:
        result: What was found.
        tuning: What was asked.
        command: The command line that repeats it.
        costs: What a machine costs.
    """
    space = tuning.spanned.space
    default = space.today
    describe = _Describing(default=default, costs=costs)
    identity = tuning.identity()
    document = {
        "model": tuning.subject.name,
        "version": tuning.subject.version,
        "target": {
            "text": str(result.target),
            "p99_ms": result.target.p99_s * 1e3,
            "rate": result.target.rate,
            "objective": str(result.target.objective),
            "accuracy_floor": result.target.accuracy_floor,
        },
        "met": result.chosen is not None,
        "machine": identity["machine"],
        "server": identity["server"],
        "load": str(tuning.arriving),
        "requests": tuning.questions.origin,
        "space": {
            "axes": identity["space"],
            "points": space.points,
            "candidates": len(space.candidates),
            "reasons": space.reasons(),
            "left_out": list(tuning.spanned.left_out),
        },
        "chosen": describe.row(result.chosen),
        "promise": describe.point(result.promise),
        "closest": describe.row(result.closest),
        "unproven": result.is_unproven,
        "default": describe.row(result.default),
        "rows": [describe.row(row) for row in result.rows],
        "refused": _refused(result, tuning),
        "untried": [
            {"changes": in_words(each.candidate, default), "reason": each.reason}
            for each in result.exclusions
            if each.by_budget
        ],
        "front": [row.standing.candidate.id for row in result.front],
        "curve": [describe.point(point) for point in result.curve],
        "knee": result.knee,
        "readings": [{"spent_s": each.spent_s, "rate": each.rate, "level": each.level} for each in result.readings],
        "notes": list(dict.fromkeys((*result.notes, *_warnings(result), *_doubts(tuning)))),
        "spent_s": result.spent_s,
        "measurements": result.measurements,
        "journal": str(tuning.journal),
        "command": command,
    }
    found: dict[str, Any] = finite(document)
    return found


def in_words(candidate: Candidate, default: Candidate) -> str:
    """A candidate by what distinguishes it from the default configuration."""
    changed = {key: value for key, value in candidate.items if default.values.get(key) != value}
    return str(Candidate.of(changed)) if changed else "as it is served today"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Describing:
    """Rows and points as JSON data."""

    default: Candidate
    costs: Costs

    def row(self, row: Row | None) -> dict[str, Any] | None:
        if row is None:
            return None
        candidate = row.standing.candidate
        return {
            "id": candidate.id,
            "configuration": candidate.as_json(),
            "changes": in_words(candidate, self.default),
            "score": row.score,
            "limit": row.limit,
            "lost": row.standing.lost,
            "accuracy_lost": row.accuracy_lost,
            "best": self.point(row.best_point),
            "points": [self.point(point) for point in row.standing.points],
        }

    def point(self, point: Point | None) -> dict[str, Any] | None:
        if point is None:
            return None
        measured = point.measured
        is_open = isinstance(point.load, OpenLoop)
        memory = measured.memory_bytes
        return {
            "rate": point.load.rate if isinstance(point.load, OpenLoop) else None,
            "callers": None if is_open else getattr(point.load, "callers", None),
            "throughput": measured.throughput.value,
            "throughput_range": [measured.throughput.lower, measured.throughput.upper],
            "p50_ms": measured.latency.p50_s * 1e3,
            "p99_ms": measured.latency.p99.value * 1e3,
            "p99_range_ms": [measured.latency.p99.lower * 1e3, measured.latency.p99_at_most_s * 1e3],
            "requests": measured.requests,
            "seconds": measured.seconds,
            "errors": dict(measured.errors),
            "unsent": measured.unsent,
            "answers_checked": measured.answers,
            "client_cores": measured.client_cores,
            "server_cores": measured.server_cores,
            "memory_mb": None if memory is None else memory / MIB,
            "placed": measured.placed,
            "warning": measured.warning,
            **self.costs.of(measured),
        }


def _refused(result: Result, tuning: Tuning) -> dict[str, int]:
    """Reason -> how many candidates of the space it kept from being measured."""
    legal = set(tuning.spanned.space.candidates)
    return dict(Counter(each.reason for each in result.exclusions if each.candidate in legal).most_common())


def _warnings(result: Result) -> list[str]:
    measured = [point.measured for row in result.rows for point in row.standing.points]
    found = [each for each in measured if each.warning]
    worst = max(found, key=lambda each: each.client_cores, default=None)
    return [f"{len(found)} of {len(measured)} measurements: {worst.warning}"] if worst else []


def _doubts(tuning: Tuning) -> list[str]:
    return list(filter(None, [undecided(tuning.questions, tuning.target.accuracy_floor)]))
