"""The server for measurements, with a fake process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from graphkiln.story import server as module
from graphkiln.story.server import PortTaken, start_server
from graphkiln_backend.graph.errors import ConnectionFailed, MeasurementError
from graphkiln_client import Health, ServedModel

READY = Health(live=True, ready=True)
LOADING = Health(
    live=True, ready=False, not_ready=(ServedModel(name="m", version="1", state="LOADING", reason="soon"),)
)
FAILED = Health(
    live=True,
    ready=False,
    not_ready=(
        ServedModel(name="m", version="1", state="UNAVAILABLE", reason="no room"),
        ServedModel(name="n", version="1", state="LOADING", reason=""),
    ),
)


class FakeProcess:
    """A server process.

    Attributes:
        code: Its exit code, once it ended.
    """

    pid = 4242

    def __init__(self, command: Sequence[str], options: dict[str, Any]) -> None:
        self.command, self.options = list(command), options
        self.code: int | None = None
        self.events: list[str] = []

    @property
    def returncode(self) -> int | None:
        return self.code

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.events.append("terminate")
        self.code = 0

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            raise subprocess.TimeoutExpired("serve", timeout or 0)
        return self.code


class Scene:
    """Successive states of the server; the last one is repeated."""

    def __init__(self) -> None:
        self.states: list[Health | Exception | int] = [READY]
        self.processes: list[FakeProcess] = []
        self.output = ""

    def start(self, command: Sequence[str], **options: Any) -> FakeProcess:
        process = FakeProcess(command, options)
        self.processes.append(process)
        if self.output:
            options["stdout"].write(self.output)
            options["stdout"].flush()
        return process

    def client(self, url: str, **_: Any) -> Self:
        assert url.startswith("http://127.0.0.1:")
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def health(self) -> Health:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, int):
            self.processes[-1].code = state
            raise ConnectionFailed("gone")
        if isinstance(state, Exception):
            raise state
        return state


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene()
    monkeypatch.setattr(subprocess, "Popen", scene.start)
    monkeypatch.setattr(module, "Client", scene.client)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    return scene


class TestStart:
    def test_start_command(self, scene: Scene) -> None:
        with start_server(Path("one"), Path("two"), flags=("--set", "m.engine=auto")) as server:
            (process,) = scene.processes
            assert process.command[:5] == [sys.executable, "-P", "-m", "graphkiln.cli", "serve"]
            assert process.command[5:9] == ["--model-store=one", "--model-store=two", "--set", "m.engine=auto"]
            ports = dict(word.removeprefix("--").split("-port=") for word in process.command[9:])
            assert list(ports) == ["http", "grpc", "metrics"]
            assert len(set(ports.values())) == 3
            assert server.http_url == f"http://127.0.0.1:{ports['http']}"
            assert server.urls == (server.http_url, f"grpc://127.0.0.1:{ports['grpc']}")
            assert server.pid == 4242
            assert server.metrics_url == f"http://127.0.0.1:{ports['metrics']}/metrics"

    def test_waits_until_every_model_is_ready(self, scene: Scene) -> None:
        scene.states = [ConnectionFailed("not yet"), ConnectionFailed("not yet"), LOADING, READY]
        with start_server(Path("store")):
            assert scene.states == [READY]

    def test_server_deadline(self, scene: Scene) -> None:
        scene.states = [LOADING]
        with pytest.raises(MeasurementError, match="not ready in time"), start_server(Path("store"), deadline_s=0.01):
            pass
        assert scene.processes[0].events == ["terminate"]


@pytest.mark.parametrize(
    ("states", "output", "words"),
    [
        ([LOADING, FAILED], "", r"^m: no room$"),
        (
            [ConnectionFailed("not yet"), 2],
            "loading\n  no such flag  \n\n",
            "^the server ended with code 2: no such flag$",
        ),
    ],
)
def test_failed_server_is_stopped(scene: Scene, tmp_path: Path, states: list[Any], output: str, words: str) -> None:
    scene.states, scene.output = states, output
    with pytest.raises(MeasurementError, match=words), start_server(Path("store"), log=tmp_path / "log"):
        pytest.fail("it is not ready")
    assert [process.events for process in scene.processes] == [["terminate"]]  # not tried again


# Ports that another program takes before the server does.

IN_USE = "ERROR port 40001 (HTTP) is in use (stop the program that holds it)\n"


def test_taken_port_is_replaced(scene: Scene, tmp_path: Path) -> None:
    scene.states, scene.output = [ConnectionFailed("not yet"), 2, READY], IN_USE
    with start_server(Path("store"), log=tmp_path / "log") as server:
        assert server.pid == 4242
    lost, found = scene.processes
    assert lost.events == found.events == ["terminate"]
    assert (tmp_path / "log").read_text() == IN_USE, "of the second one alone"
    assert lost.command[-3:] != found.command[-3:]


def test_port_taken_repeatedly(scene: Scene, tmp_path: Path) -> None:
    scene.states, scene.output = [2], IN_USE
    with (
        pytest.raises(PortTaken, match="ended with code 2: ERROR port 40001"),
        start_server(Path("store"), log=tmp_path / "log"),
    ):
        pytest.fail("it is not ready")
    assert len(scene.processes) == 3
