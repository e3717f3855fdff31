"""Serving a model store on a real S3 server that changes, stops and restarts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import zoo
from factors import factor
from faulty_registry import FaultyRegistry
from object_store import CREDENTIALS, ObjectStore
from running import COMMAND, StartServer, free_ports, run_command

from graphkiln import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with ObjectStore() as server:
        yield server


def upload(remote: ObjectStore, folder: Path, prefix: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            remote.bucket("models").upload_file(str(path), f"{prefix}/{path.relative_to(folder)}")


def upload_version(remote: ObjectStore, scratch: Path, version: int, factor: float) -> None:
    zoo.add(scratch / str(version), "swap", zoo.scale(("batch", 3), factor), version=version)
    upload(remote, scratch / str(version), "store")


@pytest.mark.parametrize("control", ["poll", "explicit"])
def test_store_changes_stops_and_restarts(
    control: str, remote: ObjectStore, tmp_path: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHKILN_CACHE", str(tmp_path / "cache"))
    upload_version(remote, tmp_path / "made", 1, 2.0)
    store = f"s3://{remote.address}/models/store"
    flags = (f"--model-control-mode={control}", "--repository-poll-secs=1", "--load-model=*")
    server = start_server("--model-store", store, *flags[: 3 if control == "explicit" else 2])
    server.wait_ready()
    assert factor(server) == 2.0

    def reload() -> bool:
        if control == "explicit":
            with Client(server.url, timeout_s=60) as client:
                client.load("swap")
        return True

    upload_version(remote, tmp_path / "made", 2, 5.0)
    server.wait_until(lambda: "swap version 2: copied" in server.log)
    server.wait_until(lambda: reload() and factor(server) == 5.0)

    remote.stop()
    server.wait_until(lambda: "cannot be reached" in server.log)
    assert factor(server) == 5.0
    remote.start()
    server.wait_until(lambda: "can be read again" in server.log)
    assert server.log.count("cannot be reached") == 1

    remote.bucket("models").objects.filter(Prefix="store/swap/2/").delete()
    server.wait_until(lambda: "swap version 2: removed there" in server.log)
    server.wait_until(lambda: reload() and factor(server) == 2.0)


def test_start_without_network_serves_the_copy(
    remote: ObjectStore, tmp_path: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHKILN_CACHE", str(tmp_path / "cache"))
    upload_version(remote, tmp_path / "made", 1, 3.0)
    store = f"s3://http://{remote.address}/models/store"
    server = start_server("--model-store", store)
    server.wait_ready()
    server.stop()
    remote.stop()
    again = start_server("--model-store", store)
    again.wait_ready()
    assert factor(again) == 3.0
    assert "the previous copy is served" in again.log


def test_unusable_stores_are_one_line_errors(remote: ObjectStore) -> None:
    remote.bucket("models")
    for store, words in (
        (f"s3://{remote.address}/nosuch/store", "no such bucket"),
        ("s3://127.0.0.1:1/models/store", "cannot be reached"),
        ("ftp://host/store", "not known"),
    ):
        done = run_command("serve", "--model-store", store)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 3, done.stderr


def serve(address: str, folder: Path) -> list[str]:
    ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)]
    return ["serve", "--model-store", address, "--cache", str(folder / "cache"), *ports]


@pytest.mark.parametrize(
    ("fault", "words"), [("missing", "the registry has lost sha256:"), ("altered", "the registry sent other bytes")]
)
def test_failing_registry_is_a_one_line_error(fault: str, words: str, tmp_path: Path) -> None:
    with FaultyRegistry({"m/1/model.onnx": b"the content of a file"}) as registry:
        registry.fault = fault
        done = run_command(*serve(registry.address, tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr.splitlines()[-1]
    assert len(done.stderr.splitlines()) == 2, done.stderr  # what is copied, and what went wrong


def test_start_stopped_while_copying_reports_its_progress(tmp_path: Path) -> None:
    with FaultyRegistry({f"m/1/part{number}.bin": bytes([number]) * 500_000 for number in range(9)}) as registry:
        registry.fault = "hang half way"
        command = [*COMMAND, *serve(registry.address, tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as stopped:
            assert registry.hanging.wait(60)
            stopped.terminate()
            _, said = stopped.communicate(timeout=60)
    assert stopped.returncode == 0, said
    *_, how_far, why = said.splitlines()
    assert " of 4.5 MB copied in " in how_far
    assert why.endswith("before it was copied")
    assert list(tmp_path.rglob("part*.bin")) == []
