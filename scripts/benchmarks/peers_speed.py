"""JPEG to top-5 for ResNet-50, beside servers that people know: each in a virtual environment of its own."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
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
from measuring import CACHE, exported, photograph
from peers.asking import PEERS, Label, Peer
from peers.image import HOST, preprocess, score, session, top5

from graphkiln.story.measuring import Segment, run_segment
from graphkiln.story.server import serving
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_client import Client
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe

CALLERS = 8
_WARM_S = 3.0
_READY_S = 120.0
_LEAVE_S = 30.0
_ENGINES = {"fp32": "onnxruntime", "int8": "auto"}
"""In fp32 the runtime that all peers have, too."""
_FOLDER = Path(__file__).resolve().parent / "peers"

Ask = Callable[[bytes], object]


def benchmark_peers(rounds: int, seconds: float) -> list[dict[str, object]]:
    """Images per second of each peer, and of graphkiln in fp32 and int8; each is alone on the machine in its turn."""
    graph = exported("resnet50")
    jpegs = [photograph(500, 375, seed) for seed in range(8)]
    contenders: dict[str, Callable[[], AbstractContextManager[Ask]]] = {}
    for name, peer in PEERS.items():
        contenders[name] = partial(_peer, peer, _environment(name), graph, jpegs[:2])
    for precision in ("fp32", "int8"):
        contenders[f"graphkiln {precision}"] = partial(_ours, _store(precision), _ENGINES[precision])
    seen: dict[str, list[Segment]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, opened in contenders.items():
            print(f"\r\033[Kround {number + 1}/{rounds}: {name}", end="", file=sys.stderr)
            with opened() as ask:
                run_segment(ask, CALLERS, jpegs, _WARM_S)
                seen[name].append(run_segment(ask, CALLERS, jpegs, seconds))
    print("\r\033[K", end="", file=sys.stderr)
    return _rows(seen)


def _rows(seen: dict[str, list[Segment]]) -> list[dict[str, object]]:
    """The ratio is to the best peer, round by round."""
    medians = {name: statistics.median(each.per_second for each in segments) for name, segments in seen.items()}
    best = [segment.per_second for segment in seen[max(PEERS, key=medians.__getitem__)]]
    rows: list[dict[str, object]] = []
    for name, segments in seen.items():
        latencies = [latency for segment in segments for latency in segment.latencies_ms]
        ratios = [segment.per_second / theirs for segment, theirs in zip(segments, best, strict=True)]
        rows.append(
            {
                "set-up": name,
                "version": _version(name),
                "images/s": round(medians[name], 1),
                "ratio": round(statistics.median(ratios), 2),
                "p50 ms": round(float(np.percentile(latencies, 50)), 1),
                "p99 ms": round(float(np.percentile(latencies, 99)), 1),
            }
        )
    return rows


def _version(name: str) -> str:
    """As pinned; the first line of the requirements is the server's own."""
    if name not in PEERS:
        return "this commit"
    return (_FOLDER / f"{name}.txt").read_text().splitlines()[0].partition("==")[2]


def _environment(name: str) -> Path:
    """The Python of a peer, in a virtual environment that is made once for its pinned requirements."""
    requirements = _FOLDER / f"{name}.txt"
    folder = CACHE / "peers" / name
    done = folder / "requirements.txt"
    if not done.exists() or done.read_text() != requirements.read_text():
        print(f"installing {name} (once)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(requirements)], check=True)
        done.write_text(requirements.read_text())
    return folder / "bin" / "python"


@contextmanager
def _peer(peer: Peer, python: Path, graph: Path, checked: list[bytes]) -> Iterator[Ask]:
    """A peer's server, once its answers are those of the bare session."""
    with socket.socket() as held:
        held.bind((HOST, 0))
        port = held.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="graphkiln-peer-", ignore_cleanup_errors=True) as scratch:
        environment = {**os.environ, **dict.fromkeys(("HOME", "TMPDIR", "RAY_TMPDIR"), scratch)}
        environment["LD_LIBRARY_PATH"] = str(
            sysconfig.get_config_var("LIBDIR")
        )  # PyTriton's own libpython, not another
        command = list(map(str, (python, _FOLDER / f"{peer.name}_server.py", "--model", graph, "--port", port)))
        log = Path(scratch) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=scratch, env=environment, start_new_session=True
            )
        try:
            _wait(peer, process, port, log)
            ask = _asking(peer, port)
            _check(ask, graph, checked)
            yield ask
        finally:
            _end(process)


def _wait(peer: Peer, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while not peer.is_ready(HOST, port):
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{peer.name} does not become ready: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a server and all that it started."""
    family = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(family, timeout=5)
    for each in left:
        each.kill()


def _asking(peer: Peer, port: int) -> Callable[[bytes], list[Label]]:
    """Each thread keeps its connection."""
    local = threading.local()

    def ask(jpeg: bytes) -> list[Label]:
        connection = getattr(local, "connection", None)
        if connection is None:
            connection = local.connection = http.client.HTTPConnection(HOST, port, timeout=60)
        path, headers, body = peer.request(HOST, port, jpeg)
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            sys.exit(f"{peer.name} answers {response.status}: {answer[:500]!r}")
        return peer.answer(answer)

    return ask


def _check(ask: Callable[[bytes], list[Label]], graph: Path, jpegs: list[bytes]) -> None:
    bare = session(str(graph))
    for jpeg in jpegs:
        expected = top5(score(bare, [preprocess(jpeg)])[0])
        found = ask(jpeg)
        same = [label for label, _ in found] == [label for label, _ in expected]
        if not same or not np.allclose([s for _, s in found], [s for _, s in expected], rtol=1e-3):
            sys.exit(f"a peer answers {found}, expected {expected}")


@contextmanager
def _ours(store: Path, engine: str) -> Iterator[Ask]:
    name = "resnet50"
    flags = ("--set", f"{name}.engine={engine}", "--cache", str(CACHE / "lowered"))
    log = store.parent / f"{store.name}.log"
    with serving(store, flags=flags, log=log) as server, Client(server.grpc_url) as client:
        model = client.model(name)
        yield lambda jpeg: model.classify(jpeg, top_k=5)


def _store(precision: str) -> Path:
    """A proven version that takes bytes and answers its best five; two instances."""
    store = CACHE / "ours" / precision
    folder = store / "resnet50"
    if not folder.exists():
        print(f"converting to {precision} (once)", file=sys.stderr)
        samples, calibration = (CACHE / "images" / part for part in ("samples", "calibration"))
        for target, seeds in ((samples, range(100, 116)), (calibration, range(200, 264))):
            target.mkdir(parents=True, exist_ok=True)
            for seed in seeds:
                (target / f"{seed}.jpg").write_bytes(photograph(500, 375, seed))
        options: dict[str, Any] = {"precision": precision, "calibration": calibration} if precision == "int8" else {}
        recipe = Recipe(
            source="torchvision:resnet50", name="resnet50", model_store=store, input="uint8-nhwc", top_k=5,
            max_batch_size=8, samples=samples, **options,
        )  # fmt: skip
        convert(recipe, command="scripts/benchmark peers")
        with (folder / CONFIG_FILE).open("a") as config:
            config.write("\ninstance_group { count: 2 kind: KIND_CPU }\n")
    return store
