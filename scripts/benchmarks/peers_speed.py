"""JPEG to top-5 of ResNet-50 beside other servers, each in its virtual environment."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from inputs import CACHE, add_model, exported_graph, parameters, synthetic_photograph
from measurement import take_turns
from peers.image import EXACT_PRODUCTS, HOST, preprocess, score, session, top5
from peers.protocols import PEERS, Label, Peer
from servers import check_backend, start_cpp_server
from tritonclient.grpc import InferenceServerClient, InferInput

from graphkiln.bench.generator import Throughput, in_turn, measure_throughput
from graphkiln.story.server import start_server
from graphkiln_backend.engines.hardware import saturates_products_of_bytes
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.repository.config import DROP_IN_BACKEND
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.server.installation import find_installation
from graphkiln_backend.system import processes
from graphkiln_client import Client
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe

CALLERS = 8
CPP = "Triton's C++ backend"
_OURS = "graphkiln"
# One thread each. A free instance takes all waiting requests, and later ones wait for the whole batch; ResNet-50 takes
# as long for an image of a batch as for one alone, so larger batches would gain nothing.
_INSTANCES, _LARGEST_BATCH = 2, 2
_WARM_UP_S = 3.0
_READY_S = 120.0
_STOP_S = 30.0
NAME = "resnet50"
_ENGINES = {"fp32": "onnxruntime", "int8": "auto"}  # in fp32 the runtime of all peers
_FOLDER = Path(__file__).resolve().parent / "peers"

Classify = Callable[[bytes], object]


def benchmark_peers(rounds: int, seconds: float, cpp_backend: Path | None) -> list[dict[str, object]]:
    """Measure images per second of each peer, and of graphkiln in fp32 and int8; one server at a time.

    Args:
        rounds: Number of measured rounds.
        seconds: Duration of one measurement.
        cpp_backend: A backend directory with Triton's C++ onnxruntime backend, which is then a peer, too; or None.
    """
    graph = exported_graph(NAME)
    jpegs = [synthetic_photograph(500, 375, seed) for seed in range(8)]
    contenders: dict[str, Callable[[], AbstractContextManager[Classify]]] = {}
    for name, peer in PEERS.items():
        contenders[name] = partial(start_peer, peer, environment(name), graph, jpegs[:2])
    if cpp_backend:
        contenders[CPP] = partial(_start_cpp, check_backend(cpp_backend), graph, jpegs[:2])
    for precision in ("fp32", "int8"):
        contenders[f"{_OURS} {precision}"] = partial(_start_graphkiln, _store(precision), _ENGINES[precision])

    def run(start: Callable[[], AbstractContextManager[Classify]], length: float) -> Throughput:
        with start() as classify:
            call = in_turn([partial(classify, jpeg) for jpeg in jpegs])
            measure_throughput(call, CALLERS, _WARM_UP_S)
            return measure_throughput(call, CALLERS, length)

    runs = {name: partial(run, start) for name, start in contenders.items()}
    return _rows(take_turns("", runs, rounds, seconds, warm_up=False))


def _rows(measured: dict[str, list[Throughput]]) -> list[dict[str, object]]:
    """Make a row per set-up; the ratio is to the best peer, round by round."""
    medians = {name: statistics.median(one.per_second for one in rounds) for name, rounds in measured.items()}
    peers = [name for name in measured if not name.startswith(_OURS)]
    best = [one.per_second for one in measured[max(peers, key=medians.__getitem__)]]
    rows: list[dict[str, object]] = []
    for name, rounds in measured.items():
        latencies_ms = [latency for one in rounds for latency in one.latencies_ms]
        ratios = [one.per_second / reference for one, reference in zip(rounds, best, strict=True)]
        rows.append(
            {
                "set-up": name,
                "version": _version(name),
                "images/s": round(medians[name], 1),
                "ratio": round(statistics.median(ratios), 2),
                "p50 ms": round(float(np.percentile(latencies_ms, 50)), 1),
                "p99 ms": round(float(np.percentile(latencies_ms, 99)), 1),
            }
        )
    return rows


def _version(name: str) -> str:
    """Pinned version of a peer: the first line of its requirements."""
    if name == CPP:
        return find_installation().version
    if name not in PEERS:
        return "this commit"
    return (_FOLDER / f"{name}.txt").read_text().splitlines()[0].partition("==")[2]


def environment(name: str) -> Path:
    """Make the virtual environment of a peer's pinned requirements, once; return its Python.

    Raises:
        MeasurementError: The requirements cannot be installed.
    """
    requirements = _FOLDER / f"{name}.txt"
    folder = CACHE / "peers" / name
    done = folder / "requirements.txt"
    if not done.exists() or done.read_text() != requirements.read_text():
        print(f"installing {name} (once)", file=sys.stderr)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            subprocess.run([*pip, "-r", str(requirements)], check=True)
        except subprocess.CalledProcessError as error:
            raise MeasurementError(
                f"the peer {name} cannot be installed from {requirements}: code {error.returncode}",
                hint="see pip's output above",
            ) from error
        done.write_text(requirements.read_text())
    return folder / "bin" / "python"


@contextmanager
def start_peer(peer: Peer, python: Path, graph: Path, check_jpegs: list[bytes]) -> Iterator[Classify]:
    """Start a peer's server, and compare its answers with those of a bare session.

    In int8, ONNX Runtime is asked for exact products: on CPUs without VNNI it is faster otherwise, and up to 45% of a
    signal is wrong.
    """
    if saturates_products_of_bytes():
        os.environ[EXACT_PRODUCTS] = "1"  # also for the bare session in this process
    with socket.socket() as held:
        held.bind((HOST, 0))
        port = held.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="graphkiln-peer-", ignore_cleanup_errors=True) as scratch:
        environment = {**os.environ, **dict.fromkeys(("HOME", "TMPDIR", "RAY_TMPDIR"), scratch)}
        command = list(map(str, (python, _FOLDER / f"{peer.name}_server.py", "--model", graph, "--port", port)))
        log = Path(scratch) / "log"
        with log.open("wb") as output:
            process = processes.start(command, log=output, at_our_end=signal.SIGTERM, cwd=scratch, env=environment)
        try:
            _wait_ready(peer, process, port, log)
            classify = _http_classify(peer, port)
            _check(classify, graph, check_jpegs)
            yield classify
        finally:
            _stop(process)


def _wait_ready(peer: Peer, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while not peer.is_ready(HOST, port):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            sys.exit(f"{peer.name} is not ready within {_READY_S:g} s, or has exited: {tail}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a server and all its children."""
    family = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
    processes.stop(process, _STOP_S)
    _, alive = psutil.wait_procs(family, timeout=5)
    for child in alive:
        child.kill()


