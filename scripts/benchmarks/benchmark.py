"""Benchmarks as ratios of set-ups that take turns, so that a noisy machine slows both sides of a comparison.

    scripts/benchmark peers        JPEG to top-5 beside FastAPI, LitServe, BentoML and Ray Serve,
                                   and Triton's C++ backend (--cpp-backend DIR)
    scripts/benchmark encoded      JPEGs decoded by the server beside those decoded by the client, and FastAPI
    scripts/benchmark serving      served models beside bare sessions, or Triton's C++ backend (--cpp-backend DIR)
    scripts/benchmark client       the client's infer beside raw tritonclient: throughput and p99
    scripts/benchmark edge         requests through HAProxy, plain and with TLS, beside tritonserver's own ports
    scripts/benchmark precision    ten architectures in each precision, and by engine: auto; continues an interrupted
                                   run (--only NAME: measure this one again)
    scripts/benchmark start        from the command until all models are ready, by phase, beside bare sessions
                                   and the C++ backend (--cpp-backend DIR)
    scripts/benchmark memory       one and two instances beside a bare session, and the C++ backend (--cpp-backend DIR)
    scripts/benchmark score        whole data sets: beside their parts alone and Ray Data, memory, plans, faults;
                                   continues an interrupted run (--only int8: measure this part again)
    scripts/benchmark score_commands   graphkiln score as a whole command beside Daft and Ray Data, and its memory
    scripts/benchmark tune         graphkiln tune beside exhaustive and random search and the default; continues an
                                   interrupted run (--only NAME: measure this part again; --budget SECONDS)
    scripts/benchmark all          all of these, one after the other, saved in docs/benchmarks.md
    scripts/benchmark report       write docs/benchmarks.md and the tables of other pages from the saved results

All set-ups take turns, round after round, and the median round counts. The load generator shares the machine's cores
with the server.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import reporting
from client_speed import benchmark_client
from edge_speed import benchmark_edge
from encoded_speed import benchmark_encoded
from memory_use import benchmark_memory
from peers_speed import benchmark_peers
from precision_speed import benchmark_precision
from rich.console import Console
from rich.table import Table
from score_commands import benchmark_commands
from score_speed import benchmark_score
from serving_speed import benchmark_serving
from start_speed import benchmark_start
from tune_quality import benchmark_tune

from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError
from graphkiln_backend.system.resources import usable_cores

_FILE_WIDTH = 160  # columns of a table in a file

BENCHMARKS: dict[str, tuple[Callable[..., list[dict[str, object]]], str]] = {
    "peers": (benchmark_peers, "ResNet-50, JPEG to top-5, 8 callers, ratio to the best peer"),
    "encoded": (benchmark_encoded, "ResNet-50, JPEG to top-5 by who decodes, ratios to FastAPI and to our client"),
    "serving": (benchmark_serving, "servers in turn, ratio to the last one of each set-up; CPU ms of a request"),
    "client": (benchmark_client, "infer, ratio to raw tritonclient at the same concurrency"),
    "edge": (benchmark_edge, "infer through HAProxy, ratio to tritonserver's own ports"),
    "precision": (
        benchmark_precision,
        "engine: auto beside each engine and precision by hand, batches of 8, random weights",
    ),
    "start": (
        benchmark_start,
        "from the command until ready, batches up to 8, ratio to bare sessions that answer twice",
    ),
    "memory": (benchmark_memory, "PSS of all processes, ratio to the C++ backend or else to a bare session"),
    "score": (
        benchmark_score,
        "JPEG to top-5 of ResNet-50, ratio of a scorer to its parts alone, of whole runs to Ray Data",
    ),
    "score_commands": (
        benchmark_commands,
        "whole commands, JPEG to top-5 of ResNet-50, speed and memory as ratios to Daft",
    ),
    "tune": (benchmark_tune, "highest rate within p99, ratio to the best of the same space"),
}


def main() -> None:
    """Run a benchmark and print its table."""
    parser = argparse.ArgumentParser(
        prog="scripts/benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=[*BENCHMARKS, "all", "report"], help="what to measure")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each measurement (default: 3)")
    parser.add_argument(
        "--cpp-backend",
        type=Path,
        metavar="DIR",
        help="for peers, serving, memory and start: holds onnxruntime/libtriton_onnxruntime.so",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="for precision, score, score_commands and tune: measure this part alone, again",
    )
    parser.add_argument(
        "--budget", type=float, default=0.0, metavar="SECONDS", help="for tune: budget of each search of a real model"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", action="store_true", help="save the result in docs/benchmarks and docs/benchmarks.md")
    options = parser.parse_args()
    if mistake := _find_mistake(options):
        parser.error(mistake)
    if options.benchmark == "all":
        _run_all(options)
        return
    if options.benchmark in BENCHMARKS:
        _run(options.benchmark, options)
    if options.save or options.benchmark == "report":
        reporting.write_tables()


def _find_mistake(options: argparse.Namespace) -> str:
    """Describe contradictory options; empty if there are none."""
    name = options.benchmark
    if options.rounds < 1:
        return f"--rounds {options.rounds}: expected at least 1"
    if not 0 < options.seconds < math.inf:
        return f"--seconds {options.seconds:g}: expected more than 0"
    given = {"only": options.only, "budget_s": options.budget, "cpp_backend": options.cpp_backend}
    flags = {"only": "--only", "budget_s": "--budget", "cpp_backend": "--cpp-backend"}
    accepted = ("budget_s", "cpp_backend") if name == "all" else _parameters(name)
    ignored = (flags[key] for key, value in given.items() if value and key not in accepted)
    return next((f"{flag} does not apply to {name}" for flag in ignored), "")


def _parameters(name: str) -> Collection[str]:
    """Parameters of a benchmark; besides `rounds` and `seconds` only the options that apply to it."""
    return inspect.signature(BENCHMARKS[name][0]).parameters if name in BENCHMARKS else ()


def _run_all(options: argparse.Namespace) -> None:
    """Run all benchmarks and save the results of those that succeed.

    Raises:
        SystemExit: A benchmark failed, or Ctrl-C; the message names those without a new result.
    """
    failed: list[str] = []
    left = list(BENCHMARKS)
    try:
        for name in BENCHMARKS:
            try:
                _run(name, options)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - printed; the exit code is 1
                expected = isinstance(error, GraphkilnError | SystemExit)
                print(f"{name}: {error if expected else f'{type(error).__name__}: {error}'}", file=sys.stderr)
                failed.append(name)
            left.remove(name)
    finally:
        reporting.write_tables()
        if left:
            print(f"not measured: {', '.join(left)}", file=sys.stderr)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(name: str, options: argparse.Namespace) -> None:
    benchmark, title = BENCHMARKS[name]
    rounds, seconds = options.rounds, options.seconds
    load = os.getloadavg()[0]
    further = {"only": options.only, "budget_s": options.budget, "cpp_backend": options.cpp_backend}
    accepted = {key: value for key, value in further.items() if key in _parameters(name)}
    rows = benchmark(rounds, seconds, **accepted)
    if not rows:
        raise MeasurementError(f"{name} measured nothing")
    if options.save or options.benchmark == "all":
        command = f"scripts/benchmark {name} --rounds {rounds} --seconds {seconds:g}"
        if accepted.get("cpp_backend"):
            command += " --cpp-backend DIR"
            if name != "peers":  # in the others, graphkiln has the native seat, too
                name, title = f"native_{name}", f"native seat: {title}"
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
        sys.exit(130)  # as shells report SIGINT
    except GraphkilnError as error:
        sys.exit(f"scripts/benchmark: {error}")
