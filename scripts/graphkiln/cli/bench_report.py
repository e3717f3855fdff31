"""Tables and HTML report of `bench`: throughput, latencies, and the server's time by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphkiln.bench.meters import STAGES
from graphkiln.cli.console import make_table
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

PERCENTILES = ("p50", "p90", "p99", "p99.9")
# Share and number of due requests that may be unanswered at the end.
_LOST, _FEW = 0.05, 5
# Minimum number of requests above a percentile (one, within rounding).
_ONE = 0.999
_STAGES = {
    "queue": "waiting for the previous batch",
    "input": "preparing inputs",
    "infer": "in the backend",
    "output": "returning outputs",
}


def print_tables(rows: Sequence[Mapping[str, Any]], unit: str) -> None:
    """Print tables of client and server, then warnings; `rows` are those of `--json`."""
    from rich.console import Console

    failed = any(row["client"]["errors"] for row in rows)
    unsent = any(row["client"]["unsent"] for row in rows)
    extra = [*(["errors"] if failed else []), *(["unsent"] if unsent else [])]
    client, server = [], []
    for row in rows:
        measured = row["client"]
        margin = measured["per_second_range"][1] - measured["per_second"]  # the lower bound may be cut off at 0
        latencies = [_cell(measured["latency_ms"].get(name), 2) for name in PERCENTILES]
        kinds = "\n".join(f"{count} {name}" for name, count in measured["errors"].items()) or "0"
        problems = [*([kinds] if failed else []), *([str(measured["unsent"])] if unsent else [])]
        rate = f"{measured['per_second']:.1f} \u00b1 {margin:.1f}"
        client.append((row["load"], rate, *latencies, f"{measured['client_cores']:.2f}", *problems))
        stages = [_cell(row["server_us"][name], 0) for name in STAGES.values()]
        server.append((row["load"], *stages, _cell(row["batch"], 1), _cell(row["server_cores"], 2)))
    client_columns = (unit, "answered/s", *PERCENTILES, "cores", *extra)
    server_columns = (unit, *STAGES.values(), "batch", "cores")
    console = Console()
    console.print(make_table(client_columns, client, title="client: latencies in ms"))
    console.print(make_table(server_columns, server, title="server: mean times of a request in us"))
    for line in (note for row in rows for note in _notes(row)):
        console.print(line, highlight=False)
    most = _busiest(rows)
    console.print(
        "\u00b1: 95% interval of the rate, by ten windows of time; "
        f"sent by {most['name']} in {most['processes']} process{'es' if most['processes'] > 1 else ''}, "
        f"using up to {most['share_of_machine']:.0%} of this machine's cores",
        highlight=False,
    )


def _notes(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about a run."""
    load, client = row["load"], row["client"]
    due, answered, seconds = client["due"], client["answered"], client["seconds"]
    if due - answered - sum(client["errors"].values()) > max(_LOST * due, _FEW):
        yield (
            f"{load}: only {answered / seconds:.1f} of {due / seconds:.1f} requests per second were answered: the "
            "queue and the latencies grow with the duration"
        )
    few = [name for name in PERCENTILES if 0 < answered * (1 - float(name[1:]) / 100) < _ONE]
    if few:
        yield f"{load}: {', '.join(few)} of only {answered} answered requests: the slowest request"
    if row["batch"] is None:
        yield f"{load}: the server was restarted or is gone: its figures are unknown"


def _cell(value: float | None, digits: int) -> str:
    """Format a number; `-` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def _busiest(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the load generator of the run with the highest CPU usage."""
    return max((row["generator"] for row in rows), key=lambda generator: float(generator["share_of_machine"]))


def bench_report(
    rows: Sequence[Mapping[str, Any]], model: str, url: str, facts: Mapping[str, str], command: str
) -> Report:
    """Create the report from the rows of `bench --json`."""
    sections, most = [_rates(rows), _latencies(rows), _stages(rows)], _busiest(rows)
    sent_by = (
        f"{most['name']}, {most['processes']} processes, up to {most['share_of_machine']:.0%} of this machine's cores"
    )
    return Report(
        title=f"{model} under load", about=f"{url}; loads: {', '.join(row['load'] for row in rows)}", sections=sections,
        facts={**facts, "sent by": sent_by}, command=command,
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
        name="rates", title="Throughput", text="Responses per second, with their 95% interval.",
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
        name="latencies", title="Latencies",
        text="Milliseconds: the median (full dot) and the 99th percentile (ring). With a rate or a trace, latencies "
        "count from the due time.",
        table=Table(columns=("load", *PERCENTILES), rows=cells),
        chart=span_chart(spans, log_across(value for span in spans for value in (span.low, span.high))),
    )  # fmt: skip


def _stages(rows: Sequence[Mapping[str, Any]]) -> Section:
    bars = [bar for row in rows for bar in _waterfall(row)]
    cells = [
        (
            row["load"], *(_cell(row["server_us"][name], 0) for name in _STAGES), _cell(row["batch"], 1),
            _cell(row["server_cores"], 2),
        )
        for row in rows
    ]  # fmt: skip
    return Section(
        name="stages", title="Time in the server",
        text=f"Mean microseconds per request: {', '.join(f'{name}: {text}' for name, text in _STAGES.items())}.",
        table=Table(columns=("load", *_STAGES, "batch", "server cores"), rows=cells),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars]), " us"),
    )  # fmt: skip


def _waterfall(row: Mapping[str, Any]) -> Iterator[Bar]:
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
