"""The summary that `score` prints: rows, workers, stages, next steps; and the estimate of `--dry-run`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphkiln.cli.console import print_result, printable
from graphkiln.cli.score_display import in_time
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.files import format_size

if TYPE_CHECKING:
    from graphkiln.scoring.record import RunRecord, WorkerRecord
    from graphkiln_backend.scoring.messages import StageTimes
    from graphkiln_backend.scoring.verify import Verification

_COLUMNS = 80
_MOST_WORKERS = 20
_MOST_ROWS = 10
_MOST_FINDINGS = 20
# Field of `StageTimes` -> what it is, in words.
STAGES = {
    "read_s": "read: the store answers",
    "decode_s": "decode: images become samples",
    "wait_s": "wait: batches lack rows",
    "compute_s": "compute: the session runs",
    "encode_s": "encode: outputs become columns",
    "commit_s": "commit: the destination takes them",
}


def print_summary(record: RunRecord) -> None:
    """Print what a run came to, on standard output, 80 columns wide."""
    console = _console()
    with console.capture() as printed:
        console.print(_pairs(_figures(record)))
        if record.workers:
            console.print(_workers_table(record))
        if record.figures.units_done:
            console.print(_stages_table(record.figures.times))
        for line in _next_steps(record):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    print_result(printed.get())


def print_verification(verification: Verification, destination: str) -> None:
    """Print whether a destination is whole, and what is wrong where it is not."""
    counts = f"{verification.inputs:,} rows = {verification.scored:,} scored + {verification.errors:,} errors"
    units = f"{verification.units:,} units"
    if verification.ok:
        (configuration, *_) = verification.configurations or ("none",)
        print_result(f"{destination} is whole: {counts}, {units}, configuration {configuration}\n")
        return
    lines = [printable(str(finding)) for finding in verification.findings[:_MOST_FINDINGS]]
    more = len(verification.findings) - _MOST_FINDINGS
    if more > 0:
        lines.append(f"and {more:,} more")
    found = f"{verification.scored:,} scored + {verification.errors:,} errors of {verification.inputs:,} rows"
    print_result("\n".join([*lines, f"{destination} is not whole: {found} in {units}"]) + "\n")


def describe_verification(verification: Verification, destination: str) -> dict[str, Any]:
    """The same as plain data, with all findings."""
    return {"destination": destination, "ok": verification.ok, **encode(verification)}


def _console() -> Console:
    console = Console()
    console.width = min(console.width, _COLUMNS)
    return console


def _pairs(rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, escape(printable(text)))
    return table


def _figures(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Name and text of each row."""
    figures = record.figures
    yield (
        "rows",
        f"{figures.rows:,}: {figures.scored:,} scored, {_count(figures.errors, 'error')}"
        + (f", {figures.rows_before:,} answered before" if figures.rows_before else ""),
    )
    if record.quarantined:
        named = [f"{row.id}: {row.reason}" for row in record.quarantined[:_MOST_ROWS]]
        more = figures.quarantined - len(named)
        yield "quarantined", "\n".join([*named, *([f"and {more:,} more"] if more > 0 else [])])
    yield (
        "units",
        f"{figures.units:,}: {figures.units_done:,} by this run"
        + "".join(
            f", {text}"
            for count, text in (
                (figures.units_before, f"{figures.units_before:,} before"),
                (figures.retries, _count(figures.retries, "attempt") + " made again"),
                (figures.twins, f"{figures.twins:,} found committed"),
            )
            if count
        ),
    )
    if figures.units_done:
        computing = f"{in_time(figures.computing_s)} of {in_time(figures.seconds)}"
        yield "speed", f"{figures.rows_per_s:,.0f} rows/s in {computing}, the rest planned and started workers"
    yield "model", f"{record.request['model']}, version {record.request['version']}"
    yield "written", f"{record.request['destination']}, configuration {record.configuration}"


def _workers_table(record: RunRecord) -> Table:
    table = Table("worker", "engine and precision", "self-test")
    for column in ("rows", "rows/s"):
        table.add_column(column, justify="right")
    for worker in record.workers[:_MOST_WORKERS]:
        table.add_row(*map(escape, _worker_row(worker)))
    if (more := len(record.workers) - _MOST_WORKERS) > 0:
        table.add_row(f"and {more:,} more")
    return table


def _worker_row(worker: WorkerRecord) -> tuple[str, ...]:
    session = f"ended: {printable(worker.ended)}" if worker.ended else worker.session
    figures = (f"{worker.rows:,}", f"{worker.rows_per_s:,.0f}")
    return (f"{worker.node}:{worker.pid}", session, _self_test(worker), *figures)


def _self_test(worker: WorkerRecord) -> str:
    return "none" if worker.self_test is None else f"{worker.self_test['relative_l2']:.0e}"


def _stages_table(times: StageTimes) -> Table:
    table = Table("where time went")
    for column in ("seconds", "share"):
        table.add_column(column, justify="right")
    seconds = {name: getattr(times, name) for name in STAGES}
    total = sum(seconds.values()) or 1.0
    for name, text in STAGES.items():
        table.add_row(text, f"{seconds[name]:,.1f}", f"{seconds[name] / total:.0%}")
    return table


def _next_steps(record: RunRecord) -> Iterator[str]:
    if record.outcome != "finished":
        yield "next: run the same command again; it goes on where this run ended"
        return
    if record.figures.errors:
        yield "errors: the column `error` says why, row by row; they are collected in _errors.parquet"
    yield f"next: {_verify_command(record)}"


def _verify_command(record: RunRecord) -> str:
    """The shell command that verifies the destination of a run."""
    request = record.request
    words = ["graphkiln", "score", "--verify", str(request["destination"])]
    for name in ("format", "ledger"):
        if value := request.get(name):
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# What `score --dry-run` prints.

if TYPE_CHECKING:
    from graphkiln.scoring.estimation import Estimate
    from graphkiln.scoring.sampling import Rate
    from graphkiln_backend.scoring.request import ScoreRequest

_MOST_NODES = 10


def print_estimate(estimate: Estimate, request: ScoreRequest) -> None:
    """Print an estimate on standard output, 80 columns wide."""
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
