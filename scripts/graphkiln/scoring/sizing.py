"""How many machines a run needs to be done in time, and what it costs: from a measured rate.

    machines = ceil(rows / (rate * (time - start)))        cost = machines * (start + rows / (rate * machines)) * price

`rate` is that of a machine in rows per second, at the lower end of its confidence interval. Workers share no state,
and units are given out one by one, so that throughput grows with their number until the store that is read or written,
or the network to it, is exhausted; what that bears must be known for this figure to hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphkiln_backend.scoring.errors import ScoringError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """What a deadline asks for.

    Attributes:
        machines: Of the measured kind.
        workers: On all of them.
        seconds: From the start to the end.
        cost: At the given price; None without one.
    """

    machines: int
    workers: int
    seconds: float
    cost: float | None = None


def size_fleet(
    rows: int,
    *,
    rows_per_s: float,
    workers_per_machine: int,
    start_s: float,
    within_s: float,
    price_per_hour: float | None = None,
) -> Sizing:
    """Sizes a fleet for a deadline.

    Args:
        rows: To be scored.
        rows_per_s: Of one worker.
        workers_per_machine: How many share a machine.
        start_s: Until a worker is ready.
        within_s: When all must be done.
        price_per_hour: Of a machine.

    Raises:
        ScoringError: The time is over before a worker is ready.
    """
    if within_s <= start_s:
        raise ScoringError(f"a worker needs {start_s:.0f} s to be ready", hint="give more time than that: --within 1h")
    rate = rows_per_s * workers_per_machine
    machines = max(1, math.ceil(rows / (rate * (within_s - start_s))))
    seconds = start_s + rows / (rate * machines)
    cost = None if price_per_hour is None else machines * seconds / 3600 * price_per_hour
    return Sizing(machines=machines, workers=machines * workers_per_machine, seconds=seconds, cost=cost)
