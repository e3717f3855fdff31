"""What `score` prints in the end: what became of the rows, by whom, where the time went, and what to do next."""

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

if TYPE_CHECKING:
    from graphkiln.scoring.record import RunRecord, WorkerRecord
    from graphkiln_backend.scoring.scorer import StageTimes
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
    """Prints what a run came to, on standard output, 80 columns wide."""
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
    """Prints whether a destination is whole, and what is wrong where it is not."""
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
                (figures.twins, _count(figures.twins, "twin") + " discarded"),
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
    """What verifies the destination of a run, as a shell takes it."""
    request = record.request
    words = ["graphkiln", "score", "--verify", str(request["destination"])]
    for name in ("format", "ledger"):
        if value := request.get(name):
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
