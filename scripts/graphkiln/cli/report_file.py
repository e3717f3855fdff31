"""`--html REPORT.html`: the option that several verbs share, and the file that it names."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from graphkiln.cli.console import say
from graphkiln_backend.graph.errors import EngineUnavailable, InvalidInput, MeasurementError
from graphkiln_backend.graph.modules import version_of
from graphkiln_backend.graph.text import redact_command
from graphkiln_backend.system.resources import usable_cores

Html = Annotated[Path | None, typer.Option(help="Also write the report as one file.", metavar="REPORT.html")]


def check_html(html: Path | None) -> None:
    """Refuses a report that could not be written, before anything is measured.

    Raises:
        InvalidInput: There is no such folder, or nothing can be written there.
        EngineUnavailable: What writes reports is not installed.
    """
    if html is None:
        return
    if not html.parent.is_dir():
        raise InvalidInput(f"--html {html}: there is no folder {html.parent}")
    if html.is_dir():
        raise InvalidInput(f"--html {html} is a folder", hint="name a file in it")
    if not os.access(html if html.exists() else html.parent, os.W_OK):
        raise InvalidInput(f"--html {html} cannot be written", hint="choose another file")
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise EngineUnavailable(f"a report needs a library that is not installed: {error}", extra="report") from error


def write_html(html: Path, page: str) -> None:
    """Writes a report, and says so.

    Raises:
        MeasurementError: The file cannot be written.
    """
    try:
        html.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise MeasurementError(f"cannot write {html}: {reason}", hint="choose another file for --html") from error
    say(f"wrote {html}")


def command_line() -> str:
    """The command that is running, as a shell takes it; what is secret in it is left out."""
    return shlex.join(["graphkiln", *redact_command(sys.argv[1:])])


def facts() -> dict[str, str]:
    """Where and when, for the end of a report."""
    system = f"{platform.system()} {platform.release()}"
    return {
        "this machine": f"{platform.machine()}, {usable_cores()} usable cores, {system}",
        "graphkiln": version_of("graphkiln"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
