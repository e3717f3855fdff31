"""Interleaved measurements of several set-ups, so that a noisy machine slows all of them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from graphkiln.story.worker import measure_throughput

_WARM_UP_S = 1.0


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """One row of a comparison: a function that does one request, called from `concurrency` threads."""

    name: str
    concurrency: int
    request: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All rounds of a set-up: the median rate, percentiles of all latencies, and each round's rate."""

    per_second: float
    p50_ms: float
    p99_ms: float
    rates: tuple[float, ...] = ()

    def spread_beside(self, reference: Summary) -> float:
        """Spread of the rounds' ratios to a reference: see `Ratio`."""
        return ratio_of(self.rates, reference.rates).spread if self.rates else 0.0


def measure(set_ups: list[SetUp], rounds: int, seconds: float) -> dict[str, Summary]:
    """Measure the set-ups in turn, round after round; a first round is a warm-up and does not count."""
    rates: dict[str, list[float]] = {set_up.name: [] for set_up in set_ups}
    latencies_ms: dict[str, list[float]] = {set_up.name: [] for set_up in set_ups}
    for number in range(rounds + 1):
        for set_up in set_ups:
            show_progress(f"round {number}/{rounds}: {set_up.name}")
            length = seconds if number else min(seconds, _WARM_UP_S)
            throughput = measure_throughput(_without_image(set_up.request), set_up.concurrency, (b"",), length)
            if number:
                rates[set_up.name].append(throughput.per_second)
                latencies_ms[set_up.name] += throughput.latencies_ms
    show_progress("")
    return {
        name: Summary(
            per_second=statistics.median(rates[name]),
            p50_ms=float(np.percentile(latencies_ms[name], 50)),
            p99_ms=float(np.percentile(latencies_ms[name], 99)),
            rates=tuple(rates[name]),
        )
        for name in rates
    }


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio to a reference, of several rounds that took turns.

    Attributes:
        median: Of the rounds' ratios.
        spread: Half of what lies between the smallest and the largest, as a part of the median; 0 for one round.
    """

    median: float
    spread: float


def ratio_of(values: Sequence[float], reference: Sequence[float]) -> Ratio:
    """The ratio round by round, so that a machine that becomes slower meanwhile slows both sides of each."""
    ratios = [value / base for value, base in zip(values, reference, strict=True)]
    median = statistics.median(ratios)
    return Ratio(median=round(median, 3), spread=round((max(ratios) - min(ratios)) / 2 / median, 3))


_listeners: list[Callable[[str], None]] = []


def show_progress(text: str) -> None:
    """Replace the line on stderr that says what happens now."""
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    for listener in _listeners:
        listener(text)


def listen_to_progress(listener: Callable[[str], None]) -> None:
    """Hand each text of `show_progress` to a function, too, from now on."""
    _listeners.append(listener)


def _without_image(request: Callable[[], object]) -> Callable[[bytes], object]:
    return lambda _: request()
