"""A server with Triton's own backend: where it is, and what happens when it does not start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import cpp_server
import pytest
from cpp_server import LIBRARY, check_backend, start_cpp_server

from graphkiln_backend.server.installation import find_installation


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    folder = tmp_path / "backends"
    (folder / LIBRARY).parent.mkdir(parents=True)
    (folder / LIBRARY).touch()
    (folder / "lib").mkdir()
    return folder


def _pretend(monkeypatch: pytest.MonkeyPatch, binary: Path, script: str) -> None:
    """Has a script stand in for tritonserver."""
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    installation = dataclasses.replace(find_installation(), binary=binary)
    monkeypatch.setattr(cpp_server, "find_installation", lambda: installation)


def test_a_folder_without_the_library_is_an_error(tmp_path: Path, backends: Path) -> None:
    assert check_backend(backends) == backends.resolve()
    with pytest.raises(SystemExit, match=r"expected .*libtriton_onnxruntime\.so"):
        check_backend(tmp_path)


def test_libraries_beside_it_come_first(backends: Path) -> None:
    path = cpp_server._environment(backends)["LD_LIBRARY_PATH"].split(":")
    assert path[:2] == [str(backends / "onnxruntime"), str(backends / "lib")]
    assert path[2:] == find_installation().library_path.split(":")


def test_a_server_that_ends_says_why(backends: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, tmp_path / "tritonserver", "echo no such model; exit 7")
    with pytest.raises(SystemExit, match=r"ended with code 7: no such model"), start_cpp_server(backends, tmp_path):
        pytest.fail("it is not ready")


def test_a_server_is_asked_until_it_is_ready_and_stopped(
    backends: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = (
        "import sys, http.server as h, pathlib as p, re; "
        "p.Path('v2/health').mkdir(parents=True); p.Path('v2/health/ready').touch(); "
        "port = int(re.search(r'--http-port=(\\d+)', ' '.join(sys.argv))[1]); "
        "h.HTTPServer(('127.0.0.1', port), h.SimpleHTTPRequestHandler).serve_forever()"
    )
    _pretend(monkeypatch, tmp_path / "tritonserver", f'cd {tmp_path} && exec python3 -c "{serve}" "$@"')
    with start_cpp_server(backends, tmp_path) as server:
        assert server.http_url.startswith("http://127.0.0.1:")
        assert Path(f"/proc/{server.pid}").exists()
    assert not Path(f"/proc/{server.pid}").exists()


def test_a_server_that_is_never_ready_is_not_waited_for_forever(
    backends: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, tmp_path / "tritonserver", "exec sleep 60")
    monkeypatch.setattr(cpp_server, "_READY_S", 0.1)
    with pytest.raises(SystemExit, match="is not ready after"), start_cpp_server(backends, tmp_path):
        pytest.fail("it is not ready")
