"""Loads of `graphkiln bench`: from options to the runs of one command."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import InvalidInput

if TYPE_CHECKING:
    from graphkiln.bench.arrivals import Moments
    from graphkiln.bench.job import Load

# Seconds of a run.
DEFAULT_S = 10.0
# Requests of a run, at most: their due times are kept in memory.
_MOST_REQUESTS = 1e8
# Seconds of a run, at most: three years. A longer one is a typing error, and beyond the range of timers.
_LONGEST_S = 1e8
# Callers, at most: each is a thread.
_MOST_CALLERS = 4096


class Arrivals(StrEnum):
    """Arrival process of the requests of a rate."""

    POISSON = "poisson"
    CONSTANT = "constant"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Options of the command line; at most one of `concurrency`, `rate` and `trace` is given.

    Attributes:
        concurrency: Numbers of callers, with commas.
        rate: Requests per second.
        arrivals: How they are spread; None for the default.
        burst: How many come at a time; None for one.
        trace: File of arrival times.
        seconds: Of each run; None for the default.
        warmup_s: Before each run.
    """

    concurrency: str | None = None
    rate: float | None = None
    arrivals: Arrivals | None = None
    burst: int | None = None
    trace: Path | None = None
    seconds: float | None = None
    warmup_s: float = 1.0

    def plan(self) -> list[tuple[str, Load]]:
        """The runs, each with its name.

        Raises:
            InvalidInput: Options contradict each other, or one cannot be read.
        """
        self._check()
        seconds = self.seconds or DEFAULT_S
        _check_size(self.rate or 0.0, self.warmup_s + seconds)
        if self.trace:
            return [self._trace_load(self.trace)]
        if self.rate:
            load = _open(self._arrivals(self.rate, seconds), seconds, self.warmup_s)
            return [(self._rate_name(self.rate), _checked(load))]
        numbers = [1] if self.concurrency is None else _parse(self.concurrency)
        return [(str(number), _closed(number, seconds, self.warmup_s)) for number in numbers]

    def _check(self) -> None:
        given = {"--concurrency": self.concurrency, "--rate": self.rate, "--trace": self.trace}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise InvalidInput(f"{' and '.join(named)} are different loads", hint="give one of them")
        if not self.rate and (self.arrivals or self.burst):
            raise InvalidInput("--arrivals and --burst say how a rate is spread", hint="add --rate, such as --rate 100")
        if self.burst and self.arrivals:
            raise InvalidInput("bursts come at random moments: --burst goes without --arrivals")

    def _rate_name(self, rate: float) -> str:
        if self.burst:
            return f"{rate:g}/s by {self.burst}"
        return f"{rate:g}/s{' even' if self.arrivals is Arrivals.CONSTANT else ''}"

    def _arrivals(self, rate: float, seconds: float) -> Moments:
        from graphkiln.bench.arrivals import bursts, constant, poisson

        whole = self.warmup_s + seconds
        if self.burst:
            return bursts(rate, whole, self.burst)
        return (constant if self.arrivals is Arrivals.CONSTANT else poisson)(rate, whole)

    def _trace_load(self, file: Path) -> tuple[str, Load]:
        """The trace from its start, for its length or `seconds`; before it, a warm-up at its mean rate."""
        import numpy as np

        from graphkiln.bench.arrivals import constant, read_trace

        moments = read_trace(file)
        seconds = self.seconds or max(float(moments[-1]) + 1e-3, 0.5)  # the last one counts, too
        _check_size(0.0, self.warmup_s + seconds)
        moments = moments[moments < seconds]
        before = constant(len(moments) / seconds, self.warmup_s) if self.warmup_s else moments[:0]
        return "trace", _open(np.concatenate([before, self.warmup_s + moments]), seconds, self.warmup_s)


def _check_size(rate: float, seconds: float) -> None:
    """Refuse runs that are too long or have too many requests."""
    if not (seconds <= _LONGEST_S and rate * seconds <= _MOST_REQUESTS):  # nor NaN
        wanted = f"{rate:g} requests a second for {seconds:g} s" if rate else f"a run of {seconds:g} s"
        raise InvalidInput(f"{wanted} would not end, or be too many", hint="a lower --rate, or a shorter --duration")


def _checked(load: Load) -> Load:
    """A load of which a request counts.

    Raises:
        InvalidInput: None is due after the warm-up.
    """
    if load.arrivals is None or not (load.arrivals >= load.warmup_s).any():
        raise InvalidInput(
            f"no request is due in {load.seconds:g} s",
            hint="a higher --rate, a smaller --burst, or a longer --duration",
        )
    return load


def _closed(callers: int, seconds: float, warmup_s: float) -> Load:
    from graphkiln.bench.job import Load

    return Load(callers=callers, seconds=seconds, warmup_s=warmup_s)


def _open(arrivals: Moments, seconds: float, warmup_s: float) -> Load:
    from graphkiln.bench.generator import MAX_CALLERS
    from graphkiln.bench.job import Load

    return Load(callers=MAX_CALLERS, seconds=seconds, warmup_s=warmup_s, arrivals=arrivals)


def _parse(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > _MOST_CALLERS:
        raise InvalidInput(
            f"--concurrency {text}: expected numbers of at least 1, and no more than {_MOST_CALLERS}",
            hint="for example --concurrency 1,4,16",
        )
    return numbers
