"""The container image under test and its engine, as `scripts/test-image` names them in the environment."""

from __future__ import annotations

import os
import subprocess
import uuid

ENGINE = os.environ.get("GRAPHKILN_CONTAINER_ENGINE", "docker")
IMAGE = os.environ.get("GRAPHKILN_IMAGE", "graphkiln")
# crun refuses the cgroups of some hosts, and nested containers may not raise limits.
_PODMAN = ("--runtime", "runc")
_PODMAN_RUN = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
LIMITS = _PODMAN_RUN if ENGINE == "podman" else ()


def engine(*arguments: str) -> list[str]:
    return [ENGINE, *(_PODMAN if ENGINE == "podman" else ()), *arguments]


def run_in_image(options: tuple[str, ...], *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs a command in a new container of the image, or its own; one that takes too long is ended."""
    name = f"graphkiln-test-{uuid.uuid4().hex}"
    line = engine("run", "--rm", "--name", name, *LIMITS, *options, IMAGE, *command)
    try:
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        subprocess.run(engine("kill", name), capture_output=True, check=False)
        raise
