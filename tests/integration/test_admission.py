"""A bad model or version does not affect others: at the start, while serving, and after a restart."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
import zoo
from factors import factor
from running import Server, StartServer

from graphkiln import Client, ClientError

POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")


def nonsense() -> onnx.ModelProto:
    """Write a complete version that no engine can run."""
    proto = zoo.scale(("batch", 3))
    proto.graph.node[0].op_type = "Nonsense"
    return proto


def stubs(server: Server) -> list[psutil.Process]:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    return [process for process in processes if "python_backend_stub" in process.name()]


def publish(store: Path, version: int, proto: onnx.ModelProto, model: str = "swap") -> None:
    """Write a new version elsewhere and rename it into place."""
    folder = zoo.add(store / ".new", model, proto, version=version)
    (store / model).mkdir(exist_ok=True)
    folder.rename(store / model / str(version))


def watch(server: Server, condition: Callable[[], bool], timeout_s: float = 60) -> Counter[int | None]:
    """Poll readiness until a condition holds and for another second; count the statuses."""
    seen: Counter[int | None] = Counter()
    deadline = time.monotonic() + timeout_s
    until = 0.0
    while not until or time.monotonic() < until:
        seen[server.status("/v2/health/ready")] += 1
        assert time.monotonic() < deadline, server.log
        if not until and condition():
            until = time.monotonic() + 1
        time.sleep(0.02)
    return seen


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Store with the models `good` and `swap`."""
    zoo.add(tmp_path / "store", "good", zoo.scale(("batch", 3), 7))
    zoo.add(tmp_path / "store", "swap", zoo.scale(("batch", 3), 1))
    return tmp_path / "store"


@pytest.mark.slow
def test_bad_model_at_the_start_does_not_affect_others(start_server: StartServer, store: Path) -> None:
    zoo.add(store, "damaged", zoo.scale(("batch", 3)))
    (store / "damaged" / "1" / "model.onnx").write_bytes(b"PK")
    zoo.add(store, "unparsable", zoo.scale(("batch", 3)), "hello {")
    zoo.add(store, "unloadable", nonsense())
    os.mkfifo(zoo.add(store, "endless", zoo.scale(("batch", 3))) / "manifest.json")
    server = start_server("--model-store", store)
    server.wait_until(lambda: "serving HTTP" in server.log)
    assert factor(server, "good") == 7
    assert server.status("/v2/health/ready") == 400
    assert server.status("/v2/models/good/ready") == 200
    for words in (
        "damaged 1: ",
        "cut short",
        "is not a model configuration",
        "Nonsense",
        "manifest.json is neither a file nor a folder",
    ):
        assert words in server.log
    rows = [line for line in server.log.splitlines() if line.startswith("│ ")]
    assert {row.split("│")[3].strip() for row in rows if row.split("│")[3].strip()} == {"ready", "refused"}
    assert max(map(len, rows)) <= 80
    assert server.stop()[0] == 0


@pytest.mark.slow
def test_older_version_replaces_a_bad_one_also_after_a_crash(start_server: StartServer, store: Path) -> None:
    publish(store, 2, zoo.scale(("batch", 3), 2))
    publish(store, 3, nonsense())
    server = start_server("--model-store", store)
    server.wait_ready()
    assert (factor(server), factor(server, "good")) == (2, 7)
    publish(store, 4, nonsense())  # not asked for: neither now nor after the crash
    stubs(server)[0].send_signal(signal.SIGKILL)
    server.wait_until(lambda: server.log.count("serving HTTP") == 2)
    server.wait_ready()
    assert (factor(server), factor(server, "good")) == (2, 7)
    assert "version 4" not in server.log


