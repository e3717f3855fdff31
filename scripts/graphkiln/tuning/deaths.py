"""Deaths of the tuner in the middle of a measurement, and what they say of the candidate that was measured.

A candidate can take the tuner with it: it fills the memory until the kernel kills processes, or it takes the whole
machine down. Both leave a trace that outlives the tuner: the kernel has killed for want of memory since, or the machine
was started again. Where there is none, whatever ended the tuner (kill -9, a session that was closed, a node that was
drained) says nothing of the candidate, however often it comes at the same measurement; it counts at last all the same,
because not everything that kills for want of memory is the kernel.

Source: random(4) (`boot_id`); Linux kernel documentation, "/proc/vmstat" (`oom_kill`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphkiln.tuning.machine_faults import oom_kills

TRACED, ALL = 3, 20
"""Deaths in one measurement after which its candidate has failed: those that left a trace, and all of them."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Machine = Mapping[str, Any]


def machine_now() -> dict[str, Any]:
    """What a death changes of a machine that it has to do with, as JSON data: `boot` and `oom_kills`."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
    return {"boot": boot, "oom_kills": oom_kills()}


class Deaths:
    """Counts them while a journal is read, in its order: measurements never overlap."""

    def __init__(self) -> None:
        self._open: tuple[str, Machine] | None = None
        self._all: Counter[str] = Counter()
        self._traced: Counter[str] = Counter()

    def begin(self, key: str, machine: Machine) -> None:
        """A measurement was begun: one that was begun before it and is still open never ended.

        Args:
            key: Of the measurement.
            machine: As `machine_now` gave it then; empty where nobody asked.

        Raises:
            KeyError: It is something else; TypeError and ValueError likewise.
        """
        now = {"boot": str(machine["boot"]), "oom_kills": int(machine["oom_kills"])} if machine else {}
        self.close(now)
        self._open = key, now

    def end(self) -> None:
        """The measurement that was begun last came to an end, whichever."""
        self._open = None

    def close(self, machine: Machine) -> None:
        """Nothing more is known of what is open: the tuner died in it before the machine was in this state."""
        if self._open:
            self._count(*self._open, machine)
        self._open = None

    def _count(self, key: str, before: Machine, after: Machine) -> None:
        self._all[key] += 1
        self._traced[key] += _has_trace(before, after)

    def verdict(self, key: str) -> str:
        """Why a measurement is not begun once more; empty where it is."""
        if self._traced[key] >= TRACED:
            how = "for want of memory, or with the whole machine"
            return f"the tuner died {self._traced[key]} times while it was measured, {how}"
        return f"the tuner died {self._all[key]} times while it was measured" if self._all[key] >= ALL else ""


def _has_trace(before: Machine, after: Machine) -> bool:
    if not (before and after):
        return False
    return bool(before["boot"] != after["boot"] or after["oom_kills"] > before["oom_kills"])
