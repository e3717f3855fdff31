"""What `serve` says once its models are loaded: a table for a person, events for a program."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from graphkiln.cli.console import print_result
from graphkiln.cli.load_display import LoadDisplay

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from graphkiln_backend.server.flags import ListenAddress, TritonFlags
    from graphkiln_backend.server.probe import ModelState
    from graphkiln_backend.triton.instance_status import InstanceStatus

_log = logging.getLogger("graphkiln.cli")

_TABLE_COLUMNS = 80
_REASON_LENGTH = 80
"""The whole reason stands below the table."""


def tell_states(
    states: list[ModelState],
    flags: TritonFlags,
    display: LoadDisplay,
    *,
    secure: bool,
    page: ListenAddress | None = None,
) -> None:
    """Logs what is served, an event for each version, and where; arguments as of `print_states`."""
    display.close()
    if not states:
        _log.warning("no model is loaded")
    for state in states:
        if state.status and state.state == "READY":
            served = f"{_engine(state.status)}, {state.status.precision}, loaded in {state.status.load_ms:.0f} ms"
            _log.info("version %s is ready: %s", state.version, served, extra={"model": state.model})
        else:
            said = f"{state.state.lower()}: {state.reason or 'no reason is known'}"
            _log.error("version %s is %s", state.version, said, extra={"model": state.model})
    for line in _addresses(flags, page, secure=secure):
        _log.info("%s", line)


def _engine(status: InstanceStatus) -> str:
    return f"{status.engine} on {status.device}, {status.threads} threads"


def _addresses(flags: TritonFlags, page: ListenAddress | None, *, secure: bool) -> list[str]:
    """Where everything listens, a line for the server and one for its page."""
    addresses = [f"{a.protocol} {a.local_address[0]}:{a.port}" for a in flags.listen_addresses()]
    return [("serving with TLS " if secure else "serving ") + ", ".join(addresses), *_page(page, secure=secure)]


def _page(page: ListenAddress | None, *, secure: bool) -> list[str]:
    from graphkiln.page.launch import page_url

    return [f"page {page_url(page, secure=secure)}"] if page else []


def print_states(
    states: list[ModelState],
    flags: TritonFlags,
    display: LoadDisplay,
    *,
    secure: bool,
    page: ListenAddress | None = None,
) -> None:
    """Prints a table of what is served, and where, on stdout.

    Args:
        states: Every model's.
        flags: Where the server listens.
        display: What is shown until then.
        secure: Whether it does so with TLS.
        page: Where its page listens.

    Raises:
        OSError: Nobody reads it any more, or the disk is full.
    """
    from textwrap import shorten

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    display.close()
    console = Console()
    console.width = min(console.width, _TABLE_COLUMNS)
    table = Table("model", "version", "state", "engine, or why not", "precision", "time", collapse_padding=True)
    for state in states:
        status, ready = state.status, state.state == "READY"
        table.add_row(
            escape(state.model),
            state.version,
            state.state.lower(),
            _engine(status) if status and ready else escape(shorten(state.reason, _REASON_LENGTH)) or "-",
            status.precision if status and ready else "-",
            f"{status.load_ms:.0f} ms" if status and ready else "-",
        )
    with console.capture() as printed:  # rich itself would end the process where nobody reads it
        _print_table(console, table, states)
        for line in _addresses(flags, page, secure=secure):
            console.print(line, highlight=False, soft_wrap=True)
    print_result(printed.get())


def _print_table(console: Console, table: Table, states: list[ModelState]) -> None:
    console.print(table if states else "no model is loaded")
    for state in states:
        if state.reason and state.state != "READY":
            line = f"{state.model} {state.version}: {state.reason}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
