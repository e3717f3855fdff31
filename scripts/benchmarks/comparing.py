"""What became faster or slower between two results: by ratios to a peer of the same run, not by figures of machines.

A ratio is lower when the peer, which did not change, is faster in comparison. It is a regression when it fell by more
than the rounds of both runs were apart, and by more than what runs of the same code are apart anyway.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RATIO, SPREAD = "ratio", "spread"
_REGRESSION = "REGRESSION"
_LEAST_NOISE = 0.03
"""Of runs whose rounds' spread is known."""
_USUAL_NOISE = 0.1
"""Of results without one."""
_RATIOS = (RATIO, "all so far", "to onnxruntime fp32")
"""Columns that hold a ratio; the first that a table has counts."""
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)x?")
_LOWER_IS_BETTER = {"bench", "memory", "growth", "start", "loading", "overhead", "session"}
"""Benchmarks whose ratios are of times or memory."""
_COUNTS = {"batch", "requests", "concurrency", "instances"}
"""Numbers that say what a row is."""
_FOUND_OUT = {"engine", "version", "products", "error", "auto"}
"""Texts that do not say what a row is, but what was found there."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What became of one row.

    Attributes:
        row: Its benchmark and what it is called there.
        old: Its ratio; NaN where it had none.
        new: Its ratio; NaN where it has none.
        noise: How far ratios of the same code may be apart, as a part of them.
        lower_is_better: Whether a higher ratio is the worse one.
    """

    row: str
    old: float
    new: float
    noise: float
    lower_is_better: bool = False

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


def compare(old: Path, new: Path) -> list[Change]:
    """Compares two results, or all results of two folders.

    Raises:
        SystemExit: One is no result, or they have none in common.
    """
    before, after = _read_results(old), _read_results(new)
    if len(before) == len(after) == 1:
        before = dict(zip(after, before.values(), strict=True))  # files may be called as one likes
    common = [name for name in after if name in before]
    if not common:
        sys.exit(f"{old} and {new} have no benchmark in common: {', '.join(before)}; {', '.join(after)}")
    return [change for name in common for change in _compare_rows(name, before[name], after[name])]


def format_changes(changes: list[Change]) -> list[dict[str, object]]:
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


def _read_results(path: Path) -> dict[str, list[Row]]:
    if path.is_dir():
        return {file.stem: _read_rows(file) for file in sorted(path.glob("*.json"))}
    return {path.stem: _read_rows(path)}


def _read_rows(file: Path) -> list[Row]:
    try:
        rows = json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{file} is no result of scripts/benchmark: {type(error).__name__}: {error}")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        sys.exit(f"{file} is no result of scripts/benchmark: its rows are none")
    return rows


def _compare_rows(name: str, before: list[Row], after: list[Row]) -> Iterator[Change]:
    old, new = dict(_ratios(before)), dict(_ratios(after))
    for label in dict.fromkeys((*old, *new)):
        was, is_now = old.get(label, (math.nan, None)), new.get(label, (math.nan, None))
        yield Change(
            row=f"{name}: {label}",
            old=was[0],
            new=is_now[0],
            noise=_noise(was[1], is_now[1]),
            lower_is_better=name in _LOWER_IS_BETTER,
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
    for label, row in zip(labels, rows, strict=True):
        values = {column: number for column, value in row.items() if (number := _number(value)) is not None}
        if label.startswith(RATIO):  # to which peer, where a table has several
            yield from ((f"{column}{label.removeprefix(RATIO)}", (value, None)) for column, value in values.items())
        for column in _RATIOS:
            if column in values:
                yield label, (values[column], values.get(SPREAD))
                break


def _label(row: Row, skipped: set[str]) -> str:
    """The texts and counts that a row begins with."""
    names = itertools.takewhile(lambda item: item[0] in _COUNTS or _number(item[1]) is None, row.items())
    return ", ".join(str(value) for column, value in names if column not in skipped)


def _number(value: object) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    return float(found[1]) if found else None
