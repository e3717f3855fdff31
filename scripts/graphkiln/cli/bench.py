"""`graphkiln bench`: throughput and latencies of a served model, and where the server spends the time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.bench_loads import Arrivals, LoadOptions
from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_json
from graphkiln.cli.report_file import Html, check_html, command_line, facts, write_html
from graphkiln_backend.graph.errors import InvalidInput

if TYPE_CHECKING:
    from graphkiln_client import Client, Model
    from graphkiln_client.load_generator import Measurement

_PERCENTILES = ("p50", "p90", "p99", "p99.9")
_STAGES = {"queue": "queue", "compute_input": "input", "compute_infer": "infer", "compute_output": "output"}
_LOST, _FEW = 0.05, 5
"""Of the requests that were due: a share, and a number, that are on their way at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Generator:
    """What sent the load, and how much of this machine it took from a server that shares it."""

    name: str
    processes: int
    cores: float
    share_of_machine: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One run: what the client measured, and what the server says about the same time."""

    load: str
    generator: _Generator
    client: Measurement
    server_us: dict[str, float]
    batch: float
    server_cores: float | None


@with_connection()
def bench(
    model: Annotated[str, typer.Option(help="Model name.")],
    version: Annotated[str, typer.Option(help="Model version.", show_default="the server's choice")] = "",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure a served model under load.

    Throughput, latencies, and where the server spends the time. A rate or a trace is an open loop: latencies count from
    the moment when a request was due. Exit code 1 when a request failed.
    """
    from graphkiln.cli.bench_inputs import RANDOM, read_feeds, read_samples
    from graphkiln_client import load_processes
    from graphkiln_client.load_job import Target

    check_html(html)
    if samples and input_:
        raise InvalidInput("--samples and --input both say what requests hold", hint="give one of them")
    options = LoadOptions(
        concurrency=concurrency, rate=rate, arrivals=arrivals, burst=burst, trace=trace, seconds=duration,
        warmup_s=warmup,
    )  # fmt: skip
    loads = options.plan()
    target = Target(client=connection.arguments(), model=model, version=version, shared_memory=shared_memory)
    with connection.connect() as client:
        plain = client.model(model, version)
        feeds = (
            read_samples(plain, samples, batch_size) if samples else [read_feeds(plain, input_ or [RANDOM], batch_size)]
        )
        plain.infer(feeds[0])  # a mistake is reported here, once
        rows = []
        for name, load in loads:
            watch = _ServerWatch(plain, client, name, load.warmup_s + load.seconds)
            rows.append(watch.row(load_processes.measure_load(target, feeds, load, watch.start)))
    if html:
        _write_report(html, rows, model, client.url)
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        _print_tables(rows, "callers" if loads[0][1].arrivals is None else "load")
    raise typer.Exit(1 if any(row.client.errors for row in rows) else 0)


def _write_report(html: Path, rows: list[_Row], model: str, url: str) -> None:
    from graphkiln.cli.bench_report import bench_report
    from graphkiln.reporting.report import render

    measured = [asdict(row) for row in rows]
    write_html(html, render(bench_report(measured, model, url, facts(), command_line())))


class _ServerWatch:
    """Reads the server's own counters, and the CPU time of its processes, at the start and end of a run."""

    def __init__(self, model: Model, client: Client, load: str, seconds: float) -> None:
        self._model = model
        self._cpu_seconds = _local_cpu_seconds(client.url)
        self._load = load
        self._seconds = seconds
        self._before: dict[str, Any] = {}
        self._begin_cpu_s = 0.0
        self._stack = ExitStack()
        self._show_progress()

    def start(self) -> None:
        self._before = self._model.statistics()
        self._begin_cpu_s = self._cpu_seconds() if self._cpu_seconds else 0.0

    def row(self, measured: Measurement) -> _Row:
        self._stack.close()
        after = self._model.statistics()
        server_cores = (self._cpu_seconds() - self._begin_cpu_s) / measured.seconds if self._cpu_seconds else None
        requests, server_us = _breakdown(self._before, after)
        executions = after["execution_count"] - self._before["execution_count"]
        rows = after["inference_count"] - self._before["inference_count"]
        batch = rows / executions if requests and executions else 0.0
        return _Row(
            load=self._load,
            generator=_describe_generator(measured),
            client=measured,
            server_us=server_us,
            batch=batch,
            server_cores=server_cores,
        )

    def _show_progress(self) -> None:
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("load {task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("of {task.total:g} s"),
        )
        bar = self._stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        bar.add_task(self._load, total=self._seconds)


