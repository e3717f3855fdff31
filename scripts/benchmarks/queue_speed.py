"""How long the queue is at which load, and how busy the instances: what an autoscaler can aim at.

Requests come at random moments (an open loop), at shares of the highest rate that callers reach who wait for responses.
What waits and what computes is what the autoscalers of deploy/ read: queue time per second (Little's law), and
the share of the instances that compute.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from light_speed import Variant, variant_store
from measurement import show_progress

from graphkiln.story.server import start_server

_SHARES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_CALLERS = "8"
_WARM_S = 2
_VARIANTS = (
    Variant(name="mobilenet-1x2", architecture="mobilenet_v3_small", instances=1, threads=2, concurrencies=()),
    Variant(name="mobilenet-2x1", architecture="mobilenet_v3_small", instances=2, threads=1, concurrencies=()),
    Variant(name="resnet50-1x2", architecture="resnet50", instances=1, threads=2, concurrencies=()),
)


@dataclass(frozen=True, kw_only=True)
class Queue:
    """One measurement.

    Attributes:
        per_second: Responses per second.
        waiting: Requests that wait, on average.
        busy: Share of the instances that compute, on average.
        batch: Mean size of the batches.
        p50_ms: Median latency.
        p99_ms: 99th percentile of the latencies.
        failed: Requests that failed, or that nobody was free to send.
    """

    per_second: float
    waiting: float
    busy: float
    batch: float
    p50_ms: float
    p99_ms: float
    failed: int


def benchmark_queue(rounds: int, seconds: float) -> list[dict[str, object]]:
    """A row for each variant and share; the shares take turns.

    Args:
        rounds: That count.
        seconds: Of each measurement; at random moments there should be some hundred requests in it.
    """
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for variant in _VARIANTS:
            store = variant_store(Path(folder) / variant.name, [variant], ours=True)
            with start_server(store) as server:
                found = _measure_shares(server.http_url, variant, rounds, seconds)
            rows += rows_of(variant.name, found)
    return rows


def _measure_shares(url: str, variant: Variant, rounds: int, seconds: float) -> dict[float, list[Queue]]:
    found: defaultdict[float, list[Queue]] = defaultdict(list)
    for number in range(rounds):
        highest = _bench(url, variant, seconds, "--concurrency", _CALLERS).per_second
        for share in _SHARES:
            show_progress(f"{variant.name}, round {number + 1}/{rounds}: {share:.0%} of {highest:.0f} requests/s")
            found[share].append(_bench(url, variant, seconds, "--rate", f"{share * highest:.2f}"))
    show_progress("")
    return dict(found)


def _bench(url: str, variant: Variant, seconds: float, *load: str) -> Queue:
    command = [sys.executable, "-m", "graphkiln.cli", "bench", "--model", variant.name, "--url", url, *load]
    times = ("--duration", str(seconds), "--warmup", str(_WARM_S), "--json")
    done = subprocess.run([*command, *times], capture_output=True, text=True, check=False, timeout=600)
    if not done.stdout:  # requests that failed are part of what it measured
        sys.exit(f"{' '.join(command[2:])} ended with code {done.returncode}: {done.stderr}")
    return read_queue(json.loads(done.stdout)[0], variant.instances)


def read_queue(told: Mapping[str, Any], instances: int) -> Queue:
    """What `graphkiln bench --json` says of one run, of a model with so many instances."""
    client, server_us = told["client"], told["server_us"]
    per_second, batch = client["per_second"], told["batch"]
    return Queue(
        per_second=per_second,
        waiting=per_second * server_us["queue"] / 1e6,
        busy=per_second * server_us["infer"] / 1e6 / max(batch, 1.0) / instances,
        batch=batch,
        p50_ms=client["latency_ms"]["p50"],
        p99_ms=client["latency_ms"]["p99"],
        failed=sum(client["errors"].values()) + client["unsent"],
    )


def rows_of(model: str, found: Mapping[float, Sequence[Queue]]) -> list[dict[str, object]]:
    """The table's rows: medians of the rounds, all that failed, and p99 as a ratio to that of the smallest share."""
    least = statistics.median(each.p99_ms for each in found[min(found)])
    return [_row(model, share, found[share], least) for share in sorted(found)]


def _row(model: str, share: float, measured: Sequence[Queue], least_p99_ms: float) -> dict[str, object]:
    def median(name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in measured))

    return {
        "model": model,
        "set-up": f"{share:.0%} of the highest rate",
        "requests/s": round(median("per_second"), 1),
        "waiting": round(median("waiting"), 3),
        "busy": round(median("busy"), 2),
        "batch": round(median("batch"), 2),
        "p50 ms": round(median("p50_ms"), 1),
        "p99 ms": round(median("p99_ms"), 1),
        "failed": sum(each.failed for each in measured),
        "ratio": round(median("p99_ms") / least_p99_ms, 2),
    }
