"""How often a server is started again, how soon, and why: a budget that good service pays back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from graphkiln_backend.server.faults import Cause, Fault
from graphkiln_backend.triton.restarts import write_restarts

MAX_RESTARTS = 5
"""More faults in a row than that are not mended by another restart."""
SERVED_S = 5.0
"""So much service pays for one fault."""
_FIRST_DELAY_S = 0.25


class RestartBudget:
    """Decides whether, and when, to start again. The first restart is immediate, each further one waits longer.

    Every fault costs one restart, every `SERVED_S` seconds of service give one back: a server that is hit now and then
    is restarted for ever, one that dies as soon as it serves is given up.
    """

    def __init__(self) -> None:
        self._counts: Counter[Cause] = Counter()
        self._spent = 0.0

    def spend(self, fault: Fault, served_s: float) -> float | None:
        """Counts a fault.

        Args:
            fault: What happened.
            served_s: How long the server had served before.

        Returns:
            The seconds to wait before the restart, or None when it is time to give up.
        """
        self._spent = max(0.0, self._spent - served_s / SERVED_S) + 1
        if self._spent > MAX_RESTARTS:
            return None
        self.count(fault.cause)
        return 0.0 if self._spent < 2 else _FIRST_DELAY_S * 2 ** int(self._spent - 1)

    @property
    def limit(self) -> int:
        """How many faults in a row are answered with a restart."""
        return MAX_RESTARTS

    def count(self, cause: Cause) -> None:
        """Counts a process that was ended without restarting the server, too."""
        self._counts[cause] += 1

    def write(self, instances: Path) -> None:
        """Tells the instances of a new run how often the server was restarted before, by cause.

        Every cause is among them, also with 0: Prometheus sees no increase in a counter that begins with a first fault.
        """
        write_restarts(instances, {cause.value: self._counts[cause] for cause in Cause})
