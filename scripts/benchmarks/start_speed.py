"""From the command until every model is ready, phase by phase.

Compared with bare sessions that load and run twice, and with Triton's own C++ onnxruntime backend if given.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from inputs import DIGITS, LARGEST_BATCH, add_model, exported_graph
from measurement import show_progress
from servers import check_backend, start_cpp_server

from graphkiln.story.server import LocalServer, start_server
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.repository.config import BACKEND, DROP_IN_BACKEND
from graphkiln_backend.server.watchdog import process_age_s
from graphkiln_backend.triton.environment import RUN_FOLDER_VARIABLE
from graphkiln_backend.triton.snapshot import read_snapshot
from graphkiln_client import Client

# What the first request of each batch size costs beside later ones, of a server that has just become ready.

_LATER = 5  # further requests of each size: their median is what the first one is compared with


def first_requests(url: str, model: str, largest: int) -> dict[int, float]:
    """Measure the first request of each batch size relative to the median of later ones.

    The first requests of all sizes come before the later ones.

    Raises:
        ClientError: A request failed.
    """
    with Client(url, timeout_s=120) as client:
        served = client.model(model)
        inputs = served.metadata["inputs"]
        with suppress(ClientError):  # refused by Triton: what this client does for the first time is not measured
            served.infer(feeds_of(inputs, largest + 1))
        sends = {size: served.repeatable(feeds_of(inputs, size)) for size in range(1, largest + 1)}
        first = {size: _request_s(send) for size, send in sends.items()}
        later = {size: [_request_s(send) for _ in range(_LATER)] for size, send in sends.items()}
    return {size: ratio_to_later(first[size], later[size]) for size in sends}


def feeds_of(inputs: Sequence[Mapping[str, Any]], size: int) -> dict[str, AnyArray]:
    """Make a request of zeros.

    Args:
        inputs: Inputs of the model's metadata: `name`, `datatype`, `shape`.
        size: Size of the first dimension; other dynamic dimensions are 1.
    """
    return {
        each["name"]: np.zeros([size, *(max(dim, 1) for dim in each["shape"][1:])], DType(each["datatype"]).numpy)
        for each in inputs
    }


def ratio_to_later(first_s: float, later_s: Sequence[float]) -> float:
    """Ratio of the first one to the median of the later ones."""
    return first_s / statistics.median(later_s)


def _request_s(send: Callable[[], object]) -> float:
    begun = time.perf_counter()
    send()
    return time.perf_counter() - begun


_FORTY = 40
# Sessions with ONNX Runtime's own defaults, one after the other, in a process of their own.
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


CPP = "C++ backend"
_BARE_STATE = "bare sessions"
_STATES = ("cold", "warm")
_FIRST = "worst first request of a batch size, ratio to later ones"


@dataclass
class _Start:
    """One start.

    Attributes:
        seconds: Seconds by phase.
        peak_mb: Sum of the memory peaks of all processes.
        first: The first request of a batch size over the median of later ones, by model and size.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    peak_mb: float = 0.0
    first: dict[tuple[str, int], float] = field(default_factory=dict)


_Run = Callable[[], Iterator[tuple[str, _Start]]]  # starts a subject in one or more named states


@dataclass(frozen=True)
class _Subject:
    """Models that are started together: graphs by name."""

    name: str
    graphs: Mapping[str, Path]

    def store(self, folder: Path, backend: str) -> Path:
        """A new model store of them, for one backend."""
        store = folder / backend / self.name
        for model, graph in self.graphs.items():
            add_model(store, model, graph, backend=backend)
        return store


def benchmark_start(rounds: int, _: float, cpp_backend: Path | None) -> list[dict[str, object]]:
    """The seconds of each phase; phases of several models, which load side by side, are added up.

    Args:
        rounds: How often each is started; the set-ups take turns.
        cpp_backend: A backend directory with Triton's C++ onnxruntime backend, or None for no such row.
    """
    starts: defaultdict[str, list[_Start]] = defaultdict(list)
    subjects = _subjects()
    with tempfile.TemporaryDirectory() as folder:
        runs = [(each.name, run) for each in subjects for run in _runs(each, Path(folder), cpp_backend)]
        for number in range(rounds):
            for name, run in runs:
                show_progress(f"round {number + 1}/{rounds}: {name}")
                for state, start in run():
                    starts[f"{name}, {state}"].append(start)
    show_progress("")
    return _table([subject.name for subject in subjects], starts)


def _subjects() -> list[_Subject]:
    resnet, mobilenet, vit = map(exported_graph, ("resnet50", "mobilenet_v3_small", "vit_b_16"))
    digit = DIGITS / "1" / "model.onnx"
    forty = {f"model{number}": (resnet, *[mobilenet] * 4, *[digit] * 5)[number % 10] for number in range(_FORTY)}
    return [
        _Subject("digits", {"digits": digit}),
        _Subject("resnet50", {"resnet50": resnet}),
        _Subject("resnet50 + 2 mobilenets", {"resnet50": resnet, "mobilenet-a": mobilenet, "mobilenet-b": mobilenet}),
        _Subject("vit_b_16", {"vit": vit}),
        _Subject("forty", forty),
    ]


