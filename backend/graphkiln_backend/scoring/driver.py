"""Gives units to workers until each is committed."""

from __future__ import annotations

import time
from collections.abc import Callable

from graphkiln_backend.scoring.outcomes import Fleet
from graphkiln_backend.scoring.schedule import Schedule

_WAIT_S = 0.5


def drive(
    schedule: Schedule, fleet: Fleet, stay: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Brings a schedule to its end.

    Args:
        schedule: What is to be done.
        fleet: Who does it.
        stay: Called at least each second: what must be done for the run to stay the only one.
        clock: Seconds that only grow.

    Raises:
        ScoringError: No worker can be had, or going on makes no sense.
    """
    while not schedule.is_over:
        stay()
        for worker in schedule.workers:
            while (work := schedule.take(worker, clock())) is not None:
                fleet.assign(worker, *work)
        if schedule.is_over:
            return
        for outcome in fleet.wait(_WAIT_S):
            schedule.handle(outcome, clock())