def _http_classify(peer: Peer, port: int) -> Callable[[bytes], list[Label]]:
    """Classify over HTTP, with a persistent connection of each thread."""
    local = threading.local()

    def classify(jpeg: bytes) -> list[Label]:
        connection = getattr(local, "connection", None)
        if connection is None:
            connection = local.connection = http.client.HTTPConnection(HOST, port, timeout=60)
        path, headers, body = peer.request(jpeg)
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            sys.exit(f"{peer.name} responds with {response.status}: {content[:500]!r}; expected 200")
        return peer.parse(content)

    return classify


def _check(classify: Callable[[bytes], list[Label]], graph: Path, jpegs: list[bytes]) -> None:
    bare = session(str(graph))
    for jpeg in jpegs:
        expected = top5(score(bare, [preprocess(jpeg)])[0])
        found = classify(jpeg)
        same = [label for label, _ in found] == [label for label, _ in expected]
        if not same or not np.allclose([s for _, s in found], [s for _, s in expected], rtol=1e-3):
            sys.exit(f"a peer returns {found}; expected {expected}")


@contextmanager
def _start_cpp(backends: Path, graph: Path, check_jpegs: list[bytes]) -> Iterator[Classify]:
    """Serve the peers' graph by Triton's C++ backend, with instances and threads as graphkiln and batches as the peers.

    The backend returns scores: callers decode the JPEG, send the tensor, and rank the scores.
    """
    own = f"\ninstance_group {{ count: {_INSTANCES} kind: KIND_CPU }}\n{parameters({'intra_op_thread_count': '1'})}"
    with tempfile.TemporaryDirectory() as folder:
        add_model(Path(folder), NAME, graph, own, DROP_IN_BACKEND)
        with (
            start_cpp_server(backends, Path(folder)) as server,
            InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client,
        ):

            def classify(jpeg: bytes) -> list[Label]:
                images = preprocess(jpeg)[np.newaxis]
                sent = InferInput("INPUT_0", images.shape, "FP32")
                sent.set_data_from_numpy(images)
                return top5(client.infer(NAME, [sent]).as_numpy("OUTPUT_0")[0])

            _check(classify, graph, check_jpegs)
            yield classify


@contextmanager
def _start_graphkiln(store: Path, engine: str) -> Iterator[Classify]:
    flags = ("--set", f"{NAME}.engine={engine}", "--cache", str(CACHE / "lowered"))
    log = store.parent / f"{store.name}.log"
    with start_server(store, flags=flags, log=log) as server, Client(server.grpc_url) as client:
        model = client.model(NAME)
        yield lambda jpeg: model.classify(jpeg, top_k=5)


def _store(precision: str) -> Path:
    """Convert to a version that takes uint8 images and returns the top five, once; return its store."""
    store = CACHE / "ours" / f"{precision}, batches of {_LARGEST_BATCH}"
    convert_once(store, precision, _INSTANCES, input="uint8-nhwc", top_k=5, max_batch_size=_LARGEST_BATCH)
    return store


def convert_once(store: Path, precision: str, instances: int = 0, **options: Any) -> Path:
    """Convert ResNet-50 with random weights, unless the store has it; return the model's folder.

    Args:
        store: Model store.
        precision: fp32 or int8.
        instances: Number of instances on the CPU, or 0 for the default.
        **options: Further options of the conversion.
    """
    folder = store / NAME
    if not folder.exists():
        print(f"converting to {precision} (once)", file=sys.stderr)
        samples, calibration = (CACHE / "images" / part for part in ("samples", "calibration"))
        for target, seeds in ((samples, range(100, 116)), (calibration, range(200, 264))):
            target.mkdir(parents=True, exist_ok=True)
            for seed in seeds:
                (target / f"{seed}.jpg").write_bytes(synthetic_photograph(500, 375, seed))
        options |= {"precision": precision, "calibration": calibration if precision == "int8" else None}
        recipe = Recipe(source=f"torchvision:{NAME}", name=NAME, model_store=store, samples=samples, **options)
        convert(recipe, command="scripts/benchmark")
        if instances:
            with (folder / CONFIG_FILE).open("a") as config:
                config.write(f"\ninstance_group {{ count: {instances} kind: KIND_CPU }}\n")
    return folder
