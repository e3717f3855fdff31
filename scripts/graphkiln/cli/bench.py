"""`graphkiln bench`: throughput, latencies and time per stage of a served model under load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import (
    Html,
    check_html,
    command_line,
    facts,
    make_table,
    print_json,
    progress_bar,
    write_html,
)
from graphkiln.cli.options import AsJson, ModelName, ModelVersion
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    from graphkiln.bench.generator import Measurement
    from graphkiln.bench.meters import ServerSide
    from graphkiln.reporting import report as reports
else:
    reports = LazyModule("graphkiln.reporting.report")

# One run, as --json prints it.
Row = Mapping[str, Any]

PERCENTILES = ("p50", "p90", "p99", "p99.9")
# Share and number of due requests that may be unanswered at the end.
_UNANSWERED_SHARE, _UNANSWERED = 0.05, 5
# Minimum number of requests above a percentile (one, within rounding).
_ONE = 0.999
_STAGE_NAMES = {
    "queue": "waiting for the previous batch",
    "input": "preparing inputs",
    "infer": "in the backend",
    "output": "returning outputs",
}


class Arrivals(StrEnum):
    """Arrival process of an open loop."""

    POISSON = "poisson"
    CONSTANT = "constant"


@with_connection()
def bench(
    model: ModelName,
    version: ModelVersion = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Concurrent requests; one run per number.", metavar="N,N,...", show_default="1"),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Instead of --concurrency: requests per second, independent of responses.", min=0.01),
    ] = None,
    arrivals: Annotated[
        Arrivals | None,
        typer.Option(help="With --rate: arrival process.", show_default="poisson"),
    ] = None,
    burst: Annotated[
        int | None, typer.Option(help="With --rate: send N requests at a time.", min=2, metavar="N")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --concurrency: arrival times, one per line (seconds, or a date with a time), as the "
            "first column or 'time' of a CSV file, or as 'time' of JSON lines.",
            metavar="FILE",
        ),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of each run.", min=0.5, show_default="10, or the whole trace")
    ] = None,
    warmup: Annotated[float, typer.Option(help="Seconds of warm-up before each run.", min=0)] = 1.0,
    input_: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="'random', an image, or as for infer; may be repeated.",
            metavar="FILE",
            show_default="random",
        ),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            help="Different inputs for requests: a folder of images or of .npz files with one request each, an .npz "
            "with a row for each sample, or a version's golden.npz.",
            metavar="PATH",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per request, for random inputs and samples.", min=1)] = 1,
    shared_memory: Annotated[bool, typer.Option("--shared-memory", help="Pass tensors through shared memory.")] = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Measure a served model under load.

    Shows throughput, latencies and the time of each stage in the server. With a rate or a trace (open loop), latencies
    count from the due time. Exit code 1 when a request failed.
    """
    from graphkiln.bench import processes as load_processes
    from graphkiln.bench.meters import ServerMeter
    from graphkiln.bench.processes import Target
    from graphkiln.cli.bench_requests import RANDOM, plan_loads, read_feeds, read_samples

    check_html(html)
    if samples and input_:
        raise InvalidInput("--samples and --input are mutually exclusive", hint="remove one of them")
    loads = plan_loads(
        concurrency=concurrency, rate=rate, arrivals=arrivals, burst=burst, trace=trace, seconds=duration,
        warmup_s=warmup,
    )  # fmt: skip
    target = Target(client=connection.arguments(), model=model, version=version, shared_memory=shared_memory)
    with connection.connect() as client:
        plain = client.model(model, version)
        feeds = (
            read_samples(plain, samples, batch_size) if samples else [read_feeds(plain, input_ or [RANDOM], batch_size)]
        )
        plain.infer(feeds[0])  # reports an invalid input once
        rows = []
        for name, load in loads:
            meter = ServerMeter(plain, client.url)
            seconds = load.warmup_s + load.seconds
            with progress_bar(f"load {name}, {seconds:g} s", total=None):
                measured = load_processes.measure_load(target, feeds, load, meter.start)
            rows.append(_row(name, measured, meter.side(measured.seconds)))
    if html:
        report = bench_report(rows, model, client.url, facts(), command_line())
        write_html(html, reports.render(report))
    if as_json:
        print_json(rows)
    else:
        print_tables(rows, "callers" if loads[0][1].arrivals is None else "load")
    raise typer.Exit(1 if any(row["client"]["errors"] for row in rows) else 0)


def _row(load: str, measured: Measurement, server: ServerSide) -> Row:
    from graphkiln_backend.system.resources import usable_cores

    generator = {
        "name": "graphkiln",
        "processes": measured.processes,
        "cores": measured.client_cores,
        "share_of_machine": measured.client_cores / usable_cores(),
    }
    return {
        "load": load,
        "generator": generator,
        "client": asdict(measured),
        "server_us": server.us,
        "batch": server.batch,
        "server_cores": server.cores,
    }


