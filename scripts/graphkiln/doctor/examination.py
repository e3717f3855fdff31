"""Runs all checks at once, each by itself: whatever is broken here, one that fails or hangs is a finding of its own."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from graphkiln.doctor.finding import Examination, Finding, Level, Request

Check = Callable[[Request], Iterable[Finding]]
# Name, and where it is. A check is imported when it runs, so that a package that is broken breaks no other check.
CHECKS: Sequence[tuple[str, str]] = (
    ("machine", "graphkiln.doctor.machine:check_processor"),
    ("machine", "graphkiln.doctor.machine:check_memory"),
    ("machine", "graphkiln.doctor.machine:check_system"),
    ("limits", "graphkiln.doctor.machine:check_limits"),
    ("packages", "graphkiln.doctor.packages:check_packages"),
    ("engines", "graphkiln.doctor.models:check_engines"),
    ("gpu", "graphkiln.doctor.machine:check_gpu"),
    ("triton", "graphkiln.doctor.packages:check_triton"),
    ("ports", "graphkiln.doctor.ports:check_ports"),
    ("storage", "graphkiln.doctor.storage:check_temporary_folder"),
    ("storage", "graphkiln.doctor.storage:check_shared_memory"),
    ("leftovers", "graphkiln.doctor.storage:check_leftovers"),
    ("cache", "graphkiln.doctor.storage:check_cache"),
    ("models", "graphkiln.doctor.models:check_models"),
    ("models", "graphkiln.doctor.storage:check_remote_stores"),
)
DEADLINE_S = 20.0  # far longer than all checks take: only what hangs, such as a dead network file system, is given up


def examine(
    request: Request, checks: Sequence[tuple[str, str]] = CHECKS, deadline_s: float = DEADLINE_S
) -> Examination:
    """Runs checks.

    Args:
        request: What they look at.
        checks: Name and `module:function` of each.
        deadline_s: Seconds after which those that have not ended are given up.
    """
    begun = time.monotonic()
    running = [_Running(name, place, request) for name, place in checks]
    for each in running:
        each.start()
    for each in running:
        each.join(max(0.0, begun + deadline_s - time.monotonic()))
    findings = [finding for each in running for finding in each.findings(deadline_s)]
    return Examination(findings=tuple(findings), seconds=time.monotonic() - begun)


class _Running(threading.Thread):
    """A check that runs. What it found before it failed or hung counts."""

    def __init__(self, name: str, place: str, request: Request) -> None:
        super().__init__(name=f"check-{place}", daemon=True)
        self._check = name
        self._place = place
        self._request = request
        self._found: list[Finding] = []

    def run(self) -> None:
        try:
            module, _, function = self._place.partition(":")
            check: Check = getattr(importlib.import_module(module), function)
            for finding in check(self._request):
                self._found.append(replace(finding, check=self._check))
        except BaseException as error:  # noqa: BLE001 - whatever is broken on this machine is what we are asked about
            message = f"failed: {type(error).__name__}: {error}"
            hint = "what it looks at is not known; mend what the message names and run it again"
            self._found.append(self._about_itself(message, hint))

    def findings(self, deadline_s: float) -> list[Finding]:
        found = list(self._found)
        if self.is_alive():
            message = f"did not end within {deadline_s:.0f} s"
            found.append(self._about_itself(message, "something that it reads hangs: a network folder, or a driver?"))
        return found

    def _about_itself(self, message: str, hint: str) -> Finding:
        return Finding(check=self._check, subject="the check itself", level=Level.WARNING, message=message, hint=hint)
