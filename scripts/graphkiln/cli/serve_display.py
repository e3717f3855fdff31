"""Display of `serve`: how far models are while they load, and what is served then."""

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
# A model that loads faster has no lines of progress.
_SLOW_S = 1.0
_TABLE_COLUMNS = 80
# Of a reason in the table; the whole reason follows below it.
_REASON_LENGTH = 80


class LoadDisplay(Closeable):
    """Progress of all models until it is closed: a live table on a terminal, else a line for each slow activity."""

    def __init__(self) -> None:
        self._console = stderr_console()
        self._live: Live | None = None
        self._printed: dict[tuple[str, int], str] = {}
        self._shown_at = 0.0

    def show(self, rows: Sequence[LoadProgress]) -> None:
        """Show the state of every model; called as often as one likes."""
        if self._console is None:
            for row in rows:
                self._say(row)
        elif rows and time.monotonic() - self._shown_at > _REFRESH_S:
            self._shown_at = time.monotonic()
            if self._live is None:
                from rich.live import Live

                self._live = Live(console=self._console, transient=True, auto_refresh=False)
                self._live.start()
            cells = [(row.model, str(row.version), row.activity, f"{row.seconds:.1f}") for row in rows]
            self._live.update(make_table(("model", "version", "state", "seconds"), cells), refresh=True)

    def close(self) -> None:
        """Take the table off the terminal; what is shown afterwards begins anew."""
        if self._live:
            self._live.stop()
            self._live = None
        self._printed.clear()

    def _say(self, row: LoadProgress) -> None:
        """A line for each activity of a model that is slow, and one for its end; none is repeated."""
        key = (row.model, row.version)
        last = self._printed.get(key, "")
        if row.activity == last or (row.seconds < _SLOW_S if not row.is_ready else not last):
            return
        self._printed[key] = row.activity
        end = f" in {row.seconds:.1f} s" if row.is_ready else ""
        say(f"{row.model} version {row.version}: {row.activity}{end}")


def address_lines(flags: TritonFlags, page: ListenAddress | None, *, secure: bool) -> list[str]:
    """A line with the addresses of the server, and one with that of its page."""
    addresses = [f"{each.protocol} {each.local_address[0]}:{each.port}" for each in flags.listen_addresses()]
    lines = [("serving with TLS " if secure else "serving ") + ", ".join(addresses)]
    if page:
        from graphkiln.page.launch import page_url

        lines.append(f"page {page_url(page, secure=secure)}")
    return lines


def log_states(states: Sequence[ModelState], addresses: Sequence[str]) -> None:
    """Log what is served, an event for each version, and where."""
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
    """Print a table of what is served, and where, on stdout.

    Raises:
        OSError: The reader has ended, or the disk is full.
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
    with console.capture() as printed:  # rich itself would end the process if the reader has ended
        console.print(table if states else "no model is loaded")
        for line in (*reasons, *addresses):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    print_result(printed.get())


def _engine(state: ModelState) -> str:
    status = state.status
    return f"{status.engine} on {status.device}, {status.threads} threads" if status else "-"
