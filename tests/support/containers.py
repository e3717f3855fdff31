"""The container images under test and the engine, from the environment that `scripts/test-image` sets."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from running import free_ports, run_command

ENGINE = os.environ.get("GRAPHKILN_CONTAINER_ENGINE", "docker")
IMAGE = os.environ.get("GRAPHKILN_IMAGE", "graphkiln")
REMOTE_IMAGE = os.environ.get("GRAPHKILN_REMOTE_IMAGE", "")
GPU_IMAGE = os.environ.get("GRAPHKILN_GPU_IMAGE", "")
TRITON_IMAGE = os.environ.get("GRAPHKILN_TRITON_IMAGE", "")
# Those of the targets `remote`, `gpu`, `triton` and `store`; empty where they were not built.
STORE_IMAGE = os.environ.get("GRAPHKILN_STORE_IMAGE", "")
SEVEN = Path(__file__).parents[2] / "docs" / "digits" / "seven.png"
# crun refuses the cgroups of some hosts, and nested containers may not raise limits.
_PODMAN = ("--runtime", "runc")
_PODMAN_RUN = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
LIMITS = _PODMAN_RUN if ENGINE == "podman" else ()


def engine(*arguments: str) -> list[str]:
    return [ENGINE, *(_PODMAN if ENGINE == "podman" else ()), *arguments]


def run_in_image(
    options: tuple[str, ...], *command: str, timeout_s: float = 60, image: str = IMAGE
) -> subprocess.CompletedProcess[str]:
    """Run a command, or the default one, in a new container of the image, with a time limit."""
    name = f"graphkiln-test-{uuid.uuid4().hex}"
    line = engine("run", "--rm", "--name", name, *LIMITS, *options, image, *command)
    try:
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        subprocess.run(engine("kill", name), capture_output=True, check=False)
        raise


def classify_seven(url: str, *options: str | Path) -> None:
    """Classify docs/digits/seven.png by the command line, and check the label."""
    finished = run_command("classify", SEVEN, "--model", "digits", "--url", url, "--json", *options)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)[0]["classifications"][0]["label"] == "seven"


@dataclass
class Container:
    """A serving container in this machine's network."""

    process: subprocess.Popen[str]
    name: str
    http_port: int
    grpc_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def exec(self, *command: str) -> str:
        return subprocess.run(engine("exec", self.name, *command), capture_output=True, text=True, check=True).stdout

    def stop(self) -> tuple[int, float]:
        begun = time.monotonic()
        subprocess.run(engine("kill", "--signal", "TERM", self.name), capture_output=True, check=True)
        return self.process.wait(60), time.monotonic() - begun


@contextmanager
def serving(options: tuple[str, ...], *arguments: str, image: str = IMAGE) -> Iterator[Container]:
    """Run a container that serves on free ports, ready, until the end of the block."""
    http_port, grpc_port, metrics_port = free_ports(3)
    name = f"graphkiln-test-{http_port}"
    ports = (f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}")
    line = engine("run", "--rm", "--name", name, "--network", "host", *LIMITS, *options, image)
    process = subprocess.Popen([*line, "graphkiln", "serve", *arguments, *ports], text=True)
    try:
        container = Container(process, name, http_port, grpc_port)
        waited = run_command("health", "--url", container.url, "--wait", "100")
        assert waited.returncode == 0, waited.stderr
        yield container
    finally:
        if process.poll() is None:
            subprocess.run(engine("kill", name), capture_output=True, check=False)
            process.wait(60)


@contextmanager
def pods_volume() -> Iterator[str]:
    """A volume as Kubernetes gives it to a pod with an fsGroup: owned by root, writable by everyone."""
    name = f"graphkiln-test-{uuid.uuid4().hex}"
    subprocess.run(engine("volume", "create", name), capture_output=True, check=True)
    try:
        mode = "chown 0:1000 /volume && chmod 2777 /volume"
        made = run_in_image(("--user", "0:0", "-v", f"{name}:/volume"), "sh", "-c", mode)
        assert made.returncode == 0, made.stderr
        yield name
    finally:
        subprocess.run(engine("volume", "rm", name), capture_output=True, check=False)
