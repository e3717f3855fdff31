"""Injects faults one after the other, and measures how long the service takes to recover from each."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from soaking.fault import Fault, Field, Over
from soaking.readiness import Readiness, every_model_answers

_log = logging.getLogger("graphkiln.soak")

RECOVERY_LIMIT_S = 60.0
"""A service that is not ready again by then has failed. Generous: the machine is shared with the load generator."""
AFTERMATH_S = 3.0
"""For so long after a recovery, errors still belong to the fault: retries, connections that are found broken."""
_POLL_S = 0.05
_QUIET_S = (4.0, 8.0)
"""With the aftermath, more than the 5 s of service that pay for one restart: a service that is hit more often ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """A fault that was injected, and what followed.

    Attributes:
        fault: Its name.
        begun: When it was injected; monotonic seconds.
        ended: When the service had recovered, or was given up.
        ready_again_s: Seconds from the fault until the service was seen to be ready again for good, and every model
            answered rightly over both protocols; 0 when it never was otherwise; None beyond the limit. Of a fault that
            stays for a while: the longest time without readiness.
        unready: What readiness said meanwhile when it was not 200, asked ten times a second.
        errors: What clients saw meanwhile.
        restarts: What the service added to its metric of restarts.
        cause: Of the restart that the fault must lead to; empty for none.
        trouble: Why the fault could not be injected, or why the service had to be started again by the soak.
    """

    fault: str
    begun: float
    ended: float
    ready_again_s: float | None
    unready: dict[str, int]
    errors: dict[str, int]
    restarts: dict[str, int]
    cause: str = ""
    trouble: str = ""


@dataclass(kw_only=True)
class Injector:
    """Injects faults in a random order.

    Args:
        where: Where they are injected.
        readiness: What watches the service.
        faults: Of which kinds.
    """

    where: Field
    readiness: Readiness
    faults: list[Fault]
    injections: list[Injection] = field(default_factory=list)
    _round: list[Fault] = field(default_factory=list)

    def run(self, until: float) -> None:
        """Injects faults until a moment; each kind comes once before one comes again."""
        while time.monotonic() < until:
            time.sleep(self.where.chance.uniform(*_QUIET_S))
            if self.faults and time.monotonic() < until:
                self._inject(self._choose())

    def windows(self) -> list[tuple[float, float]]:
        """The intervals in which errors are to be expected."""
        return [(injection.begun, injection.ended + AFTERMATH_S) for injection in self.injections]

    def _choose(self) -> Fault:
        if not self._round:
            self._round = self.where.chance.sample(self.faults, len(self.faults))
        return self._round.pop()

    def _inject(self, fault: Fault) -> None:
        service = self.where.service
        before = service.restarts()
        begun = time.monotonic()
        ready_again_s, trouble = self._hit(fault, begun)
        state = "never ready again" if ready_again_s is None else f"ready after {ready_again_s:.1f} s"
        _log.info("%s: %s %s", fault.name, state, trouble)
        if not service.is_running() or ready_again_s is None:
            trouble = trouble or "the soak had to start the service again"
            self._start_anew()
        ended = time.monotonic()
        time.sleep(AFTERMATH_S)
        restarts = {} if fault.begins_anew or trouble else _added(before, service.restarts())
        self.injections.append(
            Injection(
                fault=fault.name,
                begun=begun,
                ended=ended,
                ready_again_s=ready_again_s,
                unready=self.readiness.statuses(begun, ended),
                errors=dict(self.where.ledger.errors_between(begun, ended + AFTERMATH_S)),
                restarts=restarts,
                cause=fault.cause,
                trouble=trouble,
            )
        )

    def _hit(self, fault: Fault, begun: float) -> tuple[float | None, str]:
        """Injects a fault, holds it, takes it back; returns the seconds until ready again, and what went wrong."""
        trouble, over = "", None
        try:
            over = fault.inject(self.where)
            time.sleep(fault.hold_s)
        except Exception as error:  # the soak goes on, and reports it
            trouble = f"{type(error).__name__}: {error}"
        try:
            fault.undo(self.where)
        except Exception as error:
            trouble = trouble or f"not taken back: {error}"
        recovered_s = self._wait_recovered(begun, over)
        if fault.hold_s and recovered_s is not None:  # what stays for a while is not over before it is taken back
            recovered_s = self.readiness.longest_s(begun, time.monotonic())
        return recovered_s, trouble

    def _wait_recovered(self, begun: float, over: Over | None) -> float | None:
        """Seconds from the fault until the service had recovered for good; None beyond the limit."""
        failed_at: float | None = None
        limit = time.monotonic() + RECOVERY_LIMIT_S
        while time.monotonic() < limit and self.where.service.is_running():
            if (over is None or over()) and every_model_answers(self.where.service):
                now = time.monotonic()
                seen = [moment for moment in (failed_at, self.readiness.last_failure(begun, now)) if moment]
                return max(seen, default=begun) - begun
            failed_at = time.monotonic()
            time.sleep(_POLL_S)
        return None

    def _start_anew(self) -> None:
        """The soak goes on after a service that did not recover; that it had to is reported."""
        self.where.service.end()
        self.where.service.start()
        self.where.service.wait_ready()


def _added(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    counts = {cause: after.get(cause, 0) - before.get(cause, 0) for cause in after}
    return {cause: count for cause, count in counts.items() if count > 0}
