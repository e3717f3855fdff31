"""What became faster or slower between two results: by ratios to a peer of the same run, not by figures of machines.

A ratio is lower when the peer, which did not change, is faster in comparison. It is a regression when it fell by more
than the rounds of both runs were apart, and by more than what runs of the same code are apart anyway. Machines differ
in what they are good at, so a ratio of another machine is shown and not judged.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kept_results import Result, Row, read_results

from graphkiln_backend.graph.errors import ManifestError

RATIO, SPREAD = "ratio", "spread"
_REGRESSION = "REGRESSION"
_JUDGED = {"same", "better", _REGRESSION}
_LEAST_NOISE = 0.03
"""Of runs whose rounds' spread is known."""
_USUAL_NOISE = 0.1
"""Of results without one."""
_RATIOS = (RATIO, "all so far", "to onnxruntime fp32")
"""Columns that hold a ratio; the first that a table has counts."""
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)x?")
_LOWER_IS_BETTER = {"bench", "memory", "growth", "start", "loading", "overhead", "session", "container", "queue"}
"""Benchmarks whose ratios are of times or memory."""
_COUNTS = {"batch", "requests", "concurrency", "instances"}
"""Numbers that say what a row is."""
_FOUND_OUT = {"engine", "version", "products", "error", "auto"}
"""Texts that do not say what a row is, but what was found there."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What became of one row.

    Attributes:
        row: Its benchmark and what it is called there.
        old: Its ratio; NaN where it had none.
        new: Its ratio; NaN where it has none.
        noise: How far ratios of the same code may be apart, as a part of them.
        lower_is_better: Whether a higher ratio is the worse one.
        same_machine: Whether both were measured on the same one.
    """

    row: str
    old: float
    new: float
    noise: float
    lower_is_better: bool = False
    same_machine: bool = True

    @property
    def change(self) -> float:
        """How much the ratio changed, as a part of the old one."""
        return self.new / self.old - 1 if self.old else math.nan

    @property
    def verdict(self) -> str:
        """In a word, or two."""
        if math.isnan(self.old):
            return "new"
        if math.isnan(self.new):
            return "gone"
        return self._judged() if self.same_machine else "other machine"

    def _judged(self) -> str:
        if not self.old:  # nothing had been reached
            return "same" if self.new == self.old else "new"
        gain = -self.change if self.lower_is_better else self.change
        if abs(gain) <= self.noise:
            return "same"
        return "better" if gain > 0 else _REGRESSION

    @property
    def is_regression(self) -> bool:
        """Whether it is worse, beyond noise."""
        return self.verdict == _REGRESSION


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two results came to.

    Attributes:
        changes: Of each row that has a ratio in one of them.
        notes: What a person should know before reading them, a line each: what is not compared at all, and why.
    """

    changes: list[Change]
    notes: list[str]

    @property
    def exit_code(self) -> int:
        """1 for a regression; 2 where there is nothing that could have been one."""
        if any(change.is_regression for change in self.changes):
            return 1
        return 0 if any(change.verdict in _JUDGED for change in self.changes) else 2

    @property
    def summary(self) -> str:
        """How many rows there are of each verdict."""
        counts = Counter(change.verdict for change in self.changes)
        return ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())) or "no ratio to compare"


def compare(old: Path, new: Path) -> Comparison:
    """Compares two results, or all results of two folders.

    Raises:
        ManifestError: One is no result, or they have no benchmark in common.
    """
    before, after = read_results(old), read_results(new)
    if old.is_file() and new.is_file():  # may be called as one likes
        (was,), (is_now,) = before.values(), after.values()
        _check_alike(was, is_now)
        before = dict.fromkeys(after, was)
    common = [name for name in after if name in before]
    if not common:
        names = f"{', '.join(before) or 'nothing'}; {', '.join(after) or 'nothing'}"
        raise ManifestError(f"{old} and {new} have no benchmark in common: {names}")
    notes = [*_only(old, before, after), *_only(new, after, before)]
    changes: list[Change] = []
    for name in common:
        found = list(_compare_rows(name, before[name], after[name]))
        notes += _conditions(name, before[name], after[name], found)
        changes += found
    return Comparison(changes=changes, notes=notes)


def _check_alike(old: Result, new: Result) -> None:
    """Refuses two files that are of different benchmarks, as far as both say of which they are."""
    if old.command and new.command and old.benchmark != new.benchmark:
        raise ManifestError(
            f"the results are of different benchmarks: {old.benchmark} and {new.benchmark}",
            hint="compare two of the same one, or two folders",
        )


def _only(place: Path, here: Mapping[str, Result], there: Mapping[str, Result]) -> Iterator[str]:
    if missing := [name for name in here if name not in there]:
        yield f"only in {place}, not compared: {', '.join(missing)}"


def _conditions(name: str, old: Result, new: Result, found: Sequence[Change]) -> Iterator[str]:
    """How both were measured, where that differs."""
    if old.machine != new.machine:
        yield f"{name}: not judged, ratios of different machines: {old.machine or '?'}; {new.machine or '?'}"
    if old.title != new.title:
        yield f"{name}: its ratios may be to something else: '{old.title}'; '{new.title}'"
    if old.command != new.command:
        yield f"{name}: measured by {old.command or '?'}; {new.command or '?'}"
    if not found:
        yield f"{name}: has no ratio, not compared"


def format_changes(changes: Sequence[Change]) -> list[dict[str, object]]:
    """A row for people for each."""
    return [
        {
            "row": change.row,
            "old": _shown(change.old),
            "new": _shown(change.new),
            "change": "-" if math.isnan(change.change) else f"{change.change:+.1%}",
            "noise": f"{change.noise:.1%}",
            "verdict": change.verdict,
        }
        for change in changes
    ]


def _shown(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:g}"


def _compare_rows(name: str, before: Result, after: Result) -> Iterator[Change]:
    old, new = dict(_ratios(before.rows)), dict(_ratios(after.rows))
    for label in dict.fromkeys((*old, *new)):
        was, is_now = old.get(label, (math.nan, None)), new.get(label, (math.nan, None))
        yield Change(
            row=f"{name}: {label}",
            old=was[0],
            new=is_now[0],
            noise=_noise(was[1], is_now[1]),
            lower_is_better=after.benchmark in _LOWER_IS_BETTER,
            same_machine=before.machine == after.machine,
        )


def _noise(*spreads: float | None) -> float:
    """Both runs' spreads together, as independent ones add up."""
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return _USUAL_NOISE
    return round(max(math.hypot(*known), _LEAST_NOISE), 4)


