"""Measures, in one run and as ratios, so that a noisy machine slows both sides of every comparison.

    scripts/benchmark serving      the served model beside the bare ONNX Runtime session, same threads
    scripts/benchmark overhead     what the backend adds inside the server
    scripts/benchmark memory       whether memory grows with the number of requests
    scripts/benchmark lowering     ResNet-101 in each precision, beside ONNX Runtime in fp32
    scripts/benchmark load         loading what was lowered: the first time, and from the cache
    scripts/benchmark session      what a session adds to the runtime's own call, what the self-test costs
    scripts/benchmark client       the client's infer beside raw tritonclient: throughput and p99
    scripts/benchmark images       classify_many beside a loop, preprocessing beside torchvision, the import
    scripts/benchmark loading      ten small models, configurations completed by serve beside completed by Triton
    scripts/benchmark start        from the command until all models are ready, by phase, beside bare sessions
    scripts/benchmark story        the acceleration story of ResNet-101 (weights: scripts/train-story)
    scripts/benchmark peers        JPEG to top-5 beside FastAPI, LitServe, BentoML, MLServer, PyTriton and Ray Serve
    scripts/benchmark all          all of these, one after the other, into docs/benchmarks.md
    scripts/benchmark report       writes docs/benchmarks.md and the README's tables again from what is kept

All set-ups take turns, round after round, and the median round counts. The load generator shares the machine's cores
with the server.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import reporting
from client_speed import benchmark_client, benchmark_images
from lowering_speed import benchmark_lowered_load, benchmark_lowering, benchmark_session
from peers_speed import benchmark_peers
from rich.console import Console
from rich.table import Table
from server_speed import benchmark_loading, benchmark_memory, benchmark_overhead, benchmark_serving
from start_speed import benchmark_start
from story_speed import benchmark_story

from graphkiln_backend.engines.cores import usable_cores

_FILE_WIDTH = 160
"""Columns of a table that goes to a file."""

BENCHMARKS = {
    "lowering": (benchmark_lowering, "threads = cores, ratio to ONNX Runtime in fp32 of the same batch"),
    "load": (benchmark_lowered_load, "seconds to load, ratio of the first to the cached load"),
    "session": (benchmark_session, "one image a run, ratio of our session to the runtime's own call"),
    "serving": (benchmark_serving, "batch 1 a request, ratio to the bare session of the same threads"),
    "overhead": (benchmark_overhead, "what the backend adds to a bare run, inside the server"),
    "client": (benchmark_client, "infer, ratio to raw tritonclient at the same concurrency"),
    "images": (benchmark_images, "ratio: how often faster than the reference"),
    "memory": (benchmark_memory, "memory of tritonserver and its stubs, ratio to the first row"),
    "loading": (benchmark_loading, "from the command until every model is ready, ratio to Triton's completion"),
    "start": (
        benchmark_start,
        "from the command until ready, batches up to 8, ratio to bare sessions that answer twice",
    ),
    "story": (benchmark_story, "ResNet-101 from eager PyTorch to a served graph, each step proven"),
    "peers": (benchmark_peers, "ResNet-50, JPEG to top-5, 8 callers, ratio to the best peer"),
}


def main() -> None:
    """Runs a benchmark and prints its table."""
    parser = argparse.ArgumentParser(
        prog="scripts/benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=[*BENCHMARKS, "all", "report"], help="what to measure")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each measurement (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", action="store_true", help="keep the result in docs/benchmarks and docs/benchmarks.md")
    options = parser.parse_args()
    for name in BENCHMARKS if options.benchmark == "all" else [options.benchmark]:
        if name != "report":
            _run(name, options)
    if options.save or options.benchmark in ("all", "report"):
        reporting.write_tables()


def _run(name: str, options: argparse.Namespace) -> None:
    benchmark, title = BENCHMARKS[name]
    rows = benchmark(options.rounds, options.seconds)
    if options.save or options.benchmark == "all":
        command = f"scripts/benchmark {name} --rounds {options.rounds} --seconds {options.seconds:g}"
        reporting.save_result(name, title, command, rows)
    if options.json:
        print(json.dumps({"cores": usable_cores(), "load_average": os.getloadavg(), "rows": rows}, indent=2))
        return
    table = Table(title=f"{usable_cores()} cores, {title}")
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("model", "set-up", "phase") else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)


if __name__ == "__main__":
    main()
