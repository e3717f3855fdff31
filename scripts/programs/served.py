"""A server for a benchmark, and stores for it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from graphkiln.graph.signature import Signature
from graphkiln.repository.config import config_text

REPOSITORY = Path(__file__).resolve().parents[2]
DIGITS = REPOSITORY / "model_repository" / "digits"


def add_model(store: Path, name: str, graph: Path, extra: str = "") -> None:
    """Puts a graph into a store as model `name`, with a complete configuration and `extra` behind it."""
    folder = store / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").symlink_to(graph)
    with _reference_signature(graph) as signature:
        text = config_text(name, signature, max_batch_size=8, preprocess=None, labels_file=None)
    (store / name / "config.pbtxt").write_text(text + extra)


@contextmanager
def _reference_signature(graph: Path) -> Iterator[Signature]:
    from graphkiln.engines.onnxruntime import OnnxRuntimeEngine

    with OnnxRuntimeEngine().build_reference(graph) as session:
        yield session.signature


@contextmanager
def serving(*stores: Path, flags: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Serves stores on free ports; yields the HTTP and the gRPC URL."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        http, grpc, metrics = (held.getsockname()[1] for held in sockets)
    ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
    folders = [f"--model-store={store}" for store in stores]
    command = [sys.executable, "-m", "graphkiln.cli", "serve", *folders, *flags, *ports]
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        while not _ready(f"http://127.0.0.1:{http}"):
            if server.poll() is not None:
                sys.exit(f"benchmark: the server ended with code {server.returncode}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{http}", f"grpc://127.0.0.1:{grpc}"
    finally:
        server.terminate()
        server.wait(60)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
