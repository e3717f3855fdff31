"""Measures, in one run and as ratios, so that a noisy machine slows both sides of every comparison.

    scripts/benchmark serving      the served model beside the bare ONNX Runtime session, same threads
    scripts/benchmark overhead     what the backend adds inside the server
    scripts/benchmark light        light models over HTTP and gRPC, beside Triton's C++ backend (--cpp-backend DIR)
    scripts/benchmark memory       one and two instances beside a bare session, and the C++ backend (--cpp-backend DIR)
    scripts/benchmark bench        what graphkiln bench measures, beside perf_analyzer where it is on PATH
    scripts/benchmark growth       whether memory grows with the number of requests
    scripts/benchmark lowering     ResNet-101 in each precision, beside ONNX Runtime in fp32
    scripts/benchmark precision    ten architectures in each precision, and what engine: auto makes of them; goes on
                                   where it was interrupted (--only NAME: this one, again)
    scripts/benchmark load         loading what was lowered: the first time, and from the cache
    scripts/benchmark session      what a session adds to the runtime's own call, what the self-test costs
    scripts/benchmark client       the client's infer beside raw tritonclient: throughput and p99
    scripts/benchmark images       classify_many beside a loop, preprocessing beside torchvision, the import
    scripts/benchmark loading      ten small models, configurations completed by serve beside completed by Triton
    scripts/benchmark start        from the command until all models are ready, by phase, beside bare sessions
    scripts/benchmark container    from a container's start until it is ready, with and without a kept cache
    scripts/benchmark queue        what waits and how busy instances are, at shares of the highest rate
    scripts/benchmark story        the acceleration story of ResNet-101 (weights: scripts/train-story)
    scripts/benchmark peers        JPEG to top-5 beside FastAPI, LitServe, BentoML, MLServer, PyTriton and Ray Serve
    scripts/benchmark sums         what a sum of two shards takes in the process, beside gloo between two processes
    scripts/benchmark parallel     one model over two groups of cores: copies, stages, shards; what sums take; goes on
                                   where it was interrupted (--only NAME: this one, again)
    scripts/benchmark models       OneFlow's library of models, whole and split (--only NAME: this one, again)
    scripts/benchmark devices      the same on paper for two to eight GPUs, from counted costs and link speeds
    scripts/benchmark encoded      JPEG to top-5 decoded by the server, by our client, by FastAPI; decoders alone
    scripts/benchmark scenes       the trained examples of tasks: how good, how long their training takes, how large
    scripts/benchmark score        whole data sets: beside what they cannot be faster than and Ray Data; memory; plans;
                                   faults; goes on where it was interrupted (--only int8: this part, again)
    scripts/benchmark tune         what graphkiln tune finds, beside exhaustive and random search and the default;
                                   goes on where it was interrupted (--only NAME: this part, again; --budget SECONDS)
    scripts/benchmark kills        graphkiln tune, killed ten times at random moments and gone on with, a seed a round
    scripts/benchmark all          all of these, one after the other, into docs/benchmarks.md
    scripts/benchmark compare OLD NEW   what became slower between two results, or two folders of them
    scripts/benchmark report       writes docs/benchmarks.md and the tables of other pages again from what is kept

All set-ups take turns, round after round, and the median round counts. The load generator shares the machine's cores
with the server.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import reporting
from bench_speed import benchmark_bench
from client_speed import benchmark_client, benchmark_images
from comparing import compare, format_changes
from container_start import benchmark_container
from encoded_speed import benchmark_encoded
from library_split import benchmark_models
from light_speed import benchmark_light
from lowering_speed import benchmark_lowered_load, benchmark_lowering, benchmark_session
from memory_use import benchmark_memory
from parallel_paper import benchmark_devices
from parallel_speed import benchmark_parallel
from peers_speed import benchmark_peers
from precision_speed import benchmark_precision
from queue_speed import benchmark_queue
from rich.console import Console
from rich.table import Table
from scene_quality import benchmark_scenes
from score_speed import benchmark_score
from server_speed import benchmark_growth, benchmark_loading, benchmark_overhead, benchmark_serving
from start_speed import benchmark_start
from story_speed import benchmark_story
from transport_speed import benchmark_sums
from tune_kills import benchmark_kills
from tune_quality import benchmark_tune

from graphkiln_backend.graph.errors import GraphkilnError, ManifestError, MeasurementError
from graphkiln_backend.system.resources import usable_cores

_FILE_WIDTH = 160
"""Columns of a table that goes to a file."""

BENCHMARKS: dict[str, tuple[Callable[..., list[dict[str, object]]], str]] = {
    "lowering": (benchmark_lowering, "threads = cores, ratio to ONNX Runtime in fp32 of the same batch"),
    "precision": (
        benchmark_precision,
        "engine: auto beside each engine and precision by hand, batches of 8, random weights",
    ),
    "load": (benchmark_lowered_load, "seconds to load, ratio of the first to the cached load"),
    "session": (benchmark_session, "one image a run, ratio of our session to the runtime's own call"),
    "serving": (benchmark_serving, "batch 1 a request, ratio to the bare session of the same threads"),
    "overhead": (benchmark_overhead, "what the backend adds to a bare run, inside the server"),
    "light": (benchmark_light, "servers in turn, ratio to the last one of each set-up; CPU ms of a request"),
    "client": (benchmark_client, "infer, ratio to raw tritonclient at the same concurrency"),
    "images": (benchmark_images, "ratio: how often faster than the reference"),
    "bench": (benchmark_bench, "median latency, ratio to what perf_analyzer measures"),
    "memory": (benchmark_memory, "PSS of all processes, ratio to the C++ backend or else to a bare session"),
    "growth": (benchmark_growth, "memory of tritonserver and its stubs, ratio to the first row"),
    "loading": (benchmark_loading, "from the command until every model is ready, ratio to Triton's completion"),
    "start": (
        benchmark_start,
        "from the command until ready, batches up to 8, ratio to bare sessions that answer twice",
    ),
    "container": (benchmark_container, "from a container's start until ready, ratio to the start without a cache"),
    "queue": (benchmark_queue, "open loop at shares of the highest rate, ratio of p99 to that of the smallest share"),
    "story": (benchmark_story, "ResNet-101 from eager PyTorch to a served graph, each step proven"),
    "score": (
        benchmark_score,
        "JPEG to top-5 of ResNet-50, ratio of a scorer to its parts alone, of whole runs to Ray Data",
    ),
    "scenes": (benchmark_scenes, "trained examples of tasks, measured on digits that training has not seen"),
    "tune": (benchmark_tune, "highest rate within p99, ratio to the best of the same space"),
    "kills": (benchmark_kills, "graphkiln tune with the digits model, killed with SIGKILL and started again"),
    "encoded": (
        benchmark_encoded,
        "JPEG to top-5, random weights, ratio to our client that decodes, the same cores in total",
    ),
    "parallel": (
        benchmark_parallel,
        "two groups of one core: batches behind each other, ratio to two copies; one row alone, ratio to one core",
    ),
    "sums": (benchmark_sums, "two shards that compute nothing, ratio of sums in the process to gloo of two processes"),
    "models": (
        benchmark_models,
        "OneFlow's library of models, small: converted, proven, whole and split in two",
    ),
    "devices": (benchmark_devices, "on paper: two to eight GPUs from counted costs and data sheets, batches of 32"),
    "peers": (benchmark_peers, "ResNet-50, JPEG to top-5, 8 callers, ratio to the best peer"),
}

ONLY = ("precision", "score", "tune", "parallel", "models")
"""Benchmarks of which a part can be measured."""
USUAL: tuple[int, float] = (5, 3.0)
"""Rounds and seconds of a measurement, where nobody says."""
_OWN_USUAL: dict[str, tuple[int, float]] = {"parallel": (2, 1.0)}
"""Of benchmarks whose single requests take seconds."""
WITH_BUDGET = ("tune",)
"""Benchmarks whose searches last as long as somebody says."""
BESIDE_CPP = ("light", "memory", "start")
"""Benchmarks that also measure Triton's C++ backend, where it is given."""


