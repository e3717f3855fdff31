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

if TYPE_CHECKING:
    from graphkiln.bench.generator import Measurement
    from graphkiln.bench.meters import ServerSide

# One run, as --json prints it.
Row = Mapping[str, Any]

PERCENTILES = ("p50", "p90", "p99", "p99.9")
# Share and number of due requests that may be unanswered at the end.
_UNANSWERED_SHARE, _UNANSWERED = 0.05, 5
# Minimum number of requests above a percentile (one, within rounding).
_ONE = 0.999


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
        from graphkiln.cli.bench_report import bench_report
        from graphkiln.reporting.report import render

        write_html(html, render(bench_report(rows, model, client.url, facts(), command_line())))
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

    from graphkiln.bench.meters import STAGES

    failed = any(row["client"]["errors"] for row in rows)
    unsent = any(row["client"]["unsent"] for row in rows)
    extra = [*(["errors"] if failed else []), *(["unsent"] if unsent else [])]
    client, server = [], []
    for row in rows:
        measured = row["client"]
        margin = measured["per_second_range"][1] - measured["per_second"]  # the lower bound may be cut off at 0
        latencies = [format_cell(measured["latency_ms"].get(name), 2) for name in PERCENTILES]
        kinds = "\n".join(f"{count} {name}" for name, count in measured["errors"].items()) or "0"
        problems = [*([kinds] if failed else []), *([str(measured["unsent"])] if unsent else [])]
        rate = f"{measured['per_second']:.1f} \u00b1 {margin:.1f}"
        client.append((row["load"], rate, *latencies, f"{measured['client_cores']:.2f}", *problems))
        stages = [format_cell(row["server_us"][name], 0) for name in STAGES.values()]
        server.append((row["load"], *stages, format_cell(row["batch"], 1), format_cell(row["server_cores"], 2)))
    client_columns = (unit, "answered/s", *PERCENTILES, "cores", *extra)
    server_columns = (unit, *STAGES.values(), "batch", "cores")
    console = Console()
    console.print(make_table(client_columns, client, title="client: latencies in ms"))
    console.print(make_table(server_columns, server, title="server: mean times of a request in us"))
    for line in (note for row in rows for note in _notes(row)):
        console.print(line, highlight=False)
    most = busiest_generator(rows)
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


def format_cell(value: float | None, digits: int) -> str:
    """Format a number; `-` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def busiest_generator(rows: Sequence[Row]) -> Row:
    """Return the load generator of the run with the highest CPU usage."""
    return max((row["generator"] for row in rows), key=lambda generator: float(generator["share_of_machine"]))
