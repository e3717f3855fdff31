"""The container image, run as a user would run it. `scripts/test-image` builds it and names it in the environment."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from containers import IMAGE, LIMITS, engine, run_in_image
from running import free_ports, run_command

pytestmark = pytest.mark.image


def inspect() -> dict:  # type: ignore[type-arg]
    shown = subprocess.run(engine("image", "inspect", IMAGE), capture_output=True, text=True, check=True)
    return json.loads(shown.stdout)[0]  # type: ignore[no-any-return]


def health_check(image: dict) -> list[str]:  # type: ignore[type-arg]
    """Docker keeps it in the image's configuration, podman beside it."""
    return (image["Config"].get("Healthcheck") or image["Healthcheck"])["Test"]  # type: ignore[no-any-return]


@dataclass
class Container:
    process: subprocess.Popen[str]
    name: str
    http_port: int
    grpc_port: int

    def stop(self) -> tuple[int, float]:
        begun = time.monotonic()
        subprocess.run(engine("kill", "--signal", "TERM", self.name), capture_output=True, check=True)
        return self.process.wait(60), time.monotonic() - begun


@pytest.fixture
def container(repository: Path) -> Iterator[Container]:
    """The image with model_repository mounted read-only, on free ports of the host's network."""
    http_port, grpc_port, metrics_port = free_ports(3)
    name = f"graphkiln-test-{http_port}"
    process = subprocess.Popen(
        engine(
            *(
                "run",
                "--rm",
                "--name",
                name,
                "--network",
                "host",
                "-v",
                f"{repository / 'model_repository'}:/models:ro",
            ),
            *LIMITS,
            *(IMAGE, "graphkiln", "serve", "--model-store", "/models"),
            *(f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"),
        ),
        text=True,
    )
    try:
        waited = run_command("health", "--url", f"http://127.0.0.1:{http_port}", "--wait", "60")
        assert waited.returncode == 0, waited.stderr
        yield Container(process, name, http_port, grpc_port)
    finally:
        if process.poll() is None:
            subprocess.run(engine("kill", name), capture_output=True, check=False)
            process.wait(60)


def test_serves_a_read_only_store_and_stops_cleanly(container: Container, repository: Path) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{container.http_port}/v2/health/ready") as answer:
        assert answer.status == 200
    sample = repository / "docs" / "digits" / "seven.png"
    for url in (f"http://127.0.0.1:{container.http_port}", f"grpc://127.0.0.1:{container.grpc_port}"):
        finished = run_command("classify", sample, "--model", "digits", "--url", url, "--json")
        assert finished.returncode == 0, finished.stderr
        assert json.loads(finished.stdout)[0]["classifications"][0]["label"] == "seven"
    code, seconds = container.stop()
    assert code == 0
    assert seconds < 5


def test_is_small_unprivileged_and_watched() -> None:
    image = inspect()
    config = image["Config"]
    # By decimal megabytes, of files as they lie unpacked: the figure that `docker images` and `podman images` show.
    assert image["Size"] < 700_000_000
    assert config["User"] not in ("", "root", "0")
    assert config["Cmd"] == ["graphkiln", "serve", "--model-store", "/models"]
    assert "graphkiln_backend.server.healthcheck" in " ".join(health_check(image))


def test_the_health_check_fails_where_nobody_serves() -> None:
    test = health_check(inspect())
    assert test[0] == "CMD"
    assert run_in_image(("--network", "none"), *test[1:]).returncode == 1


def test_the_default_command_serves_models_on_the_usual_ports(repository: Path) -> None:
    """In a network of its own, asked from inside, so that the host's ports do not matter."""
    name = f"graphkiln-test-default-{os.getpid()}"
    mount = ("-v", f"{repository / 'model_repository'}:/models:ro")
    run = engine("run", "--rm", "-d", "--name", name, "--network", "none", *mount, *LIMITS, IMAGE)
    subprocess.run(run, check=True, capture_output=True)
    try:
        asked = subprocess.run(
            engine("exec", name, "graphkiln", "health", "--wait", "60"), capture_output=True, text=True, check=False
        )
        assert asked.stdout == "ready\n", asked.stderr
    finally:
        subprocess.run(engine("kill", name), capture_output=True, check=False)


def test_openvino_is_there_and_proves_itself(repository: Path) -> None:
    command = ("graphkiln", "explain", "/models/digits", "--set", "engine=openvino", "--set", "precision=fp32")
    shown = run_in_image(("--network", "none", "-v", f"{repository / 'model_repository'}:/models:ro"), *command)
    assert "products: 5 in fp32" in shown.stdout, shown.stderr
    assert "PASS" in shown.stdout


def test_text_can_change_its_case() -> None:
    """ONNX Runtime's StringNormalizer takes the rules from this locale."""
    program = "import locale; locale.setlocale(locale.LC_ALL, 'en_US.UTF-8')"
    finished = run_in_image((), "python3", "-c", program)
    assert finished.returncode == 0, finished.stderr
