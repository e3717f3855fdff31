"""From the command until every model is ready, phase by phase, beside bare sessions that load and answer twice."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from inputs import exported_graph
from measurement import show_progress
from stores import DIGITS, add_model

from graphkiln.story.server import LocalServer, start_server
from graphkiln_backend.server.stubs import process_age_s
from graphkiln_backend.triton.environment import RUN_FOLDER_VARIABLE
from graphkiln_backend.triton.snapshot import read_snapshot

_FORTY = 40
_BARE = """
import json, pathlib, re, sys, time
import numpy, onnxruntime
onnxruntime.disable_telemetry_events()
begun, sessions = time.monotonic(), []
for path in sys.argv[1:]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {
        node.name: numpy.zeros([dim if isinstance(dim, int) else 1 for dim in node.shape], numpy.float32)
        for node in session.get_inputs()
    }
    sessions += [session for _ in range(2) if session.run(None, feeds)]
peak_kb = int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
print(json.dumps([time.monotonic() - begun, peak_kb / 1024]))
"""
"""Sessions with ONNX Runtime's own defaults, one after the other, in a process of their own."""


@dataclass
class _Start:
    """One start: seconds by phase, and the peaks of all processes' memory together in MB."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_mb: float = 0.0


def benchmark_start(rounds: int, _: float) -> list[dict[str, object]]:
    """The seconds of each phase; phases of several models, which load side by side, are added up."""
    starts: defaultdict[str, list[_Start]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        stores = _stores(Path(folder))
        for number in range(rounds):
            for name, (store, graphs) in stores.items():
                show_progress(f"round {number + 1}/{rounds}: {name}")
                starts[f"{name}, bare"].append(_start_bare(graphs))
                with tempfile.TemporaryDirectory() as cache:
                    for state in ("cold", "warm"):
                        starts[f"{name}, {state}"].append(_start(store, Path(cache)))
    show_progress("")
    return _table(stores, starts)


def _stores(folder: Path) -> dict[str, tuple[Path, list[Path]]]:
    """Model stores, and the graphs of each."""
    resnet, mobilenet, vit = map(exported_graph, ("resnet50", "mobilenet_v3_small", "vit_b_16"))
    digit = DIGITS / "1" / "model.onnx"
    graphs = {
        "digits": {"digits": digit},
        "resnet50": {"resnet50": resnet},
        "resnet50 + 2 mobilenets": {"resnet50": resnet, "mobilenet-a": mobilenet, "mobilenet-b": mobilenet},
        "vit_b_16": {"vit": vit},
        "forty": {f"model{number}": (resnet, *[mobilenet] * 4, *[digit] * 5)[number % 10] for number in range(_FORTY)},
    }
    for name, models in graphs.items():
        for model, graph in models.items():
            add_model(folder / name, model, graph)
    return {name: (folder / name, list(models.values())) for name, models in graphs.items()}


def _start_bare(graphs: Sequence[Path]) -> _Start:
    command = [sys.executable, "-c", _BARE, *map(str, graphs)]
    seconds, peak_mb = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=600).stdout)
    return _Start({"ready": seconds}, peak_mb)


def _start(store: Path, cache: Path) -> _Start:
    begun, log = time.time(), cache.with_suffix(".log")
    try:
        with start_server(store, flags=("--cache", str(cache)), log=log) as server:
            ready = time.time()
            return _read(server, begun, ready)
    finally:
        log.unlink(missing_ok=True)


def _read(server: LocalServer, begun: float, ready: float) -> _Start:
    """What the files of the instances and the kernel say of a server that has just become ready."""
    supervisor = psutil.Process(server.pid)
    processes = supervisor.children(recursive=True)
    triton = next(process for process in processes if process.name() == "tritonserver")
    statuses = read_snapshot(Path(triton.environ()[RUN_FOLDER_VARIABLE])).statuses.values()
    triton_begun, begun_of = _begun(triton.pid), {status.pid: _begun(status.pid) for status in statuses}
    loaded = max(begun_of[status.pid] + (status.phases_ms["stub start"] + status.load_ms) / 1e3 for status in statuses)
    seconds = {
        "process start": triton_begun - begun,
        "Triton's core": min(begun_of.values()) - triton_begun,
    }
    for status in statuses:
        for phase, milliseconds in status.phases_ms.items():
            seconds[phase] = seconds.get(phase, 0.0) + milliseconds / 1e3
    return _Start(
        {**seconds, "publication": ready - loaded, "ready": ready - begun}, _peak_mb([supervisor, *processes])
    )


def _begun(pid: int) -> float:
    """When a process was started, in seconds of `time.time`.

    psutil's `create_time` is up to a second too early: it adds to the time of the boot, which Linux tells in whole
    seconds (proc(5), `btime`).
    """
    return time.time() - process_age_s(pid)


def _peak_mb(processes: Sequence[psutil.Process]) -> float:
    """The largest memory that each process has had, added up; pages that they share count for each."""
    return sum(map(_peak_kb, processes)) / 1024


def _peak_kb(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _table(stores: Mapping[str, object], starts: Mapping[str, Sequence[_Start]]) -> list[dict[str, object]]:
    """A row for each phase, a column for each start; the median of all rounds."""
    columns = [f"{name}, {state}" for name in stores for state in ("cold", "warm")]
    phases = list(dict.fromkeys(phase for name in columns for start in starts[name] for phase in start.seconds))
    phases.sort(key=lambda phase: phase in {"publication", "ready"})
    bare = {name: starts[f"{name.rpartition(', ')[0]}, bare"] for name in columns}
    return [
        *(_row(f"{phase} s", columns, partial(_seconds, starts, phase)) for phase in phases),
        _row("bare sessions s", columns, partial(_seconds, bare, "ready")),
        _row("ratio", columns, lambda name: _ratio(starts[name], bare[name])),
        _row("peak MB", columns, lambda name: _median_mb(starts[name])),
        _row("bare sessions, peak MB", columns, lambda name: _median_mb(bare[name])),
    ]


def _row(phase: str, columns: Sequence[str], value: Callable[[str], float]) -> dict[str, object]:
    return {"phase": phase, **{name: value(name) for name in columns}}


def _seconds(starts: Mapping[str, Sequence[_Start]], phase: str, name: str) -> float:
    return round(_median(starts[name], phase), 2)


def _ratio(starts: Sequence[_Start], bare: Sequence[_Start]) -> float:
    return round(_median(starts, "ready") / _median(bare, "ready"), 1)


def _median(starts: Sequence[_Start], phase: str) -> float:
    return statistics.median(start.seconds.get(phase, 0.0) for start in starts)


def _median_mb(starts: Sequence[_Start]) -> float:
    return round(statistics.median(start.peak_mb for start in starts))
