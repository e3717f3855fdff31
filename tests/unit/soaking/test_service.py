"""Connections to a service, and the guard of a soak."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from graphkiln_backend.server.tls import TlsFiles
from graphkiln_backend.system.processes import is_gone
from soaking import guard
from soaking.guard import known_runs, regions_of, remove_outside
from soaking.service import Certificates, Reach


def test_plain_connections() -> None:
    reach = Reach(http_port=1, grpc_port=2)
    assert (reach.http_url, reach.grpc_url) == ("http://127.0.0.1:1", "grpc://127.0.0.1:2")
    assert reach.security == {}
    assert reach.triton_http() == {"url": "127.0.0.1:1"}
    assert reach.triton_grpc() == {"url": "127.0.0.1:2"}


def test_mutual_tls(tmp_path: Path) -> None:
    certificates = Certificates.issue(tmp_path / "pki")
    files = TlsFiles(
        certificate=certificates.of("server")[0],
        key=certificates.of("server")[1],
        client_authorities=certificates.authority,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        reach = Reach(http_port=port, grpc_port=port, certificates=certificates)
        assert reach.http_url == f"https://127.0.0.1:{port}"
        names: list[object] = []

        def serve() -> None:
            with listener.accept()[0] as bare, files.context().wrap_socket(bare, server_side=True) as secured:
                names.append(secured.getpeercert())
                secured.sendall(b"hello")

        thread = threading.Thread(target=serve)
        thread.start()
        with reach.open_http(10) as connection:
            assert isinstance(connection, ssl.SSLSocket)
            assert connection.recv(9) == b"hello"
        thread.join()
    assert names[0]


# The guard cleans up however the soak ends.

PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from soaking.guard import Guard
from soaking.service import MARKER

folder = Path(sys.argv[1])
with Guard(folder):
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, MARKER: str(folder)},
        start_new_session=True,
    )
    print(child.pid, flush=True)
    time.sleep(600 if sys.argv[2] == "wait" else 0)
"""


def is_alive(pid: int) -> bool:
    return not is_gone(pid)


@pytest.mark.parametrize("end", [None, signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left(tmp_path: Path, end: signal.Signals | None) -> None:
    folder = tmp_path / "soak"
    folder.mkdir()
    (folder / "file").touch()
    arguments = [sys.executable, "-c", PROGRAM, str(folder), "wait" if end else "end"]
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as soak:
        assert soak.stdout
        child = int(soak.stdout.readline())
        if end:
            assert is_alive(child)
            os.killpg(soak.pid, end)
        soak.wait(60)
    deadline = time.monotonic() + 60
    while is_alive(child) or folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_shared_memory_of_ended_runs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    monkeypatch.setattr(guard, "SHARED_MEMORY", memory)
    (memory / "graphkiln-abc-instances").mkdir(parents=True)
    for name in ("graphkiln-abc-0", "graphkiln-client-7-x", "graphkiln-client-8-x", "graphkiln-other-0"):
        (memory / name).touch()
    (temporary / "graphkiln-abc").mkdir(parents=True)
    assert known_runs(temporary) == {"graphkiln-abc"}
    (temporary / "graphkiln-abc").rmdir()
    runs = known_runs(temporary)
    assert runs == {"graphkiln-abc"}, "a run is remembered when its folder is gone"
    found = [path.name for path in regions_of(7, runs)]
    assert found == ["graphkiln-abc-0", "graphkiln-abc-instances", "graphkiln-client-7-x"]
    remove_outside(7, temporary)
    assert {path.name for path in memory.iterdir()} == {"graphkiln-client-8-x", "graphkiln-other-0"}


def test_folders_of_tritons_python_backend_are_removed(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="gk-guarded0", dir="/tmp", ignore_cleanup_errors=True) as environment:
        run = f"graphkiln-{Path(environment).name[len('gk-') : -6]}"
        (tmp_path / "tmp" / run).mkdir(parents=True)
        remove_outside(7, tmp_path / "tmp")
        assert not Path(environment).exists()
