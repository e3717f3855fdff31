"""The examination of `doctor`: requests, findings, the list of checks, and their run."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.storage.address import RemoteAddress

if TYPE_CHECKING:
    from graphkiln_backend.graph.errors import GraphkilnError

SCHEMA = 1  # version of the JSON document; increases if a key is removed or changes its meaning

Fact = str | int | float | bool | None | list[str]


class Level(StrEnum):
    """Severity of a finding: `error` stops `graphkiln serve` or keeps a model from being served."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One finding of a check.

    Attributes:
        check: Name of the check.
        subject: Examined item.
        level: Severity.
        message: Observation.
        hint: How to fix the problem; "" if there is none.
        facts: Figures by name; sizes in bytes.
    """

    check: str = ""
    subject: str
    level: Level = Level.OK
    message: str
    hint: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)


def graded(
    subject: str, message: str, *, hint: str, warning: object = False, error: object = False, **facts: Fact
) -> Finding:
    """Create a finding with the level whose condition is true; the hint is dropped for level `ok`."""
    level = Level.ERROR if error else Level.WARNING if warning else Level.OK
    return Finding(subject=subject, level=level, message=message, hint="" if level is Level.OK else hint, facts=facts)


def refused(subject: str, error: GraphkilnError, level: Level = Level.ERROR) -> Finding:
    """Create a finding from an error of graphkiln."""
    return Finding(subject=subject, level=level, message=error.message, hint=error.hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """All findings in the order of the checks, and the duration of the run in seconds."""

    findings: tuple[Finding, ...]
    seconds: float = 0.0

    @property
    def level(self) -> Level:
        """Highest severity of the findings."""
        levels = {finding.level for finding in self.findings}
        return next((level for level in reversed(Level) if level in levels), Level.OK)

    def count(self, level: Level) -> int:
        """Count findings of a level."""
        return sum(finding.level is level for finding in self.findings)

    def to_document(self) -> dict[str, object]:
        """Return the JSON document; its keys are stable within `SCHEMA`."""
        return {
            "schema": SCHEMA,
            "level": self.level,
            "seconds": round(self.seconds, 3),
            "findings": [asdict(finding) for finding in self.findings],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Options of `serve` to examine.

    Attributes:
        stores: Local model stores.
        remote: Remote model stores.
        cache: Value of `--cache`: a folder, `off`, or "".
        host: Default listening address; "" for that of `serve`.
        arguments: Flags for tritonserver.
    """

    stores: tuple[Path, ...] = ()
    remote: tuple[RemoteAddress, ...] = ()
    cache: str = ""
    host: str = ""
    arguments: tuple[str, ...] = ()


# Checks run concurrently; a failed or hanging check is a finding and does not affect the others.

Check = Callable[[Request], Iterable[Finding]]
# Name and function of each check, imported when it runs, so that a broken package does not affect other checks.
CHECKS: Sequence[tuple[str, str]] = (
    ("machine", "graphkiln.doctor.machine:check_processor"),
    ("machine", "graphkiln.doctor.machine:check_memory"),
    ("machine", "graphkiln.doctor.machine:check_system"),
    ("limits", "graphkiln.doctor.machine:check_limits"),
    ("packages", "graphkiln.doctor.serving:check_packages"),
    ("engines", "graphkiln.doctor.engines:check_engines"),
    ("gpu", "graphkiln.doctor.machine:check_gpu"),
    ("triton", "graphkiln.doctor.serving:check_triton"),
    ("triton", "graphkiln.doctor.serving:check_backends"),
    ("triton", "graphkiln.doctor.serving:check_edge"),
    ("ports", "graphkiln.doctor.serving:check_ports"),
    ("storage", "graphkiln.doctor.storage:check_temporary_folder"),
    ("storage", "graphkiln.doctor.storage:check_shared_memory"),
    ("leftovers", "graphkiln.doctor.storage:check_leftovers"),
    ("cache", "graphkiln.doctor.storage:check_cache"),
    ("models", "graphkiln.doctor.models:check_models"),
    ("models", "graphkiln.doctor.models:try_models"),
    ("models", "graphkiln.doctor.models:check_remote_stores"),
)
DEADLINE_S = 20.0  # much longer than the checks take; for hanging network file systems and the like


def examine(
    request: Request, checks: Sequence[tuple[str, str]] = CHECKS, deadline_s: float = DEADLINE_S
) -> Examination:
    """Run checks, and abandon those that have not ended after `deadline_s` seconds."""
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
            hint = "a network folder or a driver may hang"
            findings.append(_about_itself(f"did not end within {deadline_s:.0f} s", hint))
    named = [replace(each, check=name) for (name, _), findings in zip(checks, found, strict=True) for each in findings]
    return Examination(findings=tuple(named), seconds=time.monotonic() - begun)


def _run(place: str, request: Request, findings: list[Finding]) -> None:
    """Run a check; findings before a failure count."""
    try:
        module, _, function = place.partition(":")
        check: Check = getattr(importlib.import_module(module), function)
        for finding in check(request):
            findings.append(finding)
    except BaseException as error:  # noqa: BLE001 - anything may be broken on an examined machine
        hint = "fix this error, and run doctor again"
        findings.append(_about_itself(f"failed: {type(error).__name__}: {error}", hint))


def _about_itself(message: str, hint: str) -> Finding:
    return Finding(subject="the check itself", level=Level.WARNING, message=message, hint=hint)
