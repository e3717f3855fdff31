"""Interleaved measurements of several set-ups, so that a noisy machine slows all of them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from graphkiln.bench.generator import Throughput, measure_throughput

_WARM_UP_S = 1.0
_Found = TypeVar("_Found")


def take_turns(
    title: str, runs: Mapping[str, Callable[[float], _Found]], rounds: int, seconds: float, *, warm_up: bool = True
) -> dict[str, list[_Found]]:
    """Measure set-ups in turn, round after round.

    Args:
        title: Title of the progress line.
        runs: Name of a set-up -> function that measures it for about so many seconds.
        rounds: Number of measured rounds.
        seconds: Duration of one measurement.
        warm_up: Start with a short round that is not counted.
    """
    found: dict[str, list[_Found]] = {name: [] for name in runs}
    for number in range(0 if warm_up else 1, rounds + 1):
        for name, run in runs.items():
            show_progress(f"{title}round {number}/{rounds}: {name}")
            measured = run(seconds if number else min(seconds, _WARM_UP_S))
            if number:
                found[name].append(measured)
    show_progress("")
    return found


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All rounds of a set-up: the median rate, percentiles of all latencies, and each round's rate."""

    per_second: float
    p50_ms: float
    p99_ms: float
    rates: tuple[float, ...] = ()


def measure(
    requests: Mapping[str, Callable[[], object]], concurrency: int, rounds: int, seconds: float
) -> dict[str, Summary]:
    """Measure in turn functions of one request each, called by `concurrency` threads."""

    def load(request: Callable[[], object], length: float) -> Throughput:
        return measure_throughput(request, concurrency, length)

    found = take_turns("", {name: partial(load, each) for name, each in requests.items()}, rounds, seconds)
    return {name: _summary(measured) for name, measured in found.items()}


def _summary(measured: Sequence[Throughput]) -> Summary:
    rates = tuple(each.per_second for each in measured)
    p50, p99 = np.percentile([ms for each in measured for ms in each.latencies_ms], (50, 99))
    return Summary(per_second=statistics.median(rates), p50_ms=float(p50), p99_ms=float(p99), rates=rates)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio to a reference over several rounds.

    Attributes:
        median: Median of the rounds' ratios.
        spread: Half the range of the ratios relative to the median; 0 for one round.
    """

    median: float
    spread: float


def ratio_of(values: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Compute the ratio round by round, so that a slower machine affects both sides."""
    ratios = [value / base for value, base in zip(values, reference, strict=True)]
    median = statistics.median(ratios)
    return Ratio(median=round(median, 3), spread=round((max(ratios) - min(ratios)) / 2 / median, 3))


def show_progress(text: str) -> None:
    """Replace the progress line on stderr."""
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