def print_tables(rows: Sequence[Row], unit: str) -> None:
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
        stages = [_cell(row["server_us"][name], 0) for name in _STAGE_NAMES]
        server.append((row["load"], *stages, _cell(row["batch"], 1), _cell(row["server_cores"], 2)))
    client_columns = (unit, "answered/s", *PERCENTILES, "cores", *extra)
    server_columns = (unit, *_STAGE_NAMES, "batch", "cores")
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


def _notes(row: Row) -> Iterator[str]:
    """Yield warnings about a run."""
    load, client = row["load"], row["client"]
    due, answered, seconds = client["due"], client["answered"], client["seconds"]
    if due - answered - sum(client["errors"].values()) > max(_UNANSWERED_SHARE * due, _UNANSWERED):
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


def _busiest(rows: Sequence[Row]) -> Row:
    """Return the load generator of the run with the highest CPU usage."""
    return max((row["generator"] for row in rows), key=lambda generator: float(generator["share_of_machine"]))


# The HTML report.


def bench_report(rows: Sequence[Row], model: str, url: str, facts: Mapping[str, str], command: str) -> reports.Report:
    """Create the report from the rows of `bench --json`."""
    sections, most = [_rates(rows), _latencies(rows), _stages(rows)], _busiest(rows)
    sent_by = (
        f"{most['name']}, {most['processes']} processes, up to {most['share_of_machine']:.0%} of this machine's cores"
    )
    return reports.Report(
        title=f"{model} under load", about=f"{url}; loads: {', '.join(row['load'] for row in rows)}", sections=sections,
        facts={**facts, "sent by": sent_by}, command=command,
    )  # fmt: skip


def _rates(rows: Sequence[Row]) -> reports.Section:
    found = [(row["load"], row["client"]) for row in rows]
    bars = [
        reports.Bar(title=load, begin=0, end=each["per_second"], label=f"{each['per_second']:.1f}")
        for load, each in found
    ]
    cells = [
        (
            load, ", ".join(f"{count} {name}" for name, count in each["errors"].items()) or "none",
            f"{each['per_second']:.1f}", f"{each['per_second_range'][0]:.1f}",
            f"{each['per_second_range'][1]:.1f}", f"{each['unsent']}", f"{each['client_cores']:.2f}",
        )
        for load, each in found
    ]  # fmt: skip
    columns = ("load", "errors", "answered/s", "at least", "at most", "unsent", "client cores")
    return reports.Section(
        name="rates", title="Throughput", text="Responses per second, with their 95% interval.",
        table=reports.Table(columns=columns, rows=cells, texts=2),
        chart=reports.bar_chart(bars, reports.linear_across([bar.end for bar in bars]), "/s"),
    )  # fmt: skip


def _latencies(rows: Sequence[Row]) -> reports.Section:
    found = [(row["load"], row["client"]["latency_ms"]) for row in rows]
    spans = [
        reports.Span(title=load, low=each["p50"], high=each["p99"], label=f"{each['p50']:.2f} / {each['p99']:.2f} ms")
        for load, each in found
        if each and each["p50"] > 0
    ]
    cells = [(load, *(f"{each[name]:.2f}" if each else "-" for name in PERCENTILES)) for load, each in found]
    return reports.Section(
        name="latencies", title="Latencies",
        text="Milliseconds: the median (full dot) and the 99th percentile (ring). With a rate or a trace, latencies "
        "count from the due time.",
        table=reports.Table(columns=("load", *PERCENTILES), rows=cells),
        chart=reports.span_chart(spans, reports.log_across(value for span in spans for value in (span.low, span.high))),
    )  # fmt: skip


def _stages(rows: Sequence[Row]) -> reports.Section:
    bars = [bar for row in rows for bar in _waterfall(row)]
    cells = [
        (
            row["load"], *(_cell(row["server_us"][name], 0) for name in _STAGE_NAMES), _cell(row["batch"], 1),
            _cell(row["server_cores"], 2),
        )
        for row in rows
    ]  # fmt: skip
    return reports.Section(
        name="stages", title="Time in the server",
        text=f"Mean microseconds per request: {', '.join(f'{name}: {text}' for name, text in _STAGE_NAMES.items())}.",
        table=reports.Table(columns=("load", *_STAGE_NAMES, "batch", "server cores"), rows=cells),
        chart=reports.bar_chart(bars, reports.linear_across([bar.end for bar in bars]), " us"),
    )  # fmt: skip


def _waterfall(row: Row) -> Iterator[reports.Bar]:
    """Yield the stages of a load, each beginning at the end of the previous one."""
    begin = 0.0
    for name in _STAGE_NAMES:
        took = row["server_us"][name]
        if took is None:  # the server was restarted
            return
        yield reports.Bar(title=f"{row['load']}: {name}", begin=begin, end=begin + took, label=f"{took:.0f}")
        begin += took
