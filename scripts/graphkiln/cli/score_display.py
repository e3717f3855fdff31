"""The progress of `score`: a live table, plain lines, or JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

from graphkiln.cli.console import printable, say
from graphkiln_backend.system.closing import Closeable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table

    from graphkiln.scoring.run_state import Progress

_MAX_WORKERS = 12
_MESSAGES = 3
_COLUMNS = 80


class ProgressMode(StrEnum):
    """Forms of progress."""

    AUTO = "auto"
    JSON = "json"
    OFF = "off"


class Display(Closeable):
    """Shows no progress; base class of the other displays.

    Args:
        clock: Monotonic clock in seconds.
    """

    every_s = 0.0  # minimum time between two updates of the figures

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown: float | None = None

    def show(self, progress: Progress) -> None:
        """Show progress."""

    def close(self) -> None:
        """Remove the display."""

    def is_due(self) -> bool:
        """Return True at most once in `every_s` seconds."""
        now = self._clock()
        if self._shown is not None and now - self._shown < self.every_s:
            return False
        self._shown = now
        return True


class JsonDisplay(Display):
    """JSON lines on standard output: every event, but at most one unit without a message per second."""

    every_s = 1.0

    def show(self, progress: Progress) -> None:
        """Print a line."""
        from graphkiln_backend.graph.decoding import encode

        if progress.event != "unit" or progress.message or self.is_due():
            typer.echo(json.dumps(encode(progress), ensure_ascii=False))
            sys.stdout.flush()


class LineDisplay(Display):
    """Messages on standard error, and the progress every ten seconds."""

    every_s = 10.0

    def show(self, progress: Progress) -> None:
        """Print the message, and the progress if it is due."""
        if progress.message:
            say(printable(progress.message))
        if progress.event in ("planned", "finished") or (progress.event == "unit" and self.is_due()):
            say(format_progress(progress))


class TerminalDisplay(Display):
    """A live table on standard error, removed at the end.

    Args:
        console: The console; None for standard error.
        clock: Monotonic clock in seconds.
    """

    every_s = 0.25

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console
        self._live: Live | None = None
        self._messages: deque[str] = deque(maxlen=_MESSAGES)

    def show(self, progress: Progress) -> None:
        """Update the table."""
        from rich.console import Console
        from rich.live import Live

        if progress.message:
            self._messages.append(printable(progress.message))
        if not (progress.message or self.is_due()):
            return
        if self._live is None:
            self._live = Live(console=self._console or Console(stderr=True), transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(draw(progress, list(self._messages)), refresh=True)

    def close(self) -> None:
        """Take the table off the terminal."""
        if self._live:
            self._live.stop()
            self._live = None


def open_display(mode: ProgressMode) -> Display:
    """The display of a mode; a live table where standard error is a terminal."""
    if mode is ProgressMode.AUTO:
        return TerminalDisplay() if sys.stderr.isatty() else LineDisplay()
    return JsonDisplay() if mode is ProgressMode.JSON else Display()


def format_progress(progress: Progress) -> str:
    """Describe the progress of a run in one line."""
    done, rows = progress.units_before + progress.units_done, progress.rows_before + progress.rows_done
    parts = [f"{done:,}/{progress.units:,} units", f"{rows:,}/{progress.rows:,} rows"]
    if progress.units_before and not progress.units_done:
        parts.append(f"{progress.units_before:,} units by earlier runs")
    if progress.rows_done:
        parts.append(f"{progress.rows_per_s:,.0f} rows/s")
    parts.append(f"{progress.errors:,} error{'' if progress.errors == 1 else 's'}")
    if progress.seconds_left and progress.rows_done:
        parts.append(f"{format_duration(progress.seconds_left)} left")
    return ", ".join(parts)


def format_duration(seconds: float) -> str:
    """Format a duration: `41 s`, `12 min`, `3.5 h`, `2.1 d`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def draw(progress: Progress, messages: list[str]) -> RenderableType:
    """Draw the live table, 80 columns wide, with the last messages below it."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    done = progress.units_before + progress.units_done
    bar = ProgressBar(total=max(progress.units, 1), completed=done, width=_COLUMNS)
    lines = [Text(message, overflow="ellipsis", no_wrap=True, style="dim") for message in messages]
    return Group(
        Text(format_progress(progress)), bar, *([_workers_table(progress)] if progress.workers else []), *lines
    )


def _workers_table(progress: Progress) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("worker", "session", box=None, collapse_padding=True)
    for column in ("units", "rows", "rows/s"):
        table.add_column(column, justify="right")
    table.add_column("", overflow="ellipsis", no_wrap=True)
    working = [worker for worker in progress.workers if not worker.ended]
    for worker in working[:_MAX_WORKERS]:
        figures = (f"{worker.units:,}", f"{worker.rows:,}", f"{worker.rows_per_s:,.0f}")
        table.add_row(escape(f"{worker.node}:{worker.pid}"), worker.session, *figures)
    more, ended = len(working) - _MAX_WORKERS, len(progress.workers) - len(working)
    if more > 0:
        table.add_row(f"and {more} more")
    if ended:
        table.add_row(f"{ended} ended")
    return table