def _describe_generator(measured: Measurement) -> _Generator:
    from graphkiln_backend.graph.cores import usable_cores

    share = measured.client_cores / usable_cores()
    return _Generator(
        name="graphkiln", processes=measured.processes, cores=measured.client_cores, share_of_machine=share
    )


def _breakdown(before: dict[str, Any], after: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """Number of successful requests, and the mean microseconds of one in each stage.

    Source: Triton's statistics extension.
    """
    old, new = before["inference_stats"], after["inference_stats"]
    requests = new["success"].get("count", 0) - old["success"].get("count", 0)
    stages = {name: new.get(key, {}).get("ns", 0) - old.get(key, {}).get("ns", 0) for key, name in _STAGES.items()}
    return requests, {name: ns / max(requests, 1) / 1e3 for name, ns in stages.items()}


def _local_cpu_seconds(url: str) -> Callable[[], float] | None:
    """A function that reads the CPU seconds of the server's processes; None where they are not on this machine."""
    from urllib.parse import urlsplit

    try:
        import psutil
    except ImportError:
        return None
    port = urlsplit(url).port
    if urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1"):
        return None
    sockets = psutil.net_connections("tcp")
    pids = {socket.pid for socket in sockets if socket.status == psutil.CONN_LISTEN and socket.laddr[1:] == (port,)}
    processes = [psutil.Process(pid) for pid in pids if pid]
    family = [member for process in processes for member in (process, *process.children(recursive=True))]
    if not family:
        return None

    def seconds() -> float:
        times = [member.cpu_times() for member in family if member.is_running()]
        return float(sum(time.user + time.system for time in times))

    return seconds


def _shortfall(row: _Row) -> str:
    """That requests came faster than they were answered; empty where they did not, failed, or were a closed loop."""
    measured = row.client
    if measured.due - measured.answered - sum(measured.errors.values()) <= max(_LOST * measured.due, _FEW):
        return ""
    return (
        f"{row.load}: {measured.due / measured.seconds:.1f} requests a second were due, and "
        f"{measured.answered / measured.seconds:.1f} answered: the rate was not reached, and the longer it lasts, the "
        "longer the latencies"
    )


def _print_tables(rows: list[_Row], unit: str) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    failed = any(row.client.errors for row in rows)
    unsent = any(row.client.unsent for row in rows)
    errors = Column("errors", overflow="fold")  # not cut short: their names say what went wrong
    extra: list[Column | str] = [*([errors] if failed else []), *(["unsent"] if unsent else [])]
    client = Table(unit, "answered/s", *_PERCENTILES, "cores", *extra, title="client: latencies in ms")
    server = Table(unit, *_STAGES.values(), "batch", "cores", title="server: mean times of a request in us")
    for row in rows:
        measured = row.client
        margin = (measured.per_second_range[1] - measured.per_second_range[0]) / 2
        latencies = [f"{measured.latency_ms[name]:.2f}" if measured.latency_ms else "-" for name in _PERCENTILES]
        kinds = "\n".join(f"{count} {name}" for name, count in measured.errors.items()) or "0"
        problems = [*([kinds] if failed else []), *([str(measured.unsent)] if unsent else [])]
        rate = f"{measured.per_second:.1f} \u00b1 {margin:.1f}"
        client.add_row(row.load, rate, *latencies, f"{measured.client_cores:.2f}", *problems)
        stages = [f"{row.server_us[name]:.0f}" for name in _STAGES.values()]
        cores = "-" if row.server_cores is None else f"{row.server_cores:.2f}"
        server.add_row(row.load, *stages, f"{row.batch:.1f}", cores)
    console = Console()
    console.print(client, server)
    for line in filter(None, map(_shortfall, rows)):
        console.print(line, highlight=False)
    most = max((row.generator for row in rows), key=lambda generator: generator.share_of_machine)
    console.print(
        f"sent by {most.name} in {most.processes} process{'es' if most.processes > 1 else ''}, "
        f"which took up to {most.share_of_machine:.0%} of this machine's cores",
        highlight=False,
    )
