"""Runs all checks at once, each by itself: whatever is broken here, one that fails or hangs is a finding of its own."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from graphkiln.doctor.finding import Examination, Finding, Level, Request

Check = Callable[[Request], Iterable[Finding]]
CHECKS: Mapping[str, str] = {
    "machine": "graphkiln.doctor.machine:check_machine",
    "limits": "graphkiln.doctor.limits:check_limits",
    "packages": "graphkiln.doctor.packages:check_packages",
    "engines": "graphkiln.doctor.engines:check_engines",
    "gpu": "graphkiln.doctor.gpu:check_gpu",
    "triton": "graphkiln.doctor.triton:check_triton",
    "ports": "graphkiln.doctor.ports:check_ports",
    "storage": "graphkiln.doctor.storage:check_storage",
    "leftovers": "graphkiln.doctor.storage:check_leftovers",
    "cache": "graphkiln.doctor.artifact_cache:check_cache",
    "models": "graphkiln.doctor.models:check_models",
}
"""Name -> where it is. A check is imported when it runs, so that a package that is broken breaks no other check."""
DEADLINE_S = 20.0
"""Far longer than all checks take: only what hangs, such as a dead network file system, is given up."""


def examine(request: Request, checks: Mapping[str, str] = CHECKS, deadline_s: float = DEADLINE_S) -> Examination:
    """Runs checks.

    Args:
        request: What they look at.
        checks: Name -> `module:function`.
        deadline_s: Seconds after which those that have not ended are given up.
    """
    begun = time.monotonic()
    found: dict[str, tuple[Finding, ...]] = {}

    def run(name: str, place: str) -> None:
        found[name] = _run(name, place, request)

    threads = [threading.Thread(target=run, args=item, name=f"check-{item[0]}", daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, begun + deadline_s - time.monotonic()))
    findings = [finding for name in checks for finding in found.get(name, _given_up(name, deadline_s))]
    return Examination(findings=tuple(findings), seconds=time.monotonic() - begun)


def _run(name: str, place: str, request: Request) -> tuple[Finding, ...]:
    try:
        module, _, function = place.partition(":")
        check: Check = getattr(importlib.import_module(module), function)
        return tuple(replace(finding, check=name) for finding in check(request))
    except BaseException as error:  # noqa: BLE001 - whatever is broken on this machine is what we are asked about
        failure = Finding(
            check=name,
            subject="the check itself",
            level=Level.WARNING,
            message=f"failed: {type(error).__name__}: {error}",
            hint="what it looks at is not known; mend what the message names and run it again",
        )
        return (failure,)


def _given_up(name: str, deadline_s: float) -> tuple[Finding, ...]:
    return (
        Finding(
            check=name,
            subject="the check itself",
            level=Level.WARNING,
            message=f"did not end within {deadline_s:.0f} s",
            hint="something that it reads hangs: a network file system, or a driver?",
        ),
    )
