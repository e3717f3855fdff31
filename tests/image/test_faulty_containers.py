"""Wrongly started containers: each exits with code 2 and the reason in the last line of its log."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from containers import run_in_image

pytestmark = pytest.mark.image

ALONE = ("--network", "none")


def last_line(options: tuple[str, ...], *command: str) -> str:
    finished = run_in_image(options, *command)
    assert finished.returncode == 2, finished.stderr
    assert "Traceback" not in finished.stderr
    line = finished.stderr.splitlines()[-1]
    assert line.startswith("graphkiln: ")
    return line


@pytest.fixture
def store(repository: Path) -> tuple[str, ...]:
    return ("-v", f"{repository / 'model_repository'}:/models:ro")


def test_without_a_volume() -> None:
    line = last_line(ALONE)
    assert "'/models' is missing" in line
    assert "--model-store" in line


def test_a_read_only_root_without_room_for_temporary_files(store: tuple[str, ...]) -> None:
    read_only = ("--read-only", "--tmpfs", "/tmp:ro")
    assert "docker run --tmpfs /tmp:exec" in last_line((*ALONE, *read_only, "--tmpfs", "/var/tmp:ro", *store))


def test_temporary_files_on_a_noexec_mount(store: tuple[str, ...]) -> None:
    assert "/tmp is mounted noexec" in last_line(
        (*ALONE, "--read-only", "--tmpfs", "/tmp:noexec", "--tmpfs", "/var/tmp:noexec", *store)
    )


def test_without_shared_memory(store: tuple[str, ...]) -> None:
    assert "cannot make a file in /dev/shm" in last_line((*ALONE, "--ipc", "none", *store))


def test_too_little_shared_memory(store: tuple[str, ...]) -> None:
    assert "docker run --shm-size=" in last_line((*ALONE, "--shm-size", "1m", *store))


def test_a_port_in_use(store: tuple[str, ...]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = ("graphkiln", "serve", "--model-store", "/models", "--host", "127.0.0.1", f"--http-port={port}")
        assert f"port {port} (HTTP) is in use" in last_line(("--network", "host", *store), *command)


def test_a_store_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    line = last_line((*ALONE, "--user", "12345:12345", "-v", f"{tmp_path}:/models:ro"))
    assert "model store '/models' cannot be read by user 12345" in line


@pytest.mark.parametrize("address", ["s3://bucket/models", "oci://127.0.0.1:1/models:1"])
def test_a_remote_store_in_the_image_without_its_client(address: str) -> None:
    line = last_line(ALONE, "graphkiln", "serve", "--model-store", address)
    assert f"{address}: {address.partition(':')[0]}:// needs " in line
    assert "the image of the target `remote`" in line
