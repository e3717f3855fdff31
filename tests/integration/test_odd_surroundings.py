"""Servers in unusual surroundings: the root of a volume, a busy port, a parent with its own signal handling."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from running import COMMAND, StartServer, run_command

pytestmark = pytest.mark.slow


@pytest.fixture
def store(digits: Path, tmp_path: Path) -> Path:
    shutil.copytree(digits, tmp_path / "volume" / "digits")
    return tmp_path / "volume"


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
def test_store_at_the_root_of_a_volume(store: Path, start_server: StartServer, mode: str) -> None:
    for place in (store, store / "digits"):
        (place / "lost+found").mkdir(mode=0o700)
        (place / "@eaDir").mkdir()
    for name in ("empty", "docs", "__pycache__", ".git", ".ipynb_checkpoints"):
        (store / name).mkdir()
    (store / "docs" / "README.md").touch()
    (store / ".DS_Store").touch()
    os.mkfifo(store / "pipe")
    loads = ["--load-model=*"] if mode == "explicit" else []
    server = start_server("--model-store", store, f"--model-control-mode={mode}", *loads)
    server.wait_ready()
    if mode != "explicit":  # where Triton lists each folder as one that could be loaded
        listed = run_command("models", "--url", server.url)
        assert listed.returncode == 0
        assert not [name for name in ("lost+found", "empty", "docs", "__pycache__") if name in listed.stdout]
    assert [server.log.count(f"/{name} is ignored") for name in ("docs", "empty")] == [1, 1]
    assert "starting again" not in server.log
    assert server.stop()[0] == 0


def test_broken_model_is_named_and_the_server_starts_once(store: Path, start_server: StartServer) -> None:
    (store / "broken").mkdir()
    (store / "broken" / "config.pbtxt").touch()
    server = start_server("--model-store", store, "--model-control-mode=explicit", "--load-model=*")
    server.wait_until(lambda: server.status("/v2/models/digits/ready") == 200)
    assert server.status("/v2/models/broken/ready") != 200
    assert "broken is not loaded: " in server.log
    assert "has no version folder: make broken/1" in server.log
    assert "starting again" not in server.log
    assert server.stop()[0] == 0


def test_second_start_on_ports_of_a_loading_server(store: Path, start_server: StartServer) -> None:
    first = start_server("--model-store", store, "--allow-grpc=false", "--allow-metrics=false")
    first.wait_until(lambda: any(first.temporary.iterdir()))  # its run folder is made after its claims
    flags = ("--allow-grpc=false", "--allow-metrics=false", f"--http-port={first.http_port}")
    second = run_command("serve", "--model-store", store, *flags)
    assert second.returncode == 2
    assert f"port {first.http_port} (HTTP) is" in second.stderr
    first.wait_ready()
    assert first.stop()[0] == 0


def test_parent_that_ignores_sigchld_and_blocks_sigterm(
    store: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); os.execv(sys.argv[1], sys.argv[1:])"
    )
    monkeypatch.setattr("running.COMMAND", (sys.executable, "-c", program, *COMMAND))
    server = start_server("--model-store", store)
    server.wait_ready()
    assert server.stop(signal.SIGTERM)[0] == 0
