"""The HTML report of a scoring run: rows, stages, workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from graphkiln.cli.score_summary import STAGES, stage_rows
from graphkiln.reporting.report import Bar, Report, Section, Table, bar_chart, linear_across

if TYPE_CHECKING:
    from graphkiln.scoring.record import RunRecord


def score_report(record: RunRecord, facts: Mapping[str, str], command: str) -> Report:
    """The report.

    Args:
        record: Record of the run.
        facts: For its end.
        command: What repeats it.
    """
    request = record.request
    about = f"{request['model']}, version {request['version']}, into {request['destination']}: {record.outcome}"
    sections = [_rows(record), _stages(record), _workers(record)]
    if record.quarantined:
        sections.append(_quarantined(record))
    title = f"{record.figures.rows:,} rows scored"
    return Report(title=title, about=about, sections=sections, facts=facts, command=command)


def _rows(record: RunRecord) -> Section:
    figures = record.figures
    counts = {
        "answered before": figures.rows_before,
        "scored by this run": figures.scored,
        "with an error": figures.errors,
        "of these, quarantined": figures.quarantined,
    }
    bars = [Bar(title=name, begin=0, end=count, label=f"{count:,}") for name, count in counts.items()]
    about = (
        f"{figures.units:,} units, {figures.units_done:,} of them by this run, {figures.retries:,} attempts made again."
    )
    return Section(
        name="rows", title="What became of the rows", text=about,
        table=Table(columns=("rows", "count"), rows=[(bar.title, bar.label) for bar in bars]),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars])),
    )  # fmt: skip


def _stages(record: RunRecord) -> Section:
    times, rows = record.figures.times, stage_rows(record.figures.times)
    bars = [
        Bar(title=text.partition(":")[0], begin=0, end=getattr(times, name), label=f"{seconds} s")
        for name, (text, seconds, _) in zip(STAGES, rows, strict=True)
    ]
    speed = f"{record.figures.rows_per_s:,.0f} rows per second while they computed."
    return Section(
        name="stages", title="Where time went",
        text=f"Seconds of all workers together; stages overlap. {speed}",
        table=Table(columns=("stage", "seconds", "share"), rows=rows),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars]), " s"),
    )  # fmt: skip


def _workers(record: RunRecord) -> Section:
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
        name="workers", title="Who computed them", text="Rows per second of each; pale ones were replaced.",
        table=Table(columns=columns, rows=rows, texts=3),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars]), "/s"),
    )  # fmt: skip


def _quarantined(record: RunRecord) -> Section:
    rows = [(each.id, each.reason) for each in record.quarantined]
    return Section(
        name="quarantined", title="Rows that ended their worker", text="They have an error in place of an answer.",
        table=Table(columns=("row", "reason"), rows=rows, texts=2),
    )  # fmt: skip
