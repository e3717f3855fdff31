"""Display of `graphkiln serve`: progress of loading, then a table of the served models."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphkiln.cli.console import make_table, print_result, say, stderr_console
from graphkiln_backend.system.closing import Closeable

if TYPE_CHECKING:
    from rich.live import Live

    from graphkiln_backend.server.flags import ListenAddress, TritonFlags
    from graphkiln_backend.server.model_states import LoadProgress, ModelState

_log = logging.getLogger("graphkiln.cli")

_REFRESH_S = 0.25
_SLOW_S = 1.0  # faster models have no lines of progress
_TABLE_COLUMNS = 80
_REASON_LENGTH = 80  # in the table; full reasons follow below


class LoadDisplay(Closeable):
    """Progress of all models: a live table on a terminal, otherwise a line for each slow step."""

    def __init__(self) -> None:
        self._console = stderr_console()
        self._live: Live | None = None
        self._printed: dict[tuple[str, int], str] = {}
        self._shown_at = 0.0

    def show(self, rows: Sequence[LoadProgress]) -> None:
        """Show the state of all models; may be called at any rate."""
        if self._console is None:
            for row in rows:
                self._print(row)
        elif rows and time.monotonic() - self._shown_at > _REFRESH_S:
            self._shown_at = time.monotonic()
            if self._live is None:
                from rich.live import Live

                self._live = Live(console=self._console, transient=True, auto_refresh=False)
                self._live.start()
            cells = [(row.model, str(row.version), row.activity, f"{row.seconds:.1f}") for row in rows]
            self._live.update(make_table(("model", "version", "state", "seconds"), cells), refresh=True)

    def close(self) -> None:
        """Remove the table from the terminal; the next start of the server begins a new one."""
        if self._live:
            self._live.stop()
            self._live = None
        self._printed.clear()

    def _print(self, row: LoadProgress) -> None:
        """Print each new step of a slow model, and its end."""
        key = (row.model, row.version)
        last = self._printed.get(key, "")
        if row.activity == last or (row.seconds < _SLOW_S if not row.is_ready else not last):
            return
        self._printed[key] = row.activity
        end = f" in {row.seconds:.1f} s" if row.is_ready else ""
        say(f"{row.model} version {row.version}: {row.activity}{end}")


def address_lines(flags: TritonFlags, page: ListenAddress | None, *, secure: bool) -> list[str]:
    """Lines with the addresses of the server and of its page."""
    addresses = [f"{each.protocol} {each.local_address[0]}:{each.port}" for each in flags.listen_addresses()]
    lines = [("serving with TLS " if secure else "serving ") + ", ".join(addresses)]
    if page:
        from graphkiln.page.launch import page_url

        lines.append(f"page {page_url(page, secure=secure)}")
    return lines


def log_states(states: Sequence[ModelState], addresses: Sequence[str]) -> None:
    """Log an event for each version, then the addresses."""
    if not states:
        _log.warning("no model is loaded")
    for state in states:
        extra = {"model": state.model}
        if state.status and state.state == "READY":
            status = state.status
            served = f"{_engine(state)}, {status.precision}, loaded in {status.load_ms:.0f} ms"
            _log.info("version %s is ready: %s", state.version, served, extra=extra)
        else:
            reason = state.reason or "no reason is known"
            _log.error("version %s is %s: %s", state.version, state.state.lower(), reason, extra=extra)
    for line in addresses:
        _log.info("%s", line)


def print_states(states: Sequence[ModelState], addresses: Sequence[str]) -> None:
    """Print a table of all versions and the addresses to stdout.

    Raises:
        OSError: The reader of stdout has ended, or the disk is full.
    """
    from textwrap import shorten

    from rich.console import Console

    rows = []
    for state in states:
        cells = ["-", "-", "-"]
        if state.state != "READY":
            cells[0] = shorten(state.reason, _REASON_LENGTH) or "-"
        elif state.status:
            cells = [_engine(state), state.status.precision, f"{state.status.load_ms:.0f} ms"]
        rows.append([state.model, state.version, state.state.lower(), *cells])
    table = make_table(("model", "version", "state", "engine, or why not", "precision", "time"), rows)
    table.collapse_padding = True
    reasons = [
        f"{each.model} {each.version}: {each.reason}" for each in states if each.state != "READY" and each.reason
    ]
    console = Console()
    console.width = min(console.width, _TABLE_COLUMNS)
    with console.capture() as printed:  # rich would exit if the reader of stdout has ended
        console.print(table if states else "no model is loaded")
        for line in (*reasons, *addresses):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    print_result(printed.get())


def _engine(state: ModelState) -> str:
    status = state.status
    return f"{status.engine} on {status.device}, {status.threads} threads" if status else "-"
