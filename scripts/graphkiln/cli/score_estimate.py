"""What `score --dry-run` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphkiln.cli.console import print_result, printable
from graphkiln.cli.score_display import in_time
from graphkiln_backend.graph.files import format_size

if TYPE_CHECKING:
    from graphkiln.scoring.estimation import Estimate
    from graphkiln.scoring.sampling import Rate
    from graphkiln_backend.scoring.request import ScoreRequest

_COLUMNS = 80
_MOST_NODES = 10


def print_estimate(estimate: Estimate, request: ScoreRequest) -> None:
    """Prints an estimate on standard output, 80 columns wide."""
    console = Console()
    console.width = min(console.width, _COLUMNS)
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(estimate, request):
        table.add_row(name, escape(printable(text)))
    with console.capture() as printed:
        console.print(table)
    print_result(printed.get())


def _rows(estimate: Estimate, request: ScoreRequest) -> Iterator[tuple[str, str]]:
    planned = estimate.planned
    size = f", {format_size(planned.size_bytes)}" if planned.size_bytes else ""
    yield "source", f"{planned.rows:,} rows in {planned.units:,} units{size}"
    yield "done", f"{planned.rows_before:,} rows in {planned.units_before:,} units: {planned.rows_left:,} rows are left"
    if planned.stale:
        yield (
            "other",
            (
                f"{planned.stale:,} units in the destination are not of this input and configuration: a run refuses, "
                f"{'but removes' if request.replace else 'or with --replace removes'} those whose input changed"
            ),
        )
    yield "model", f"{estimate.model}: {estimate.session}"
    yield "workers", _workers(estimate)
    if estimate.rate is None:
        yield "time", "nothing is left to be scored"
        return
    yield "measured", _measured(estimate.rate)
    yield "time", _time(estimate)


def _workers(estimate: Estimate) -> str:
    nodes = [f"{count} on {name}" for name, count in estimate.workers.by_node.items()]
    more = f" and {len(nodes) - _MOST_NODES} more nodes" if len(nodes) > _MOST_NODES else ""
    cores = f"{estimate.workers.cores} core{'' if estimate.workers.cores == 1 else 's'} each"
    return f"{', '.join(nodes[:_MOST_NODES]) or 'none'}{more}, {cores}"


def _measured(rate: Rate) -> str:
    pieces = f"{rate.rows:,} rows in {rate.pieces} piece{'' if rate.pieces == 1 else 's'}"
    interval = (
        f"{rate.interval[0]:,.0f} to {rate.interval[1]:,.0f} with 95% confidence"
        if rate.interval
        else "too few rows for an interval"
    )
    errors = f", {rate.errors:,} with an error" if rate.errors else ""
    return f"{pieces}{errors}, by one worker on this machine: {rate.per_s:,.0f} rows/s ({interval})"


def _time(estimate: Estimate) -> str:
    if not estimate.workers.total:
        return "never: no node has room for a worker"
    text = f"{in_time(estimate.seconds)}, of which {in_time(estimate.start_s)} until workers are ready"
    if estimate.seconds_interval:
        low, high = map(in_time, estimate.seconds_interval)
        text += f" ({low} to {high})"
    return f"{text}, if every worker is like this one"