def _runs(subject: _Subject, folder: Path, cpp_backend: Path | None) -> Iterator[_Run]:
    asked = tuple({graph: model for model, graph in subject.graphs.items()}.values())  # one model of each graph
    yield partial(_start_bare, list(subject.graphs.values()))
    if cpp_backend:
        backends, store = check_backend(cpp_backend), subject.store(folder, DROP_IN_BACKEND)
        yield partial(_start_cpp, backends, store, asked)
    yield partial(_start_twice, subject.store(folder, BACKEND), asked)


def _start_bare(graphs: Sequence[Path]) -> Iterator[tuple[str, _Start]]:
    command = [sys.executable, "-c", _BARE, *map(str, graphs)]
    seconds, peak_mb = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=600).stdout)
    yield _BARE_STATE, _Start({"ready": seconds}, peak_mb)


def _start_cpp(backends: Path, store: Path, asked: Sequence[str]) -> Iterator[tuple[str, _Start]]:
    begun = time.time()
    with start_cpp_server(backends, store) as server:
        start = _Start({"ready": time.time() - begun}, _peak_mb([psutil.Process(server.pid)]))
        yield CPP, _with_first_requests(start, server, asked)


def _start_twice(store: Path, asked: Sequence[str]) -> Iterator[tuple[str, _Start]]:
    with tempfile.TemporaryDirectory() as cache:
        for state in _STATES:
            yield state, _start(store, asked, Path(cache))


def _start(store: Path, asked: Sequence[str], cache: Path) -> _Start:
    begun, log = time.time(), cache.with_suffix(".log")
    try:
        with start_server(store, flags=("--cache", str(cache)), log=log) as server:
            return _with_first_requests(_read(server, begun, ready=time.time()), server, asked)
    finally:
        log.unlink(missing_ok=True)


def _with_first_requests(start: _Start, server: LocalServer, asked: Sequence[str]) -> _Start:
    ratios = ((model, first_requests(server.grpc_url, model, LARGEST_BATCH)) for model in asked)
    return replace(start, first={(model, size): ratio for model, sizes in ratios for size, ratio in sizes.items()})


def _read(server: LocalServer, begun: float, *, ready: float) -> _Start:
    """Read phases and memory of a server that has just become ready."""
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
    """Start of a process, in seconds of `time.time`.

    psutil's `create_time` is up to a second too early: it adds to the time of the boot, which Linux reports in whole
    seconds (proc(5), `btime`).
    """
    return time.time() - process_age_s(pid)


def _peak_mb(processes: Sequence[psutil.Process]) -> float:
    """The largest memory that each process has had, added up; pages that they share count for each."""
    return sum(map(_peak_kb, processes)) / 1024


def _peak_kb(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _table(names: Sequence[str], starts: Mapping[str, Sequence[_Start]]) -> list[dict[str, object]]:
    """A row for each phase, a column for each start; the median of all rounds."""
    columns = [f"{name}, {state}" for name in names for state in _STATES]
    phases = list(dict.fromkeys(phase for name in columns for start in starts[name] for phase in start.seconds))
    phases.sort(key=lambda phase: phase in {"publication", "ready"})
    return [
        *(_row(f"{phase} s", columns, partial(_seconds, starts, phase)) for phase in phases),
        _row("peak MB", columns, lambda name: _median_mb(starts[name])),
        _row(_FIRST, columns, partial(_median_first, starts)),
        *(row for peer in (_BARE_STATE, CPP) for row in _peer_rows(peer, columns, starts)),
    ]


def _peer_rows(
    peer: str, columns: Sequence[str], starts: Mapping[str, Sequence[_Start]]
) -> Iterator[dict[str, object]]:
    """Rows of a peer with the same models, and ratios to it; none if it was not measured."""
    theirs = {name: starts.get(f"{name.rpartition(', ')[0]}, {peer}", ()) for name in columns}
    if all(theirs.values()):
        yield _row(f"{peer} s", columns, partial(_seconds, theirs, "ready"))
        yield _row(
            "ratio" if peer == _BARE_STATE else f"ratio to {peer}",
            columns,
            lambda name: _ratio(starts[name], theirs[name]),
        )
        yield _row(f"{peer}, peak MB", columns, lambda name: _median_mb(theirs[name]))
        if all(start.first for each in theirs.values() for start in each):
            yield _row(f"{peer}, {_FIRST}", columns, partial(_median_first, theirs))


def _row(phase: str, columns: Sequence[str], value: Callable[[str], float]) -> dict[str, object]:
    return {"phase": phase, **{name: value(name) for name in columns}}


def _seconds(starts: Mapping[str, Sequence[_Start]], phase: str, name: str) -> float:
    return round(_median(starts[name], phase), 2)


def _ratio(starts: Sequence[_Start], bare: Sequence[_Start]) -> float:
    return round(_median(starts, "ready") / _median(bare, "ready"), 2)


def _median(starts: Sequence[_Start], phase: str) -> float:
    return statistics.median(start.seconds.get(phase, 0.0) for start in starts)


def _median_first(starts: Mapping[str, Sequence[_Start]], name: str) -> float:
    """Largest ratio; the median of the rounds for each model and size, since any one request may be held up."""
    asked = starts[name][0].first
    return round(max(statistics.median(start.first[key] for start in starts[name]) for key in asked), 2)


def _median_mb(starts: Sequence[_Start]) -> float:
    return round(statistics.median(start.peak_mb for start in starts))
