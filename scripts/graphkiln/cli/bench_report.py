"""HTML report of `bench`: throughput, latencies, and the server's time by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphkiln.cli.bench import PERCENTILES, Row, busiest_generator, format_cell
from graphkiln.reporting.report import (
    Bar,
    Report,
    Section,
    Span,
    Table,
    bar_chart,
    linear_across,
    log_across,
    span_chart,
)

_STAGES = {
    "queue": "waiting for the previous batch",
    "input": "preparing inputs",
    "infer": "in the backend",
    "output": "returning outputs",
}


def bench_report(rows: Sequence[Row], model: str, url: str, facts: Mapping[str, str], command: str) -> Report:
    """Create the report from the rows of `bench --json`."""
    sections, most = [_rates(rows), _latencies(rows), _stages(rows)], busiest_generator(rows)
    sent_by = (
        f"{most['name']}, {most['processes']} processes, up to {most['share_of_machine']:.0%} of this machine's cores"
    )
    return Report(
        title=f"{model} under load", about=f"{url}; loads: {', '.join(row['load'] for row in rows)}", sections=sections,
        facts={**facts, "sent by": sent_by}, command=command,
    )  # fmt: skip


def _rates(rows: Sequence[Row]) -> Section:
    found = [(row["load"], row["client"]) for row in rows]
    bars = [Bar(title=load, begin=0, end=each["per_second"], label=f"{each['per_second']:.1f}") for load, each in found]
    cells = [
        (
            load, _errors(each), f"{each['per_second']:.1f}", f"{each['per_second_range'][0]:.1f}",
            f"{each['per_second_range'][1]:.1f}", f"{each['unsent']}", f"{each['client_cores']:.2f}",
        )
        for load, each in found
    ]  # fmt: skip
    columns = ("load", "errors", "answered/s", "at least", "at most", "unsent", "client cores")
    return Section(
        name="rates", title="Throughput", text="Responses per second, with their 95% interval.",
        table=Table(columns=columns, rows=cells, texts=2),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars]), "/s"),
    )  # fmt: skip


def _latencies(rows: Sequence[Row]) -> Section:
    found = [(row["load"], row["client"]["latency_ms"]) for row in rows]
    spans = [
        Span(title=load, low=each["p50"], high=each["p99"], label=f"{each['p50']:.2f} / {each['p99']:.2f} ms")
        for load, each in found
        if each and each["p50"] > 0
    ]
    cells = [(load, *(f"{each[name]:.2f}" if each else "-" for name in PERCENTILES)) for load, each in found]
    return Section(
        name="latencies", title="Latencies",
        text="Milliseconds: the median (full dot) and the 99th percentile (ring). With a rate or a trace, latencies "
        "count from the due time.",
        table=Table(columns=("load", *PERCENTILES), rows=cells),
        chart=span_chart(spans, log_across(value for span in spans for value in (span.low, span.high))),
    )  # fmt: skip


def _stages(rows: Sequence[Row]) -> Section:
    bars = [bar for row in rows for bar in _waterfall(row)]
    cells = [
        (
            row["load"], *(format_cell(row["server_us"][name], 0) for name in _STAGES), format_cell(row["batch"], 1),
            format_cell(row["server_cores"], 2),
        )
        for row in rows
    ]  # fmt: skip
    return Section(
        name="stages", title="Time in the server",
        text=f"Mean microseconds per request: {', '.join(f'{name}: {text}' for name, text in _STAGES.items())}.",
        table=Table(columns=("load", *_STAGES, "batch", "server cores"), rows=cells),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars]), " us"),
    )  # fmt: skip


def _waterfall(row: Row) -> Iterator[Bar]:
    """Yield the stages of a load, each beginning at the end of the previous one."""
    begin = 0.0
    for name in _STAGES:
        took = row["server_us"][name]
        if took is None:  # the server was restarted
            return
        yield Bar(title=f"{row['load']}: {name}", begin=begin, end=begin + took, label=f"{took:.0f}")
        begin += took


def _errors(client: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {name}" for name, count in client["errors"].items()) or "none"