def _ratios(rows: list[Row]) -> Iterator[tuple[str, tuple[float, float | None]]]:
    """Each ratio by what its row is called, with its spread; of a transposed table, that of each column."""
    labels = [_label(row, _FOUND_OUT) for row in rows]
    if len(set(labels)) < len(labels):
        labels = [_label(row, set()) for row in rows]
    for label, row in zip(_distinct(labels), rows, strict=True):
        values = {column: number for column, value in row.items() if (number := _number(value)) is not None}
        if label.startswith(RATIO):  # to which peer, where a table has several
            yield from ((f"{column}{label.removeprefix(RATIO)}", (value, None)) for column, value in values.items())
        for column in _RATIOS:
            if column in values:
                yield label, (values[column], values.get(SPREAD))
                break


def _distinct(labels: Sequence[str]) -> Iterator[str]:
    """Rows that are called alike by their numbers, so that none is taken for another."""
    seen: Counter[str] = Counter()
    for label in labels:
        seen[label] += 1
        yield label if seen[label] == 1 else f"{label} ({seen[label]})"


def _label(row: Row, skipped: set[str]) -> str:
    """The texts and counts that a row begins with."""
    names = itertools.takewhile(lambda item: item[0] in _COUNTS or not _is_figure(item[1]), row.items())
    return ", ".join(str(value) for column, value in names if column not in skipped)


def _number(value: object) -> float | None:
    """A ratio or figure; None for text, and for what is no number that can be compared."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    return float(found[1]) if found else None


def _is_figure(value: object) -> bool:
    """Whether it was measured, also where it is no number that can be compared."""
    return isinstance(value, int | float) or (isinstance(value, str) and bool(_NUMBER.fullmatch(value)))
