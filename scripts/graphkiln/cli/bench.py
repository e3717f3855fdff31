"""`graphkiln bench`: throughput and latencies of a served model, and where the server spends the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    print_json,
    stderr_console,
    write_html,
)
from graphkiln.cli.options import AsJson, ModelName, ModelVersion
from graphkiln_backend.graph.errors import InvalidInput

if TYPE_CHECKING:
    from graphkiln.bench.generator import Measurement
    from graphkiln.bench.meters import ServerSide

# One run, as --json prints it.
Row = dict[str, Any]


class Arrivals(StrEnum):
    """Arrival process of the requests of a rate."""

    POISSON = "poisson"
    CONSTANT = "constant"


@with_connection()
def bench(
    model: ModelName,
    version: ModelVersion = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Concurrent requests, one run for each number.", metavar="N,N,...", show_default="1"),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Instead of a concurrency: requests per second, whether the server keeps up or not.", min=0.01
        ),
    ] = None,
    arrivals: Annotated[
        Arrivals | None,
        typer.Option(help="With --rate: at random moments, or at even distances.", show_default="poisson"),
    ] = None,
    burst: Annotated[
        int | None, typer.Option(help="With --rate: requests come so many at a time.", min=2, metavar="N")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a concurrency: requests when this file says: a time for each line (seconds, or a date "
            "with a time), the first column or 'time' of a CSV file, or 'time' of JSON lines.",
            metavar="FILE",
        ),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of each run.", min=0.5, show_default="10, or the whole trace")
    ] = None,
    warmup: Annotated[float, typer.Option(help="Seconds before each run that do not count.", min=0)] = 1.0,
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
            help="Each request has another input: a folder of images or of .npz files with one request each, an .npz "
            "with a row for each sample, or a version's golden.npz.",
            metavar="PATH",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of random inputs, and of samples.", min=1)] = 1,
    shared_memory: Annotated[bool, typer.Option("--shared-memory", help="Pass tensors through shared memory.")] = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Measure a served model under load.

    Throughput, latencies, and where the server spends the time. A rate or a trace is an open loop: latencies count from
    the moment when a request was due. Exit code 1 when a request failed.
    """
    from graphkiln.bench import processes as load_processes
    from graphkiln.bench.meters import ServerMeter
    from graphkiln.bench.processes import Target
    from graphkiln.cli.bench_report import bench_report, print_tables
    from graphkiln.cli.bench_requests import RANDOM, plan_loads, read_feeds, read_samples

    check_html(html)
    if samples and input_:
        raise InvalidInput("--samples and --input both say what requests hold", hint="give one of them")
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
        plain.infer(feeds[0])  # a mistake is reported here, once
        rows = []
        for name, load in loads:
            meter = ServerMeter(plain, client.url)
            with _progress(name, load.warmup_s + load.seconds):
                measured = load_processes.measure_load(target, feeds, load, meter.start)
            rows.append(_row(name, measured, meter.side(measured.seconds)))
    if html:
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


@contextmanager
def _progress(load: str, seconds: float) -> Iterator[None]:
    """A bar on a terminal, as long as the block runs."""
    console = stderr_console()
    if not console:
        yield
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("load {task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("of {task.total:g} s"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task(load, total=seconds)
        yield