@pytest.mark.slow
def test_poll_mode_serves_only_good_versions(start_server: StartServer, store: Path) -> None:
    server = start_server("--model-store", store, *POLL)
    server.wait_ready()
    publish(store, 2, nonsense())
    assert set(watch(server, lambda: "swap version 2 is not served" in server.log)) == {200}
    assert factor(server) == 1
    stubs(server)[0].send_signal(signal.SIGKILL)
    server.wait_until(lambda: server.log.count("serving HTTP") == 2)
    server.wait_ready()
    assert (factor(server), factor(server, "good")) == (1, 7)
    publish(store, 3, zoo.scale(("batch", 3), 3))
    assert set(watch(server, lambda: factor(server) == 3)) == {200}
    (store / "swap" / "3" / "model.onnx").write_bytes(b"PK")
    assert set(watch(server, lambda: "swap version 3 is not served" in server.log)) == {200}
    assert factor(server) == 3
    publish(store, 1, nonsense(), "late")
    assert set(watch(server, lambda: "late version 1 is not served" in server.log)) == {200}
    shutil.rmtree(store / "swap")
    assert set(watch(server, lambda: factor(server) == 0)) == {200}
    assert factor(server, "good") == 7


@pytest.mark.slow
def test_explicit_mode_refuses_another_signature_and_continues(start_server: StartServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    zoo.add(store, "m", zoo.scale(("batch", 3), 1), 'backend: "graphkiln" version_policy { all {} }')
    server = start_server("--model-store", store, "--model-control-mode=explicit", "--load-model=m")
    server.wait_ready()
    zoo.add(store, "m", zoo.scale(("batch", 4), 2), version=2)
    with Client(server.url, timeout_s=120) as client:
        for _ in range(3):  # while Triton is made to forget the one before
            with pytest.raises(ClientError, match="incompatible signature"):
                client.load("m")
        shutil.rmtree(store / "m" / "2")
        zoo.add(store, "m", zoo.scale(("batch", 3), 3), version=3)
        client.load("m")
        assert factor(server, "m") == 3
    server.wait_ready()
    server.process.terminate()
    assert server.process.wait(60) == 0
    sent = [path.read_text() for path in Path("/tmp").glob("folder??????/1/model.py")]  # perhaps of other servers
    assert not any(str(server.temporary) in code for code in sent)


@pytest.mark.slow
def test_explicit_mode_failed_load_is_forgotten_and_crash_changes_nothing(
    start_server: StartServer, store: Path
) -> None:
    publish(store, 2, nonsense())
    server = start_server("--model-store", store, "--model-control-mode=explicit", "--load-model=swap")
    server.wait_ready()
    assert factor(server) == 1  # version 2 was bad
    with Client(server.url, timeout_s=60) as client:
        client.load("good")
        publish(store, 3, nonsense())
        with pytest.raises(ClientError, match="Nonsense"):
            client.load("swap")
        server.wait_ready()
        publish(store, 1, nonsense(), "late")
        with pytest.raises(ClientError, match="Nonsense"):
            client.load("late")
        server.wait_ready()
        assert (factor(server), factor(server, "good")) == (1, 7)
    stubs(server)[0].send_signal(signal.SIGKILL)
    server.wait_until(lambda: server.log.count("serving HTTP") == 2)
    server.wait_ready()
    assert (factor(server), factor(server, "good")) == (1, 7)
    publish(store, 4, zoo.scale(("batch", 3), 4))
    with Client(server.url, timeout_s=60) as client:
        client.load("swap")
    assert factor(server) == 4


@pytest.mark.slow
def test_instance_killed_while_loading_is_explained(start_server: StartServer, store: Path) -> None:
    """Triton's own message is only "Stub process is not healthy"."""
    zoo.add(store, "deadly", zoo.endless())
    shutil.copytree(store / "good" / "1", store / "good" / "2.old")  # of which Triton would take the number
    server = start_server("--model-store", store)

    def kill_the_loading() -> bool:
        for file in server.temporary.glob("graphkiln-*/instances/deadly*.loading"):
            with suppress(OSError):
                os.kill(int(file.name.split(".")[-2]), signal.SIGSEGV)
        return "serving HTTP" in server.log

    server.wait_until(kill_the_loading)
    assert "the process that loaded it was killed by SIGSEGV while it did this" in " ".join(server.log.split())
    with Client(server.url) as client:
        (deadly,) = [model for model in client.models() if model.name == "deadly"]
        assert "killed by SIGSEGV" in deadly.reason
        assert client.model("good").infer({"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[7.0] * 3]
