"""Loads of `graphkiln bench`: from options to the runs of one command."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import InvalidInput

if TYPE_CHECKING:
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


def plan_loads(
    *,
    concurrency: str | None = None,
    rate: float | None = None,
    arrivals: Arrivals | None = None,
    burst: int | None = None,
    trace: Path | None = None,
    seconds: float | None = None,
    warmup_s: float = 1.0,
) -> list[tuple[str, Load]]:
    """The runs of a command, each with its name; the arguments are its options, None where not given.

    Raises:
        InvalidInput: Options contradict each other, or one cannot be read.
    """
    from graphkiln.bench.job import Load

    given = {"--concurrency": concurrency, "--rate": rate, "--trace": trace}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidInput(f"{' and '.join(named)} are different loads", hint="give one of them")
    if not rate and (arrivals or burst):
        raise InvalidInput("--arrivals and --burst say how a rate is spread", hint="add --rate, such as --rate 100")
    _check_size(rate or 0.0, warmup_s + (seconds or DEFAULT_S))
    if trace:
        return [("trace", _trace_load(trace, seconds, warmup_s))]
    if rate:
        return [_rate_load(rate, arrivals, burst, seconds or DEFAULT_S, warmup_s)]
    numbers = [1] if concurrency is None else _parse(concurrency)
    return [(str(number), Load(callers=number, seconds=seconds or DEFAULT_S, warmup_s=warmup_s)) for number in numbers]


def _check_size(rate: float, seconds: float) -> None:
    if not (seconds <= _LONGEST_S and rate * seconds <= _MOST_REQUESTS):  # nor NaN
        wanted = f"{rate:g} requests a second for {seconds:g} s" if rate else f"a run of {seconds:g} s"
        raise InvalidInput(f"{wanted} would not end, or be too many", hint="a lower --rate, or a shorter --duration")


def _rate_load(
    rate: float, arrivals: Arrivals | None, burst: int | None, seconds: float, warmup_s: float
) -> tuple[str, Load]:
    from graphkiln.bench.arrivals import bursts, constant, poisson
    from graphkiln.bench.generator import MAX_CALLERS
    from graphkiln.bench.job import Load

    whole = warmup_s + seconds
    if burst:
        if arrivals:
            raise InvalidInput("bursts come at random moments: --burst goes without --arrivals")
        name, moments = f"{rate:g}/s by {burst}", bursts(rate, whole, burst)
    elif arrivals is Arrivals.CONSTANT:
        name, moments = f"{rate:g}/s even", constant(rate, whole)
    else:
        name, moments = f"{rate:g}/s", poisson(rate, whole)
    if not (moments >= warmup_s).any():
        raise InvalidInput(
            f"no request is due in {seconds:g} s", hint="a higher --rate, a smaller --burst, or a longer --duration"
        )
    return name, Load(callers=MAX_CALLERS, seconds=seconds, warmup_s=warmup_s, arrivals=moments)


def _trace_load(file: Path, seconds: float | None, warmup_s: float) -> Load:
    """The trace from its start, for its length or `seconds`; before it, a warm-up at its mean rate."""
    import numpy as np

    from graphkiln.bench.arrivals import constant, read_trace
    from graphkiln.bench.generator import MAX_CALLERS
    from graphkiln.bench.job import Load

    moments = read_trace(file)
    seconds = seconds or max(float(moments[-1]) + 1e-3, 0.5)  # the last one counts, too
    _check_size(0.0, warmup_s + seconds)
    moments = moments[moments < seconds]
    before = constant(len(moments) / seconds, warmup_s) if warmup_s else moments[:0]
    arrivals = np.concatenate([before, warmup_s + moments])
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
