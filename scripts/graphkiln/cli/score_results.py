"""Results of `score`: the summary and the HTML report of a run, the estimate of `--dry-run`, `--verify`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from graphkiln.cli.console import make_table, print_result, printable
from graphkiln.cli.score_display import format_duration
from graphkiln.reporting.report import Bar, Report, Section, Table, bar_chart, linear_across
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.files import format_size

if TYPE_CHECKING:
    from graphkiln.scoring.estimation import Estimate, Rate
    from graphkiln.scoring.run_state import WorkerRecord
    from graphkiln.scoring.running import RunRecord
    from graphkiln_backend.scoring.messages import ScoreRequest, StageTimes
    from graphkiln_backend.scoring.verify import Verification

_COLUMNS = 80
_MAX_WORKERS = 20
_MAX_ROWS = 10
_MAX_FINDINGS = 20
_MAX_NODES = 10
# Field of `StageTimes` -> its description.
STAGES = {
    "read_s": "read: the source answers",
    "decode_s": "decode: images become samples",
    "wait_s": "wait: batches wait for rows",
    "compute_s": "compute: the session runs",
    "encode_s": "encode: outputs become columns",
    "commit_s": "commit: the destination stores them",
}

Rows = Iterable[Sequence[str]]


def _print_tables(*tables: tuple[Sequence[str], Rows], lines: Iterable[str] = ()) -> None:
    """Print tables of (column titles, rows) on standard output, 80 columns wide, and lines below them."""
    console = Console()
    console.width = min(console.width, _COLUMNS)
    with console.capture() as printed:
        for columns, rows in tables:
            console.print(make_table(columns, ([printable(cell) for cell in row] for row in rows)))
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    print_result(printed.get())


def print_summary(record: RunRecord) -> None:
    """Print the summary of a run."""
    tables: list[tuple[Sequence[str], Rows]] = [((), _summary(record))]
    if record.workers:
        tables.append((("worker", "engine and precision", "self-test", "rows", "rows/s"), _workers(record.workers)))
    if record.figures.units_done:
        tables.append((("where time went", "seconds", "share"), stage_rows(record.figures.times)))
    _print_tables(*tables, lines=_next_steps(record))


def _summary(record: RunRecord) -> Iterator[tuple[str, str]]:
    figures = record.figures
    before = f", {figures.rows_before:,} answered before" if figures.rows_before else ""
    yield "rows", f"{figures.rows:,}: {figures.scored:,} scored, {_count(figures.errors, 'error')}{before}"
    if record.quarantined:
        named = [f"{row.id}: {row.reason}" for row in record.quarantined[:_MAX_ROWS]]
        yield "quarantined", "\n".join([*named, *_more(figures.quarantined - len(named))])
    units = [f"{figures.units:,}: {figures.units_done:,} by this run"]
    units += [f"{figures.units_before:,} before"] if figures.units_before else []
    units += [f"{_count(figures.retries, 'attempt')} made again"] if figures.retries else []
    units += [f"{figures.twins:,} found committed"] if figures.twins else []
    yield "units", ", ".join(units)
    if figures.units_done:
        computing = f"{format_duration(figures.computing_s)} of {format_duration(figures.seconds)}"
        yield "speed", f"{figures.rows_per_s:,.0f} rows/s in {computing}, the rest planned and started workers"
    yield "model", f"{record.request['model']}, version {record.request['version']}"
    yield "written", f"{record.request['destination']}, configuration {record.configuration}"


def _workers(workers: Sequence[WorkerRecord]) -> Iterator[tuple[str, ...]]:
    for worker in workers[:_MAX_WORKERS]:
        session = f"ended: {worker.ended}" if worker.ended else worker.session
        self_test = "none" if worker.self_test is None else f"{worker.self_test['relative_l2']:.0e}"
        yield f"{worker.node}:{worker.pid}", session, self_test, f"{worker.rows:,}", f"{worker.rows_per_s:,.0f}"
    for line in _more(len(workers) - _MAX_WORKERS):
        yield (line,)


def stage_rows(times: StageTimes) -> list[tuple[str, str, str]]:
    """Return the description, seconds and share of each stage."""
    total = sum(getattr(times, name) for name in STAGES) or 1.0
    return [
        (text, f"{getattr(times, name):,.1f}", f"{getattr(times, name) / total:.0%}") for name, text in STAGES.items()
    ]


def _next_steps(record: RunRecord) -> Iterator[str]:
    if record.outcome != "finished":
        yield "next: run the same command again to resume this run"
        return
    if record.figures.errors:
        yield "errors: see the column `error` of each row, or _errors.parquet"
    words = ["graphkiln", "score", "--verify", str(record.request["destination"])]
    for name in ("format", "ledger"):
        if value := record.request.get(name):
            words += [f"--{name}", str(value)]
    yield f"next: {shlex.join(words)}"


def print_verification(verification: Verification, destination: str) -> None:
    """Print the result of a verification."""
    counts = f"{verification.inputs:,} rows = {verification.scored:,} scored + {verification.errors:,} errors"
    units = f"{verification.units:,} units"
    if verification.ok:
        (configuration, *_) = verification.configurations or ("none",)
        print_result(f"{destination} is whole: {counts}, {units}, configuration {configuration}\n")
        return
    lines = [printable(str(finding)) for finding in verification.findings[:_MAX_FINDINGS]]
    lines += _more(len(verification.findings) - _MAX_FINDINGS)
    found = f"{verification.scored:,} scored + {verification.errors:,} errors of {verification.inputs:,} rows"
    print_result("\n".join([*lines, f"{destination} is not whole: {found} in {units}"]) + "\n")


def describe_verification(verification: Verification, destination: str) -> dict[str, Any]:
    """Return a verification as plain data, with all findings."""
    return {"destination": destination, "ok": verification.ok, **encode(verification)}


def print_estimate(estimate: Estimate, request: ScoreRequest) -> None:
    """Print an estimate."""
    _print_tables(((), _estimate(estimate, request)))


def _estimate(estimate: Estimate, request: ScoreRequest) -> Iterator[tuple[str, str]]:
    planned = estimate.planned
    size = f", {format_size(planned.size_bytes)}" if planned.size_bytes else ""
    yield "source", f"{planned.rows:,} rows in {planned.units:,} units{size}"
    yield "done", f"{planned.rows_before:,} rows in {planned.units_before:,} units: {planned.rows_left:,} rows are left"
    if planned.stale:
        others = f"{planned.stale:,} units in the destination are not of this input and configuration"
        removes = "but removes" if request.replace else "or with --replace removes"
        yield "other", f"{others}: a run refuses, {removes} those whose input changed"
    yield "model", f"{estimate.model}: {estimate.session}"
    nodes = [f"{count} on {name}" for name, count in estimate.workers.by_node.items()]
    more = f" and {len(nodes) - _MAX_NODES} more nodes" if len(nodes) > _MAX_NODES else ""
    cores = _count(estimate.workers.cores, "core")
    yield "workers", f"{', '.join(nodes[:_MAX_NODES]) or 'none'}{more}, {cores} each"
    if estimate.rate is None:
        yield "time", "nothing is left to be scored"
        return
    yield "measured", _measured(estimate.rate)
    yield "time", _time(estimate)


def _measured(rate: Rate) -> str:
    interval = (
        f"{rate.interval[0]:,.0f} to {rate.interval[1]:,.0f} with 95% confidence"
        if rate.interval
        else "too few rows for an interval"
    )
    errors = f", {rate.errors:,} with an error" if rate.errors else ""
    return (
        f"{rate.rows:,} rows in {_count(rate.pieces, 'piece')}{errors}, by one worker on this machine: "
        f"{rate.per_s:,.0f} rows/s ({interval})"
    )


def _time(estimate: Estimate) -> str:
    if not estimate.workers.total:
        return "never: no node has room for a worker"
    text = f"{format_duration(estimate.seconds)}, of which {format_duration(estimate.start_s)} until workers are ready"
    if estimate.seconds_interval:
        low, high = map(format_duration, estimate.seconds_interval)
        text += f" ({low} to {high})"
    return f"{text}, if every worker is like this one"


def _more(count: int) -> list[str]:
    return [f"and {count:,} more"] if count > 0 else []


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# The HTML report of a scoring run: rows, stages, workers.


def score_report(record: RunRecord, facts: Mapping[str, str], command: str) -> Report:
    """Build the HTML report of a run.

    Args:
        record: Record of the run.
        facts: Facts about the machine, listed at the end.
        command: The command line.
    """
    request = record.request
    about = f"{request['model']}, version {request['version']}, into {request['destination']}: {record.outcome}"
    sections = [_rows_section(record), _stages_section(record), _workers_section(record)]
    if record.quarantined:
        sections.append(_quarantined_section(record))
    title = f"{record.figures.rows:,} rows scored"
    return Report(title=title, about=about, sections=sections, facts=facts, command=command)


def _rows_section(record: RunRecord) -> Section:
    figures = record.figures
    counts = {
        "answered before": figures.rows_before,
        "scored by this run": figures.scored,
        "with an error": figures.errors,
        "of these, quarantined": figures.quarantined,
    }
    bars = [Bar(title=name, begin=0, end=count, label=f"{count:,}") for name, count in counts.items()]
    about = f"{figures.units:,} units, {figures.units_done:,} of them by this run, {figures.retries:,} failed attempts."
    return Section(
        name="rows", title="Rows", text=about,
        table=Table(columns=("rows", "count"), rows=[(bar.title, bar.label) for bar in bars]),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars])),
    )  # fmt: skip


def _stages_section(record: RunRecord) -> Section:
    times, rows = record.figures.times, stage_rows(record.figures.times)
    bars = [
        Bar(title=text.partition(":")[0], begin=0, end=getattr(times, name), label=f"{seconds} s")
        for name, (text, seconds, _) in zip(STAGES, rows, strict=True)
    ]
    speed = f"{record.figures.rows_per_s:,.0f} rows per second after the first worker was ready."
    return Section(
        name="stages", title="Stages",
        text=f"Seconds, summed over workers; stages overlap. {speed}",
        table=Table(columns=("stage", "seconds", "share"), rows=rows),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars]), " s"),
    )  # fmt: skip


def _workers_section(record: RunRecord) -> Section:
    named = [(f"{worker.node}:{worker.pid}", worker) for worker in record.workers]
    bars = [
        Bar(title=name, begin=0, end=each.rows_per_s, label=f"{each.rows_per_s:,.0f}", switch=bool(each.ended))
        for name, each in named
    ]
    rows = [
        (name, each.session, each.ended or "-", f"{each.rows:,}", f"{each.rows_per_s:,.0f}", f"{each.start_s:.1f}")
        for name, each in named
    ]
    columns = ("worker", "engine and precision", "ended", "rows", "rows/s", "seconds to start")
    return Section(
        name="workers", title="Workers", text="Rows per second of each worker; pale workers were replaced.",
        table=Table(columns=columns, rows=rows, texts=3),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars]), "/s"),
    )  # fmt: skip


def _quarantined_section(record: RunRecord) -> Section:
    rows = [(each.id, each.reason) for each in record.quarantined]
    return Section(
        name="quarantined", title="Rows that ended their worker", text="They have an error instead of an answer.",
        table=Table(columns=("row", "reason"), rows=rows, texts=2),
    )  # fmt: skip
