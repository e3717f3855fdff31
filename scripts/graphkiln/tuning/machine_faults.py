"""Whose fault a failure is: the candidate's, which fails again, or perhaps the machine's, which passes.

A port that another program took, a disk that is full, memory that others hold: what a candidate could not do then says
nothing of it. Where that cannot be told from the candidate's own doing, it counts as the machine's:
another run of the command tries it again (`recording`).

Source: Linux kernel documentation, "/proc/vmstat" (`oom_kill`: processes that were killed where memory was short, those
of control groups included).
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from graphkiln.tuning.trials import Failed

TRIED_AGAIN = "the same command tries it again"
_VMSTAT = Path("/proc/vmstat")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_SIGNS = re.compile(
    r"No space left on device|Disk quota exceeded|Cannot allocate memory|Too many open files|Read-only file system"
    r"|Resource temporarily unavailable|already in use|port \d+ \(\w+\) is in use|there is not enough memory"
)
"""What the system says, in the words of strerror(3) and of our own server."""


def oom_kills() -> int:
    """How many processes the kernel has killed so far because memory was short; 0 where it does not tell."""
    with suppress(OSError):
        if found := _OOM_KILLS.search(_VMSTAT.read_text()):
            return int(found[1])
    return 0


def excused(found: Failed, kills_before: int) -> Failed:
    """The same failure, as one that may pass where the machine may be to blame.

    Args:
        found: What went wrong.
        kills_before: `oom_kills()` when it began.
    """
    short = "; memory was short: the kernel killed a process meanwhile" if oom_kills() > kills_before else ""
    if not (short or found.passing or _SIGNS.search(found.reason)):
        return found
    return replace(found, reason=f"{found.reason}{short}; {TRIED_AGAIN}", passing=True)
