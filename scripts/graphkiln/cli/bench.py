"""`graphkiln bench`: throughput and latencies of a served model, and where the server spends the time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.bench_loads import Arrivals, LoadOptions
from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import Html, check_html, command_line, facts, print_json, write_html
from graphkiln_backend.graph.errors import ClientError, InvalidInput

# The server's side of a run: Triton's counters and the CPU time of its processes.

if TYPE_CHECKING:
    from graphkiln_client import Model

# Triton's name of a stage -> ours.
STAGES = {"queue": "queue", "compute_input": "input", "compute_infer": "infer", "compute_output": "output"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSide:
    """The server's part of a run; None for unknown values.

    Attributes:
        us: Mean microseconds of a request in each stage.
        batch: Mean rows of a batch.
        cores: Processor seconds of its processes, per second; known of a server on this machine.
    """

    us: dict[str, float | None]
    batch: float | None = None
    cores: float | None = None

    @property
    def is_known(self) -> bool:
        """Return true if the counters cover the run and nothing else."""
        return self.batch is not None


UNKNOWN = ServerSide(us=dict.fromkeys(STAGES.values()))


class ServerWatch:
    """Reads the counters, and the processor time, at the start and the end of a run.

    Args:
        model: Which is loaded.
        url: Of its server.
    """

    def __init__(self, model: Model, url: str) -> None:
        self._model = model
        self._cpu_seconds = local_cpu_seconds(url)
        self._before: Mapping[str, Any] = {}
        self._begin_cpu_s = 0.0

    def start(self) -> None:
        """Take the first reading.

        Raises:
            ClientError: The server cannot be asked.
        """
        self._before = self._model.statistics()
        self._begin_cpu_s = self._cpu_seconds() if self._cpu_seconds else 0.0

    def side(self, seconds: float) -> ServerSide:
        """Differences over a run of `seconds`; unknown if the server was restarted, or is gone."""
        try:
            found = breakdown(self._before, self._model.statistics())
        except ClientError:  # what the client has measured is no less true
            return UNKNOWN
        cpu_s = self._cpu_seconds() - self._begin_cpu_s if self._cpu_seconds else -1.0
        cores = cpu_s / seconds if found.is_known and cpu_s >= 0 else None
        return ServerSide(us=found.us, batch=found.batch, cores=cores)


def breakdown(before: Mapping[str, Any], after: Mapping[str, Any]) -> ServerSide:
    """The mean times of a successful request between two readings; unknown where a counter went back.

    Source: Triton's statistics extension.
    """
    old, new = _counters(before), _counters(after)
    grown = {name: new[name] - old[name] for name in new}
    if min(grown.values()) < 0:
        return UNKNOWN
    requests = grown["requests"]
    us = {name: grown[name] / max(requests, 1) / 1e3 for name in STAGES.values()}
    batch = grown["rows"] / grown["executions"] if requests and grown["executions"] else 0.0
    return ServerSide(us={**us}, batch=batch)


def _counters(statistics: Mapping[str, Any]) -> dict[str, int]:
    """Requests, rows, executions, and the nanoseconds of each stage; 0 of what a server does not count."""
    stages = statistics["inference_stats"]
    return {
        "requests": stages["success"].get("count", 0),
        "rows": statistics.get("inference_count", 0),
        "executions": statistics.get("execution_count", 0),
        **{name: stages.get(key, {}).get("ns", 0) for key, name in STAGES.items()},
    }


def local_cpu_seconds(url: str) -> Callable[[], float] | None:
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

    def seconds_of(member: psutil.Process) -> float:
        try:
            times = member.cpu_times()
        except psutil.Error:  # an instance that was started again, in another process
            return 0.0
        return float(times.user + times.system)

    return lambda: sum(map(seconds_of, family))


if TYPE_CHECKING:
    from graphkiln.bench.generator import Measurement

_PERCENTILES = ("p50", "p90", "p99", "p99.9")
# Of the requests that were due: a share, and a number, that are on their way at the end.
_LOST, _FEW = 0.05, 5
# A request beyond a percentile, within rounding: with fewer, the percentile is made of the slowest one.
_ONE = 0.999


@dataclass(frozen=True, kw_only=True, slots=True)
class _Generator:
    """The load generator, and the share of this machine that it took."""

    name: str
    processes: int
    cores: float
    share_of_machine: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One run, as measured by the client and by the server."""

    load: str
    generator: _Generator
    client: Measurement
    server_us: dict[str, float | None]
    batch: float | None
    server_cores: float | None

    @classmethod
    def of(cls, load: str, measured: Measurement, server: ServerSide) -> _Row:
        """Both sides of a run."""
        return cls(
            load=load,
            generator=_describe_generator(measured),
            client=measured,
            server_us=server.us,
            batch=server.batch,
            server_cores=server.cores,
        )


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
    from graphkiln.bench import processes as load_processes
    from graphkiln.bench.job import Target
    from graphkiln.cli.bench_inputs import RANDOM, read_feeds, read_samples

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
            watch = ServerWatch(plain, client.url)
            with _progress(name, load.warmup_s + load.seconds):
                measured = load_processes.measure_load(target, feeds, load, watch.start)
            rows.append(_Row.of(name, measured, watch.side(measured.seconds)))
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