def main() -> None:
    """Runs a benchmark and prints its table."""
    parser = argparse.ArgumentParser(
        prog="scripts/benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=[*BENCHMARKS, "all", "compare", "report"], help="what to measure")
    parser.add_argument("results", nargs="*", type=Path, help="for compare: two JSON files, or two folders of them")
    parser.add_argument("--rounds", type=int, help="rounds that count (default: 5; parallel: 2)")
    parser.add_argument("--seconds", type=float, help="seconds of each measurement (default: 3; parallel: 1)")
    parser.add_argument(
        "--cpp-backend",
        type=Path,
        metavar="DIR",
        help="for light, memory and start: holds onnxruntime/libtriton_onnxruntime.so",
    )
    parser.add_argument(
        "--only", default="", metavar="NAME", help=f"for {', '.join(ONLY)}: measure this part alone, again"
    )
    parser.add_argument(
        "--budget", type=float, default=0.0, metavar="SECONDS", help="for tune: of each search of a real model"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", action="store_true", help="keep the result in docs/benchmarks and docs/benchmarks.md")
    options = parser.parse_args()
    if mistake := _find_mistake(options):
        parser.error(mistake)
    if options.benchmark == "compare":
        try:
            sys.exit(_compare(*options.results, as_json=options.json))
        except ManifestError as error:
            parser.error(str(error))
    if options.benchmark == "all":
        _run_all(options)
        return
    if options.benchmark in BENCHMARKS:
        _run(options.benchmark, options)
    if options.save or options.benchmark == "report":
        reporting.write_tables()


def _find_mistake(options: argparse.Namespace) -> str:
    """What contradicts itself in a command line; empty where nothing does."""
    name = options.benchmark
    if len(options.results) != (2 if name == "compare" else 0):
        return "compare takes two results; nothing else takes any"
    if options.rounds is not None and options.rounds < 1:
        return f"--rounds {options.rounds}: expected at least 1"
    if options.seconds is not None and not 0 < options.seconds < math.inf:
        return f"--seconds {options.seconds:g}: expected more than 0"
    given = {"--only": (options.only, ONLY), "--budget": (options.budget, (*WITH_BUDGET, "all"))}
    given["--cpp-backend"] = (options.cpp_backend, (*BESIDE_CPP, "all"))
    unheeded = (option for option, (value, takers) in given.items() if value and name not in takers)
    return next((f"{option} says nothing to {name}" for option in unheeded), "")


def _run_all(options: argparse.Namespace) -> None:
    """What the others measured in hours is kept, and in the tables, whatever fails or stops it.

    Raises:
        SystemExit: One failed, or it was stopped with Ctrl-C; the message names what has no new result.
    """
    failed: list[str] = []
    left = list(BENCHMARKS)
    try:
        for name in BENCHMARKS:
            if not _succeeds(name, options):
                failed.append(name)
            left.remove(name)
    finally:
        reporting.write_tables()
        if left:
            print(f"not measured: {', '.join(left)}", file=sys.stderr)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _succeeds(name: str, options: argparse.Namespace) -> bool:
    """Runs one; why it fails is told."""
    try:
        _run(name, options)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is told, and the exit code is 1
        print(f"{name}: {_told(error)}", file=sys.stderr)
        return False
    return True


def _told(error: BaseException) -> str:
    """An error as a line; one that nobody foresaw says little without its kind."""
    foreseen = isinstance(error, GraphkilnError | SystemExit)
    return str(error) if foreseen else f"{type(error).__name__}: {error}"


def _compare(old: Path, new: Path, *, as_json: bool) -> int:
    """The exit code: 1 for a regression, 2 where nothing could be judged."""
    found = compare(old, new)
    rows = format_changes(found.changes)
    for note in found.notes:
        print(note, file=sys.stderr)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table("ratios to a peer of the same run; noise from the rounds' spread", rows)
        print(found.summary)
    return found.exit_code


def _run(name: str, options: argparse.Namespace) -> None:
    benchmark, title = BENCHMARKS[name]
    usual_rounds, usual_seconds = _OWN_USUAL.get(name, USUAL)
    rounds = usual_rounds if options.rounds is None else options.rounds
    seconds = usual_seconds if options.seconds is None else options.seconds
    load = os.getloadavg()[0]
    peers = [options.cpp_backend] if name in BESIDE_CPP else []
    only = [options.only] if name in ONLY else []
    budget = [options.budget] if name in WITH_BUDGET else []
    rows = benchmark(rounds, seconds, *peers, *only, *budget)
    if not rows:
        raise MeasurementError(f"{name} measured nothing")
    if options.save or options.benchmark == "all":
        command = f"scripts/benchmark {name} --rounds {rounds} --seconds {seconds:g}"
        reporting.save_result(name, title, command, rows, load)
    if options.json:
        print(json.dumps({"cores": usable_cores(), "load_average": os.getloadavg(), "rows": rows}, indent=2))
        return
    _print_table(f"{usable_cores()} cores, {title}", rows)


def _print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    table = Table(title=title)
    for column in rows[0] if rows else ():
        table.add_column(column, justify="left" if column in ("row", "model", "set-up", "phase") else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # as shells say it of SIGINT
    except GraphkilnError as error:
        sys.exit(f"scripts/benchmark: {error}")
