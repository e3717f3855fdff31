"""The container image, run like by a user. `scripts/test-image` builds it and names it in the environment."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import IMAGE, LIMITS, SEVEN, Container, classify_seven, engine, pods_volume, run_in_image, serving
from running import free_ports

pytestmark = pytest.mark.image


def inspect() -> dict:  # type: ignore[type-arg]
    shown = subprocess.run(engine("image", "inspect", IMAGE), capture_output=True, text=True, check=True)
    return json.loads(shown.stdout)[0]  # type: ignore[no-any-return]


def health_check(image: dict) -> dict:  # type: ignore[type-arg]
    """Health check of an image: in its configuration by docker, beside it by podman."""
    return image["Config"].get("Healthcheck") or image["Healthcheck"]  # type: ignore[no-any-return]


@pytest.fixture
def container(repository: Path) -> Iterator[Container]:
    """The image with model_repository mounted read-only."""
    with serving(("-v", f"{repository / 'model_repository'}:/models:ro"), "--model-store=/models") as running:
        yield running


def test_serves_a_read_only_store_and_stops_cleanly(container: Container) -> None:
    with urllib.request.urlopen(f"{container.url}/v2/health/ready") as answer:
        assert answer.status == 200
    for url in (container.url, f"grpc://127.0.0.1:{container.grpc_port}"):
        classify_seven(url)
    container.exec(*health_check(inspect())["Test"][1:])  # exits with 0, also on other ports
    code, seconds = container.stop()
    assert code == 0
    assert seconds < 5


def test_is_small_unprivileged_and_watched() -> None:
    image = inspect()
    config = image["Config"]
    # Unpacked size, as in `docker images` and `podman images`.
    assert image["Size"] <= 670_000_000
    assert config["User"] not in ("", "root", "0")
    assert config["Cmd"] == ["graphkiln", "serve", "--model-store", "/models"]
    watched = health_check(image)
    assert "graphkiln_backend.server.healthcheck" in " ".join(watched["Test"])
    # Longer than --load-deadline: Swarm and others stop unhealthy containers.
    assert watched["Interval"] * watched["Retries"] / 1e9 >= 660
    assert watched["StartPeriod"] / 1e9 >= 660


def test_the_health_check_fails_without_a_server() -> None:
    test = health_check(inspect())["Test"]
    assert test[0] == "CMD"
    assert run_in_image(("--network", "none"), *test[1:]).returncode == 1


def test_the_default_command_serves_models_on_the_usual_ports(repository: Path) -> None:
    """In a private network, with requests from inside, so that the host's ports do not matter."""
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


def test_openvino_passes_its_proof(repository: Path) -> None:
    command = ("graphkiln", "explain", "/models/digits", "--set", "engine=openvino", "--set", "precision=fp32")
    shown = run_in_image(("--network", "none", "-v", f"{repository / 'model_repository'}:/models:ro"), *command)
    assert "products: 5 in fp32" in shown.stdout, shown.stderr
    assert "PASS" in shown.stdout


def test_the_locale_of_onnx_runtimes_string_normalizer() -> None:
    program = "import locale; locale.setlocale(locale.LC_ALL, 'en_US.UTF-8')"
    finished = run_in_image((), "python3", "-c", program)
    assert finished.returncode == 0, finished.stderr


def test_bytecode_exists_and_is_not_checked() -> None:
    """File times differ between builds: bytecode that is checked against them is compiled at each start."""
    program = (
        "import pathlib\n"
        "for root in ('/opt/graphkiln/lib', '/usr/lib/python3.11'):\n"
        "    kinds = [f.read_bytes()[4] for f in pathlib.Path(root).rglob('*.pyc')]\n"
        "    print(len(kinds) > 500, set(kinds))\n"
    )
    unchecked = 1  # PEP 552: by hash, unchecked
    assert run_in_image(("--network", "none"), "python3", "-c", program).stdout == f"True {{{unchecked}}}\n" * 2


def test_new_volumes_belong_to_its_user() -> None:
    """A new volume gets the owner of the folder at its mount point."""
    owners = run_in_image(("--network", "none"), "stat", "--format", "%u %a", "/cache", "/home/graphkiln/.cache")
    assert owners.stdout == "1000 755\n" * 2, owners.stderr


def test_artifacts_are_kept_in_a_volume_of_a_pod(repository: Path) -> None:
    """As in the manifests; without GRAPHKILN_TRUSTED_VOLUME it is refused, because others can write it."""
    store = ("-v", f"{repository / 'model_repository'}:/models:ro")
    with pods_volume() as volume:
        options = ("--network", "none", *store, "-v", f"{volume}:/cache")
        lower = ("graphkiln", "lower", "/models/digits", "--cache", "/cache")
        refused = run_in_image(options, *lower)
        assert "/cache can be written by other users (mode 2777)" in refused.stderr
        kept = run_in_image((*options, "-e", "GRAPHKILN_TRUSTED_VOLUME=/cache"), *lower)
        assert kept.returncode == 0, kept.stderr
        listed = run_in_image(options, "sh", "-c", "ls /cache/entries | wc -l")
        assert int(listed.stdout) > 0


def test_any_user_may_serve(repository: Path) -> None:
    """As in OpenShift: a user without name or home, in the group root, with a read-only root."""
    store = ("-v", f"{repository / 'model_repository'}:/models:ro")
    confined = ("--user", "12345:0", "--read-only", "--tmpfs", "/tmp:exec,mode=1777", "--cap-drop", "ALL")
    with pods_volume() as volume:
        kept = ("-v", f"{volume}:/cache", "-e", "GRAPHKILN_TRUSTED_VOLUME=/cache")
        with serving((*store, *confined, *kept), "--model-store=/models", "--cache=/cache") as running:
            assert running.exec("id", "-u") == "12345\n"
            assert int(running.exec("sh", "-c", "ls /cache/entries | wc -l")) > 0
            assert running.stop()[0] == 0


def test_the_page_is_reached_through_a_published_port(repository: Path) -> None:
    """127.0.0.1 of a container cannot be reached: the page listens on all addresses, and checks the host name."""
    (port,) = free_ports(1)
    store = ("-v", f"{repository / 'model_repository'}:/models:ro")
    with serving(store, "--model-store=/models", f"--page-address=:{port}"):
        assert request_page(port, "evil.example", "GET", "/")[0] == 421
        status, page = request_page(port, f"localhost:{port}", "GET", "/")
        assert (status, b"<title>graphkiln</title>" in page) == (200, True)
        status, answer = request_page(
            port, f"localhost:{port}", "POST", "/api/models/digits/1/image", SEVEN.read_bytes()
        )
        assert (status, json.loads(answer)["classifications"][0]["label"]) == (200, "seven")


def request_page(port: int, host: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request to the page by another address than 127.0.0.1, as from outside of a container."""
    connection = http.client.HTTPConnection("127.0.0.2", port, timeout=60)
    try:
        connection.request(method, path, body=body, headers={"Host": host})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
