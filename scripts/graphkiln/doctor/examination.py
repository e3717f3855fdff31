"""The table of checks, all run at once: one that fails or hangs is a finding and stops no other."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from graphkiln.doctor.finding import Examination, Finding, Level, Request

Check = Callable[[Request], Iterable[Finding]]
# Name and place of each check, imported when it runs, so that a broken package breaks no other check.
CHECKS: Sequence[tuple[str, str]] = (
    ("machine", "graphkiln.doctor.machine:check_processor"),
    ("machine", "graphkiln.doctor.machine:check_memory"),
    ("machine", "graphkiln.doctor.machine:check_system"),
    ("limits", "graphkiln.doctor.machine:check_limits"),
    ("packages", "graphkiln.doctor.packages:check_packages"),
    ("engines", "graphkiln.doctor.engines:check_engines"),
    ("gpu", "graphkiln.doctor.machine:check_gpu"),
    ("triton", "graphkiln.doctor.packages:check_triton"),
    ("ports", "graphkiln.doctor.ports:check_ports"),
    ("storage", "graphkiln.doctor.storage:check_temporary_folder"),
    ("storage", "graphkiln.doctor.storage:check_shared_memory"),
    ("leftovers", "graphkiln.doctor.storage:check_leftovers"),
    ("cache", "graphkiln.doctor.storage:check_cache"),
    ("models", "graphkiln.doctor.models:check_models"),
    ("models", "graphkiln.doctor.models:check_remote_stores"),
)
DEADLINE_S = 20.0  # far longer than all checks take: only a hang, such as a dead network file system, is given up


def examine(
    request: Request, checks: Sequence[tuple[str, str]] = CHECKS, deadline_s: float = DEADLINE_S
) -> Examination:
    """Run checks, and give up those that have not ended after `deadline_s` seconds."""
    begun = time.monotonic()
    found: list[list[Finding]] = [[] for _ in checks]
    threads = [
        threading.Thread(target=_run, args=(place, request, findings), name=f"check-{place}", daemon=True)
        for (_, place), findings in zip(checks, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread, findings in zip(threads, found, strict=True):
        thread.join(max(0.0, begun + deadline_s - time.monotonic()))
        if thread.is_alive():
            hint = "something that it reads hangs: a network folder, or a driver?"
            findings.append(_about_itself(f"did not end within {deadline_s:.0f} s", hint))
    named = [replace(each, check=name) for (name, _), findings in zip(checks, found, strict=True) for each in findings]
    return Examination(findings=tuple(named), seconds=time.monotonic() - begun)


def _run(place: str, request: Request, findings: list[Finding]) -> None:
    """Run a check; findings from before it fails or hangs count."""
    try:
        module, _, function = place.partition(":")
        check: Check = getattr(importlib.import_module(module), function)
        for finding in check(request):
            findings.append(finding)
    except BaseException as error:  # noqa: BLE001 - doctor is for machines where anything may be broken
        hint = "mend what the message names, and run doctor again"
        findings.append(_about_itself(f"failed: {type(error).__name__}: {error}", hint))


def _about_itself(message: str, hint: str) -> Finding:
    return Finding(subject="the check itself", level=Level.WARNING, message=message, hint=hint)
