"""The examination of `doctor`: what checks take and give, the table of them, and their run."""

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

SCHEMA = 1  # version of the JSON document: it grows when a key changes its meaning or goes, not when one is added

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
        subject: The thing examined.
        level: Severity.
        message: The observation.
        hint: What to do about it; empty where there is nothing to do.
        facts: The figures behind the message, by name; sizes in bytes.
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
    """A finding of the level whose condition holds; its hint counts where one does."""
    level = Level.ERROR if error else Level.WARNING if warning else Level.OK
    return Finding(subject=subject, level=level, message=message, hint="" if level is Level.OK else hint, facts=facts)


def refused(subject: str, error: GraphkilnError, level: Level = Level.ERROR) -> Finding:
    """The finding that graphkiln itself refuses something."""
    return Finding(subject=subject, level=level, message=error.message, hint=error.hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """All findings, in the order of the checks, and how many seconds they took."""

    findings: tuple[Finding, ...]
    seconds: float = 0.0

    @property
    def level(self) -> Level:
        """The worst level."""
        levels = {finding.level for finding in self.findings}
        return next((level for level in reversed(Level) if level in levels), Level.OK)

    def count(self, level: Level) -> int:
        """Number of findings of a level."""
        return sum(finding.level is level for finding in self.findings)

    def to_document(self) -> dict[str, object]:
        """The JSON document; its keys are stable within `SCHEMA`."""
        return {
            "schema": SCHEMA,
            "level": self.level,
            "seconds": round(self.seconds, 3),
            "findings": [asdict(finding) for finding in self.findings],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The options of `serve` to examine.

    Attributes:
        stores: Model stores on this machine.
        remote: Remote ones.
        cache: The option `--cache`: a folder, `off`, or empty.
        host: Address of services whose address the arguments do not give; empty for the default.
        arguments: Flags for tritonserver.
    """

    stores: tuple[Path, ...] = ()
    remote: tuple[RemoteAddress, ...] = ()
    cache: str = ""
    host: str = ""
    arguments: tuple[str, ...] = ()


def format_size(count: float) -> str:
    """Format a number of bytes for people, in powers of 1024."""
    for unit in ("B", "kB", "MB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GB"


# The table of checks, all run at once: one that fails or hangs is a finding and stops no other.

Check = Callable[[Request], Iterable[Finding]]
# Name and place of each check, imported when it runs, so that a broken package breaks no other check.
CHECKS: Sequence[tuple[str, str]] = (
    ("machine", "graphkiln.doctor.machine:check_processor"),
    ("machine", "graphkiln.doctor.machine:check_memory"),
    ("machine", "graphkiln.doctor.machine:check_system"),
    ("limits", "graphkiln.doctor.machine:check_limits"),
    ("packages", "graphkiln.doctor.serving:check_packages"),
    ("engines", "graphkiln.doctor.engines:check_engines"),
    ("gpu", "graphkiln.doctor.machine:check_gpu"),
    ("triton", "graphkiln.doctor.serving:check_triton"),
    ("triton", "graphkiln.doctor.serving:check_edge"),
    ("ports", "graphkiln.doctor.serving:check_ports"),
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
