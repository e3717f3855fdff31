"""Memory of a served model with one and two instances, beside a bare session and Triton's C++ onnxruntime backend.

Memory is PSS: shared pages are divided between processes, so that the processes of a server can be added up. Peaks are
the kernel's, of the process with the largest one: they occur while the model is loaded.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from inputs import add_model, exported_graph, openvino_settings, parameters
from measurement import ratio_of, take_turns
from servers import check_backend, native_flags, start_cpp_server

from graphkiln.story.server import LocalServer, start_server
from graphkiln_backend.repository.config import DROP_IN_BACKEND
from graphkiln_client import Client

_ARCHITECTURES = ("mobilenet_v3_small", "resnet50")
_INSTANCES = (1, 2)
BARE, CPP = "bare session", "C++ backend"
_IMAGE = (1, 3, 224, 224)
_CALLERS, _REQUESTS = 4, 32  # so many that each instance computes
_SETTLED_S = 2.0  # until the replay after the start has begun
_ASKING = "graphkiln_backend.server.golden_requests"
_BARE_PROGRAM = """
import sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
image = numpy.zeros((1, 3, 224, 224), numpy.float32)
for _ in range(3):
    session.run(None, {session.get_inputs()[0].name: image})
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Memory of all processes of a set-up.

    Attributes:
        pss_mb: Sum over all processes.
        peak_mb: Largest peak of resident memory of a process.
    """

    pss_mb: float
    peak_mb: float


Read = Callable[[float], Reading]


def benchmark_memory(rounds: int, seconds: float, cpp_backend: Path | None) -> list[dict[str, object]]:
    """Measure each set-up in a new process per round; lowered graphs come from a warm cache, but for first starts."""
    backends = check_backend(cpp_backend) if cpp_backend else None
    rows: list[dict[str, object]] = []
    for architecture in _ARCHITECTURES:
        graph = exported_graph(architecture)
        with tempfile.TemporaryDirectory() as folder:
            set_ups = _set_ups(Path(folder), architecture, graph, backends)
            readings = take_turns(f"{architecture}, ", set_ups, rounds, seconds, warm_up=False)
            rows += rows_of(architecture, graph.stat().st_size / 2**20, readings)
    return rows


def _set_ups(folder: Path, model: str, graph: Path, backends: Path | None) -> dict[str, Read]:
    set_ups: dict[str, Read] = {BARE: partial(_read_bare, graph)}
    for count in _INSTANCES:
        instances = f"\ninstance_group {{ count: {count} kind: KIND_CPU }}\n"
        for server, settings in (("graphkiln", ""), ("graphkiln, OpenVINO", parameters(openvino_settings()))):
            name = _title(server, count)
            store = folder / name / "store"
            add_model(store, model, graph, instances + settings, golden=True)
            for title, is_first in ((f"{name}, first start", True), (name, False)):
                native = native_flags(None if settings else backends)
                start = partial(_start_ours, store, folder / f"{name} cache", native, is_first=is_first)
                set_ups[title] = partial(_read_server, start, model)
        if backends:
            name = _title(CPP, count)
            store = folder / name / "store"
            add_model(store, model, graph, instances, DROP_IN_BACKEND)
            set_ups[name] = partial(_read_server, partial(start_cpp_server, backends, store), model)
    return set_ups


def _title(server: str, instances: int) -> str:
    return f"{server}, {instances} instance{'s' if instances > 1 else ''}"


@contextmanager
def _start_ours(store: Path, cache: Path, native: tuple[str, ...], *, is_first: bool) -> Iterator[LocalServer]:
    if is_first:
        shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(exist_ok=True)
    with start_server(store, flags=("--cache", str(cache), *native), log=store.parent / "log") as server:
        yield server


def _read_server(start: Callable[[], AbstractContextManager[LocalServer]], model: str, _: float) -> Reading:
    """Measure a server after a request to each instance."""
    with start() as server, Client(server.http_url, timeout_s=120) as client, ThreadPoolExecutor(_CALLERS) as pool:
        feeds = {"INPUT_0": np.zeros(_IMAGE, np.float32)}
        time.sleep(_SETTLED_S)
        list(pool.map(lambda _: client.model(model).infer(feeds), range(_REQUESTS)))
        supervisor = psutil.Process(server.pid)
        while any(map(_is_asking, supervisor.children())):
            time.sleep(0.1)
        return read_memory([server.pid, *(child.pid for child in supervisor.children(recursive=True))])


def _is_asking(process: psutil.Process) -> bool:
    """True for the process that asks golden samples after a start."""
    try:
        return _ASKING in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def _read_bare(graph: Path, _: float) -> Reading:
    command = [sys.executable, "-c", _BARE_PROGRAM, str(graph)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if process.stdout is None or not process.stdout.readline():
            sys.exit(f"a bare session of {graph} does not start; see the error above")
        return read_memory([process.pid])


def read_memory(pids: Sequence[int]) -> Reading:
    """Read PSS and peaks of some processes."""
    pss_kb = [_kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") for pid in pids]
    peaks_kb = [_kilobytes(Path(f"/proc/{pid}/status"), "VmHWM:") for pid in pids]
    return Reading(pss_mb=sum(pss_kb) / 1024, peak_mb=max(peaks_kb) / 1024)


def _kilobytes(file: Path, key: str) -> int:
    return next((int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(key)), 0)


def rows_of(model: str, weights_mb: float, readings: Mapping[str, Sequence[Reading]]) -> list[dict[str, object]]:
    """Make a row per set-up; ratios are to the C++ backend with as many instances, else to the bare session."""
    rows: list[dict[str, object]] = []
    for name, found in readings.items():
        peer = next((_title(CPP, count) for count in _INSTANCES if _title("", count) in name), BARE)
        reference = readings.get(peer, readings[BARE])
        ratio = ratio_of([reading.pss_mb for reading in found], [reading.pss_mb for reading in reference])
        rows.append(
            {
                "model": model,
                "set-up": name,
                "PSS MB": round(statistics.median(reading.pss_mb for reading in found)),
                "ratio": ratio.median,
                "spread": ratio.spread,
                "largest peak MB": round(statistics.median(reading.peak_mb for reading in found)),
                "twice the weights MB": round(2 * weights_mb),
            }
        )
    return rows
