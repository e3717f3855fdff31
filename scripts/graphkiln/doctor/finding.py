"""Request, findings and examination: what the checks of `doctor` take and give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
