"""What `serve` shows while models are loaded: a live table on a terminal, else a line for what takes its time."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphkiln.cli.console import say
from graphkiln_backend.system.closing import Closeable

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from graphkiln_backend.server.load_progress import LoadProgress

_REFRESH_S = 0.25
_SLOW_S = 1.0
"""What loads faster is in the table of models at once."""


class LoadDisplay(Closeable):
    """Shows how far models are, until it is closed; what is shown afterwards begins anew.

    Args:
        live: Whether standard error is a terminal; None to find out.
    """

    def __init__(self, *, live: bool | None = None) -> None:
        self._is_live = sys.stderr.isatty() if live is None else live
        self._live: Live | None = None
        self._said: dict[tuple[str, int], str] = {}
        self._shown_at = 0.0

    def show(self, rows: Sequence[LoadProgress]) -> None:
        """Shows the state of every model; called as often as one likes."""
        if not self._is_live:
            for row in rows:
                self._say(row)
        elif rows and time.monotonic() - self._shown_at > _REFRESH_S:
            self._shown_at = time.monotonic()
            self._refresh(_table(rows))

    def close(self) -> None:
        """Takes the table off the terminal: the server is live, or has ended."""
        if self._live:
            self._live.stop()
            self._live = None
        self._said.clear()

    def _say(self, row: LoadProgress) -> None:
        """A line for each activity of a model that is slow, and one for its end; none is repeated."""
        key = (row.model, row.version)
        told = self._said.get(key, "")
        if row.activity == told or (row.seconds < _SLOW_S if not row.is_ready else not told):
            return
        self._said[key] = row.activity
        end = f" in {row.seconds:.1f} s" if row.is_ready else ""
        say(f"{row.model} version {row.version}: {row.activity}{end}")

    def _refresh(self, table: Table) -> None:
        from rich.console import Console
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(table, refresh=True)


def _table(rows: Sequence[LoadProgress]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("model", "version", "state", "seconds")
    for row in rows:
        table.add_row(escape(row.model), str(row.version), escape(row.activity), f"{row.seconds:.1f}")
    return table
