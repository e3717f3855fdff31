"""Time from the command until every model is ready, by phase, and the first requests after it.

Compared with bare sessions that load and run twice, and with Triton's own C++ onnxruntime backend if given.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from inputs import DIGITS, LARGEST_BATCH, add_model, exported_graph
from measurement import take_turns
from servers import check_backend, native_flags, start_cpp_server

from graphkiln.story.server import start_server
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.repository.config import BACKEND, DROP_IN_BACKEND
from graphkiln_backend.system.processes import process_age_s
from graphkiln_backend.triton.environment import RUN_FOLDER_VARIABLE
from graphkiln_backend.triton.snapshot import read_snapshot
from graphkiln_client import Client

CPP, BARE = "C++ backend", "bare sessions"
_ANNOUNCED = "serving HTTP"  # in the log, once every version is proven
_PROVEN = "ready and proven"
_COLD, _WARM = "cold", "warm"  # without and with artifacts in the cache
_FIRST = "worst first request of a batch size, ratio to later ones"
_LATER = 5  # later requests of each batch size
# Sessions with ONNX Runtime's own defaults, one after the other.
_BARE_PROGRAM = """
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


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start.

    Attributes:
        seconds: Seconds by phase; those of models that load side by side are added up.
        peak_mb: Sum of the memory peaks of all processes; shared pages count for each.
        first: The first request of a batch size over the median of later ones, by model and size.
    """

    seconds: Mapping[str, float]
    peak_mb: float
    first: Mapping[tuple[str, int], float] = field(default_factory=dict)


def benchmark_start(rounds: int, seconds: float, cpp_backend: Path | None) -> list[dict[str, object]]:
    """Start each subject in each way, in turn.

    Args:
        rounds: Number of starts of each.
        seconds: Not used.
        cpp_backend: A backend directory with Triton's C++ onnxruntime backend, or None.
    """
    resnet, mobilenet, vit = map(exported_graph, ("resnet50", "mobilenet_v3_small", "vit_b_16"))
    digit = DIGITS / "1" / "model.onnx"
    subjects = {
        "digits": {"digits": digit},
        "resnet50": {"resnet50": resnet},
        "resnet50 + 2 mobilenets": {"resnet50": resnet, "mobilenet-a": mobilenet, "mobilenet-b": mobilenet},
        "vit_b_16": {"vit": vit},
        "forty": {f"model{number}": (resnet, *[mobilenet] * 4, *[digit] * 5)[number % 10] for number in range(40)},
    }
    native = native_flags(cpp_backend)
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Callable[[float], Start]] = {}
        for name, graphs in subjects.items():
            asked = tuple({graph: model for model, graph in graphs.items()}.values())  # one model of each graph
            runs[f"{name}, {BARE}"] = partial(_start_bare, list(graphs.values()))
            if cpp_backend:
                store = _write_store(Path(folder) / "cpp" / name, graphs, DROP_IN_BACKEND)
                runs[f"{name}, {CPP}"] = partial(_start_cpp, check_backend(cpp_backend), store, asked)
            store, cache = _write_store(Path(folder) / "ours" / name, graphs, BACKEND), Path(folder) / f"{name} cache"
            runs[f"{name}, {_COLD}"] = partial(_start_ours, store, cache, asked, native, is_cold=True)
            runs[f"{name}, {_WARM}"] = partial(_start_ours, store, cache, asked, native, is_cold=False)
        starts = take_turns("", runs, rounds, seconds, warm_up=False)
    return rows_of(list(subjects), starts)


def _write_store(store: Path, graphs: Mapping[str, Path], backend: str) -> Path:
    for model, graph in graphs.items():
        add_model(store, model, graph, backend=backend, golden=backend == BACKEND)
    return store


def _start_bare(graphs: Sequence[Path], _: float) -> Start:
    command = [sys.executable, "-c", _BARE_PROGRAM, *map(str, graphs)]
    seconds, peak_mb = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=600).stdout)
    return Start(seconds={"ready": seconds}, peak_mb=peak_mb)


def _start_cpp(backends: Path, store: Path, asked: Sequence[str], _: float) -> Start:
    begun = time.time()
    with start_cpp_server(backends, store) as server:
        seconds, peak_mb = {"ready": time.time() - begun}, _peak_mb([psutil.Process(server.pid)])
        return Start(seconds=seconds, peak_mb=peak_mb, first=_first_requests(server.grpc_url, asked))


def _start_ours(
    store: Path, cache: Path, asked: Sequence[str], native: tuple[str, ...], _: float, *, is_cold: bool
) -> Start:
    if is_cold:
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(mode=0o700)
    begun = time.time()
    log = cache.with_suffix(".log")
    with start_server(store, flags=("--cache", str(cache), *native), log=log) as server:
        ready = time.time()
        while _ANNOUNCED not in log.read_text():  # golden samples of the native seat are asked meanwhile
            time.sleep(0.005)
        announced = time.time()
        supervisor = psutil.Process(server.pid)
        processes = supervisor.children(recursive=True)
        seconds = {**_read_phases(processes, begun, ready), _PROVEN: announced - begun}
        peak_mb = _peak_mb([supervisor, *processes])
        return Start(seconds=seconds, peak_mb=peak_mb, first=_first_requests(server.grpc_url, asked))


def _read_phases(processes: Sequence[psutil.Process], begun: float, ready: float) -> dict[str, float]:
    """Seconds of the phases of a server that has just become ready."""
    triton = next(process for process in processes if process.name() == "tritonserver")
    statuses = read_snapshot(Path(triton.environ()[RUN_FOLDER_VARIABLE])).statuses.values()
    if not statuses:  # the native seat: tritonserver computes
        return {"process start": _begun(triton.pid) - begun, "ready": ready - begun}
    triton_begun, begun_of = _begun(triton.pid), {status.pid: _begun(status.pid) for status in statuses}
    loaded = max(begun_of[status.pid] + (status.phases_ms["stub start"] + status.load_ms) / 1e3 for status in statuses)
    seconds = {"process start": triton_begun - begun, "Triton's core": min(begun_of.values()) - triton_begun}
    for status in statuses:
        for phase, milliseconds in status.phases_ms.items():
            seconds[phase] = seconds.get(phase, 0.0) + milliseconds / 1e3
    return {**seconds, "publication": ready - loaded, "ready": ready - begun}


def _begun(pid: int) -> float:
    """Start of a process, in seconds of `time.time`.

    psutil's `create_time` is up to a second too early: it adds to the time of the boot, which Linux reports in whole
    seconds (proc(5), `btime`).
    """
    return time.time() - process_age_s(pid)


def _peak_mb(processes: Sequence[psutil.Process]) -> float:
    lines = (line for each in processes for line in Path(f"/proc/{each.pid}/status").read_text().splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


# The first request of each batch size beside later ones.


def _first_requests(url: str, models: Sequence[str]) -> dict[tuple[str, int], float]:
    ratios = {model: first_requests(url, model, LARGEST_BATCH) for model in models}
    return {(model, size): ratio for model, sizes in ratios.items() for size, ratio in sizes.items()}


def first_requests(url: str, model: str, largest: int) -> dict[int, float]:
    """Measure the first request of each batch size relative to the median of later ones.

    The first requests of all sizes come before the later ones.

    Raises:
        ClientError: A request failed.
    """
    with Client(url, timeout_s=120) as client:
        served = client.model(model)
        inputs = served.metadata["inputs"]
        with suppress(ClientError):  # Triton refuses it: exclude the client's own first use from the measurement
            served.infer(feeds_of(inputs, largest + 1))
        sends = {size: served.repeatable(feeds_of(inputs, size)) for size in range(1, largest + 1)}
        first_s = {size: _request_s(send) for size, send in sends.items()}
        later_s = {size: [_request_s(send) for _ in range(_LATER)] for size, send in sends.items()}
    return {size: first_s[size] / statistics.median(later_s[size]) for size in sends}


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


def _request_s(send: Callable[[], object]) -> float:
    begun = time.perf_counter()
    send()
    return time.perf_counter() - begun


def rows_of(subjects: Sequence[str], starts: Mapping[str, Sequence[Start]]) -> list[dict[str, object]]:
    """A row for each phase, then peak, first requests, and the peers; a column for each start. Medians of rounds."""
    columns = {
        f"{subject}, {state}": _column(starts, subject, state) for subject in subjects for state in (_COLD, _WARM)
    }
    phases = list(dict.fromkeys(phase for column in columns for start in starts[column] for phase in start.seconds))
    phases.sort(key=lambda phase: phase in {"publication", "ready", _PROVEN})
    names = dict.fromkeys([*(f"{phase} s" for phase in phases), *(name for each in columns.values() for name in each)])
    return [{"phase": name, **{key: column.get(name, 0.0) for key, column in columns.items()}} for name in names]


def _column(starts: Mapping[str, Sequence[Start]], subject: str, state: str) -> dict[str, float]:
    ours = starts[f"{subject}, {state}"]
    phases = dict.fromkeys(phase for start in ours for phase in start.seconds)
    column = {f"{phase} s": round(_median_s(ours, phase), 2) for phase in phases}
    column |= {"peak MB": _median_mb(ours), _FIRST: _worst_first(ours)}
    for peer, ratio in ((BARE, "ratio"), (CPP, f"ratio to {CPP}")):
        if theirs := starts.get(f"{subject}, {peer}", ()):
            column[f"{peer} s"] = round(_median_s(theirs, "ready"), 2)
            column[ratio] = round(_median_s(ours, "ready") / _median_s(theirs, "ready"), 2)
            column[f"{ratio}, {_PROVEN}"] = round(_median_s(ours, _PROVEN) / _median_s(theirs, "ready"), 2)
            column[f"{peer}, peak MB"] = _median_mb(theirs)
            if theirs[0].first:
                column[f"{peer}, {_FIRST}"] = _worst_first(theirs)
    return column


def _median_s(starts: Sequence[Start], phase: str) -> float:
    return statistics.median(start.seconds.get(phase, 0.0) for start in starts)


def _median_mb(starts: Sequence[Start]) -> float:
    return round(statistics.median(start.peak_mb for start in starts))


def _worst_first(starts: Sequence[Start]) -> float:
    """Largest ratio over models and sizes of the median of the rounds: any one request may be delayed."""
    return round(max(statistics.median(start.first[key] for start in starts) for key in starts[0].first), 2)