@contextmanager
def _progress(load: str, seconds: float) -> Iterator[None]:
    """A bar on a terminal, as long as the block runs."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("load {task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("of {task.total:g} s"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(load, total=seconds)
        yield


def _describe_generator(measured: Measurement) -> _Generator:
    from graphkiln_backend.system.resources import usable_cores

    share = measured.client_cores / usable_cores()
    return _Generator(
        name="graphkiln", processes=measured.processes, cores=measured.client_cores, share_of_machine=share
    )


def _notes(row: _Row) -> Iterator[str]:
    """Warnings about a run."""
    if shortfall := _shortfall(row):
        yield shortfall
    few = [name for name in _PERCENTILES if 0 < row.client.answered * (1 - float(name[1:]) / 100) < _ONE]
    if few:
        reason = f"so few that {', '.join(few)} {'is' if len(few) == 1 else 'are'} the slowest alone"
        yield f"{row.load}: requests answered: {row.client.answered}; {reason}"
    if row.batch is None:
        yield f"{row.load}: the server was started again, or is gone: its own figures are not known"


def _shortfall(row: _Row) -> str:
    """Warn if requests came faster than they were answered; "" if not, or for a closed loop."""
    measured = row.client
    if measured.due - measured.answered - sum(measured.errors.values()) <= max(_LOST * measured.due, _FEW):
        return ""
    return (
        f"{row.load}: {measured.due / measured.seconds:.1f} requests a second were due, and "
        f"{measured.answered / measured.seconds:.1f} answered: the rate was not reached, and the longer it lasts, the "
        "longer the latencies"
    )


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _print_tables(rows: list[_Row], unit: str) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    failed = any(row.client.errors for row in rows)
    unsent = any(row.client.unsent for row in rows)
    errors = Column("errors", overflow="fold")  # not cut short: their names say what went wrong
    extra: list[Column | str] = [*([errors] if failed else []), *(["unsent"] if unsent else [])]
    client = Table(unit, "answered/s", *_PERCENTILES, "cores", *extra, title="client: latencies in ms")
    server = Table(unit, *STAGES.values(), "batch", "cores", title="server: mean times of a request in us")
    for row in rows:
        measured = row.client
        margin = measured.per_second_range[1] - measured.per_second  # below, it ends at 0
        latencies = [f"{measured.latency_ms[name]:.2f}" if measured.latency_ms else "-" for name in _PERCENTILES]
        kinds = "\n".join(f"{count} {name}" for name, count in measured.errors.items()) or "0"
        problems = [*([kinds] if failed else []), *([str(measured.unsent)] if unsent else [])]
        rate = f"{measured.per_second:.1f} \u00b1 {margin:.1f}"
        client.add_row(row.load, rate, *latencies, f"{measured.client_cores:.2f}", *problems)
        stages = [_cell(row.server_us[name], 0) for name in STAGES.values()]
        server.add_row(row.load, *stages, _cell(row.batch, 1), _cell(row.server_cores, 2))
    console = Console()
    console.print(client, server)
    for line in (note for row in rows for note in _notes(row)):
        console.print(line, highlight=False)
    most = max((row.generator for row in rows), key=lambda generator: generator.share_of_machine)
    console.print(
        "\u00b1: 95% of the rate, by ten windows of time; "
        f"sent by {most.name} in {most.processes} process{'es' if most.processes > 1 else ''}, "
        f"which took up to {most.share_of_machine:.0%} of this machine's cores",
        highlight=False,
    )
