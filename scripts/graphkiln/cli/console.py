"""Output of the command: messages on stderr; tables, CSV, JSON and results on stdout; HTML reports."""

from __future__ import annotations

import atexit
import csv
import io
import logging
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln_backend.graph.errors import InvalidInput, MeasurementError
from graphkiln_backend.graph.modules import require_packages, version_of
from graphkiln_backend.graph.text import redact_command
from graphkiln_backend.system.resources import usable_cores

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Html = Annotated[Path | None, typer.Option(help="Also write the report to an HTML file.", metavar="REPORT.html")]


# Messages: lines on stderr, or JSON events with `--log-format json`.


def say(line: str, level: int = logging.INFO) -> None:
    """Print a line on stderr, or log it as an event with a level of `logging` if the log is JSON."""
    _sink(line, level)


def _print_line(line: str, _: int) -> None:
    typer.echo(f"graphkiln: {line}", err=True)


_sink: Callable[[str, int], None] = _print_line


def log_to_stderr() -> None:
    """Print records of the loggers `graphkiln.*` on stderr; the root logger is unchanged."""
    logger = logging.getLogger("graphkiln")
    logger.setLevel(logging.INFO)
    logger.handlers = [_StderrHandler()]
    for library in ("onnx_ir", "onnxscript"):  # they log failures of optional steps
        logging.getLogger(library).setLevel(logging.CRITICAL)


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a full disk or a closed pipe must not end a service
            say(record.getMessage())


def log_as_json() -> None:
    """Convert standard error of this process and its children to JSON lines until this process ends."""
    from graphkiln_backend.server.log import LogPipe, LogPipeHandler, LogRecord

    global _sink  # noqa: PLW0603 - a process has one standard error
    pipe = LogPipe()
    atexit.register(pipe.close)
    logging.getLogger("graphkiln").handlers = [LogPipeHandler(pipe)]

    def write_event(line: str, level: int) -> None:
        pipe.write(LogRecord(message=line, level=logging.getLevelName(level).lower()))

    _sink = write_event


def printable(text: str) -> str:
    """Escape control characters, because texts of servers and files may contain terminal commands."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


# Results on stdout.


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, title: str = "") -> Table:
    """Create a table; strings are not interpreted as markup. Without columns, the first cell of a row is its name."""
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table(*(Column(each, overflow="fold") for each in columns), show_header=bool(columns), title=title or None)
    if not columns:
        table.add_column(style="bold")
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str = "") -> None:
    """Print a table of `make_table`.

    Args:
        columns: Titles; empty for a table of names and values.
        rows: Cells.
        empty: Line to print instead of a table without rows.
    """
    from rich.console import Console

    table = make_table(columns, rows)
    Console().print(empty if empty and not table.row_count else table, highlight=False)


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows as CSV."""
    writer = csv.writer(sys.stdout)
    writer.writerow(columns)
    writer.writerows(rows)


def print_json(document: Any, indent: int | None = 2) -> None:
    """Print a document as JSON (on one line if `indent` is None); NaN and infinity become null."""
    from graphkiln.reporting.json_text import json_text

    typer.echo(json_text(document, indent=indent))


def print_result(text: str) -> None:
    """Print a report of a service on stdout.

    Raises:
        OSError: The pipe is closed or the disk is full; further output is dropped.
    """
    try:
        typer.echo(text, nl=False)
    except OSError:
        _drop_output()
        raise


@contextmanager
def flush_at_end() -> Iterator[None]:
    """Flush standard output at the end of the block; at exit, Python would print its own message about a failure.

    Raises:
        OSError: The pipe is closed or the disk is full; further output is dropped.
    """
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
            raise


def _drop_output() -> None:
    """Redirect standard output to the null device, because its buffer would fail again at exit."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def escape_undecodable() -> None:
    """Make standard output escape undecodable bytes of file names instead of raising."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


# Progress on a terminal.


def stderr_console() -> Console | None:
    """Return a console on stderr for progress bars; None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    return Console(stderr=True)


@contextmanager
def progress_bar(description: str, total: float | None) -> Iterator[Callable[..., None] | None]:
    """Show a progress bar on a terminal during the block.

    Yields:
        Updates the bar with the keywords `description`, `total` and `completed`; None without a terminal.
    """
    console = stderr_console()
    if not console:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # the text is last, because long ones are cut off
    columns = (BarColumn(bar_width=16), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        yield partial(bar.update, bar.add_task(description, total=total))


@contextmanager
def ending_in_order(hint: str = "") -> Iterator[None]:
    """Clean up the block on Ctrl-C, SIGTERM and SIGHUP, and exit with the code of the signal.

    Args:
        hint: Hint for continuing, printed after an interruption.
    """
    from graphkiln_backend.system.signals import Stopped, stopping_in_order

    try:
        with stopping_in_order():
            yield
    except KeyboardInterrupt as stopped:
        if hint:
            say(f"interrupted; {hint}")
        raise typer.Exit(stopped.exit_code if isinstance(stopped, Stopped) else 128 + signal.SIGINT) from None


# `--html REPORT.html`.


def check_html(html: Path | None) -> None:
    """Check early that a report can be written.

    Raises:
        InvalidInput: The folder does not exist or is not writable.
        EngineUnavailable: The library for reports is not installed.
    """
    if html is None:
        return
    if not html.parent.is_dir():
        raise InvalidInput(f"--html {html}: there is no folder {html.parent}", hint="create it first")
    if html.is_dir():
        raise InvalidInput(f"--html {html} is a folder", hint="name a file")
    if not os.access(html if html.exists() else html.parent, os.W_OK):
        raise InvalidInput(f"--html {html} is not writable", hint="choose another file")
    require_packages("--html", ["jinja2"], extra="report")


def write_html(html: Path, page: str) -> None:
    """Write a report and print its path.

    Raises:
        MeasurementError: The file is not writable.
    """
    try:
        html.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise MeasurementError(f"cannot write {html}: {reason}", hint="choose another file for --html") from error
    say(f"wrote {html}")


def command_line() -> str:
    """Return the running command in shell syntax, without secrets."""
    return shlex.join(["graphkiln", *redact_command(sys.argv[1:])])


def facts() -> dict[str, str]:
    """Return machine, version and time for reports."""
    system = f"{platform.system()} {platform.release()}"
    return {
        "this machine": f"{platform.machine()}, {usable_cores()} usable cores, {system}",
        "graphkiln": version_of("graphkiln"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
