"""From a container's start until it is ready, as an autoscaler waits for it: with nothing kept, and with a kept cache.

`scripts/test-image` makes the image; Docker's engine or podman runs it, as the Deployment does: user, read-only root,
volumes. One container at a time; what comes before (a node, the image, the volume) is not measured.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from inputs import exported_graph
from measurement import show_progress
from stores import DIGITS, add_model

from graphkiln.story.server import free_ports

IMAGE = os.environ.get("GRAPHKILN_IMAGE", "graphkiln:test")
_READY_S = 300
_POLL_S = 0.02
_SERVE = ("graphkiln", "serve", "--model-store=/models", "--cache=/cache", "--host=127.0.0.1")
_PODMAN_LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""A container in a container may not raise them."""
_COLD, _KEPT = "cold", "cache kept"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Seconds of one start, each from its beginning.

    Attributes:
        created: What making the container takes; not part of the others.
        listens: Until its port is open: to an autoscaler's proxy, until there is somebody.
        ready: Until every model serves.
    """

    created: float
    listens: float
    ready: float


def benchmark_container(rounds: int, seconds: float) -> list[dict[str, object]]:
    """A row for each store, with and without a kept cache.

    Args:
        rounds: How often each is started.
        seconds: Of no use: a start takes as long as it takes.

    Raises:
        SystemExit: There is no engine, or no image.
    """
    del seconds
    engine = _engine()
    starts: defaultdict[tuple[str, str], list[Start]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        stores = _stores(Path(folder))
        for number in range(rounds):
            for name, store in stores.items():
                show_progress(f"round {number + 1}/{rounds}: {name}")
                with _volume(engine) as cache:
                    for state in (_COLD, _KEPT):
                        starts[name, state].append(_start(engine, store, cache))
    show_progress("")
    return rows_of(starts)


def rows_of(starts: Mapping[tuple[str, str], Sequence[Start]]) -> list[dict[str, object]]:
    """The table's rows: medians, and the ratio of each start to the first one's without a cache."""

    def median(key: tuple[str, str], name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in starts[key]))

    return [
        {
            "model": model,
            "set-up": state,
            "create s": round(median((model, state), "created"), 2),
            "listens s": round(median((model, state), "listens"), 2),
            "ready s": round(median((model, state), "ready"), 2),
            "worst s": round(max(each.ready for each in starts[model, state]), 2),
            "ratio": round(median((model, state), "ready") / median((model, _COLD), "ready"), 2),
        }
        for model, state in starts
    ]


def _engine() -> list[str]:
    """Docker where it answers, else podman with the runtime that runs in containers, too."""
    engine = ["docker"] if _works("docker", "info") else ["podman", "--runtime", "runc"]
    if not _works(*engine, "image", "inspect", IMAGE):
        sys.exit(f"there is no image {IMAGE}: scripts/test-image makes it, GRAPHKILN_IMAGE names another one")
    return engine


def _works(*command: str) -> bool:
    found = shutil.which(command[0])
    return bool(found) and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _stores(folder: Path) -> dict[str, Path]:
    graphs = {"digits": DIGITS / "1" / "model.onnx", "resnet50": exported_graph("resnet50")}
    for name, graph in graphs.items():
        add_model(folder / name, name, graph)
        link = folder / name / name / "1" / "model.onnx"
        link.unlink()
        shutil.copyfile(graph, link)  # a link would lead out of the container
    return {name: folder / name for name in graphs}


@contextmanager
def _volume(engine: Sequence[str]) -> Iterator[str]:
    name = f"graphkiln-benchmark-{os.getpid()}-{time.monotonic_ns()}"
    _run(*engine, "volume", "create", name)
    try:
        yield name
    finally:
        _run(*engine, "volume", "rm", "--force", name)


def _start(engine: Sequence[str], store: Path, cache: str) -> Start:
    """Starts a container, waits until it is ready, and ends it."""
    ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
    options = [f"--{name}-port={port}" for name, port in ports.items()]
    volumes = ("-v", f"{store}:/models:ro", "-v", f"{cache}:/cache", "--tmpfs", "/tmp:exec")  # noqa: S108 - in the container
    limits = _PODMAN_LIMITS if engine[0] == "podman" else ()
    with ExitStack() as stack:
        begun = time.monotonic()
        create = (*engine, "create", "--network", "host", "--read-only", "--shm-size", "1g", *limits, *volumes)
        container = _run(*create, IMAGE, *_SERVE, *options).splitlines()[-1]
        stack.callback(_run, *engine, "rm", "--force", container)
        created = time.monotonic() - begun
        begun = time.monotonic()
        _run(*engine, "start", container)
        listens, ready = _wait(ports["http"], begun)
        _run(*engine, "stop", "--time", "30", container)
    return Start(created=created, listens=listens, ready=ready)


def _wait(port: int, begun: float) -> tuple[float, float]:
    """Seconds until a port is open, and until it says that every model is ready."""
    listens = 0.0
    while time.monotonic() < begun + _READY_S:
        status = _ask(port)
        now = time.monotonic() - begun
        listens = listens or (now if status else 0.0)
        if status == 200:
            return listens, now
        time.sleep(_POLL_S)
    sys.exit(f"no container was ready within {_READY_S} s")


def _ask(port: int) -> int:
    """The status of the readiness; 0 where nobody listens."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
