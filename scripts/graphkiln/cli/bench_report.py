"""The HTML report of `bench`: throughput, latencies, and the server's time by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphkiln.cli.bench_server import PERCENTILES, cell
from graphkiln.reporting.charts import Bar, Span, bar_chart, linear_across, log_across, span_chart
from graphkiln.reporting.report import Report, Section, Table

_STAGES = {
    "queue": "waiting for the batch before",
    "input": "preparing inputs",
    "infer": "in the backend",
    "output": "handing outputs over",
}


def bench_report(
    rows: Sequence[Mapping[str, Any]], model: str, url: str, facts: Mapping[str, str], command: str
) -> Report:
    """Build the report of the rows that `bench --json` prints."""
    sections = [_rates(rows), _latencies(rows), _stages(rows)]
    return Report(
        title=f"{model} under load", about=f"{url}; loads: {', '.join(row['load'] for row in rows)}", sections=sections,
        facts={**facts, "sent by": _generator(rows)}, command=command,
    )  # fmt: skip


def _rates(rows: Sequence[Mapping[str, Any]]) -> Section:
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
        name="rates", title="How much is answered", text="Responses per second, with their 95% interval.",
        table=Table(columns=columns, rows=cells, texts=2),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars]), "/s"),
    )  # fmt: skip


def _latencies(rows: Sequence[Mapping[str, Any]]) -> Section:
    found = [(row["load"], row["client"]["latency_ms"]) for row in rows]
    spans = [
        Span(title=load, low=each["p50"], high=each["p99"], label=f"{each['p50']:.2f} / {each['p99']:.2f} ms")
        for load, each in found
        if each and each["p50"] > 0
    ]
    cells = [(load, *(f"{each[name]:.2f}" if each else "-" for name in PERCENTILES)) for load, each in found]
    return Section(
        name="latencies", title="How long it takes",
        text="Milliseconds: the median (full dot) and the 99th percentile (ring). With a rate or a trace they count "
        "from when a request was due.",
        table=Table(columns=("load", *PERCENTILES), rows=cells),
        chart=span_chart(spans, log_across(value for span in spans for value in (span.low, span.high))),
    )  # fmt: skip


def _stages(rows: Sequence[Mapping[str, Any]]) -> Section:
    bars = [bar for row in rows for bar in _waterfall(row)]
    cells = [
        (
            row["load"], *(cell(row["server_us"][name], 0) for name in _STAGES), cell(row["batch"], 1),
            cell(row["server_cores"], 2),
        )
        for row in rows
    ]  # fmt: skip
    return Section(
        name="stages", title="Where the server spends it",
        text=f"Mean microseconds of a request: {', '.join(f'{name}: {text}' for name, text in _STAGES.items())}.",
        table=Table(columns=("load", *_STAGES, "batch", "server cores"), rows=cells),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars]), " us"),
    )  # fmt: skip


def _waterfall(row: Mapping[str, Any]) -> Iterator[Bar]:
    """The stages of a load, each beginning where the one before it ended."""
    begin = 0.0
    for name in _STAGES:
        took = row["server_us"][name]
        if took is None:  # the server was started again meanwhile
            return
        yield Bar(title=f"{row['load']}: {name}", begin=begin, end=begin + took, label=f"{took:.0f}")
        begin += took


def _errors(client: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {name}" for name, count in client["errors"].items()) or "none"


def _generator(rows: Sequence[Mapping[str, Any]]) -> str:
    most = max((row["generator"] for row in rows), key=lambda generator: float(generator["share_of_machine"]))
    return (
        f"{most['name']}, {most['processes']} processes, up to {most['share_of_machine']:.0%} of this machine's cores"
    )
