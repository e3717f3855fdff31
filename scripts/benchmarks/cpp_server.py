"""Triton with its C++ onnxruntime backend, where somebody has built it: a peer, in a tritonserver of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphkiln.story.server import LocalServer, ending_with_us, free_ports, stop
from graphkiln_backend.server.installation import find_installation

LIBRARY = Path("onnxruntime") / "libtriton_onnxruntime.so"
_HOST = "127.0.0.1"
_READY_S = 120.0


def check_backend(folder: Path) -> Path:
    """The folder, with an absolute path.

    Raises:
        SystemExit: It holds no C++ backend.
    """
    if not (folder / LIBRARY).is_file():
        sys.exit(f"--cpp-backend {folder}: expected {folder / LIBRARY}")
    return folder.resolve()


@contextmanager
def start_cpp_server(backends: Path, store: Path) -> Iterator[LocalServer]:
    """Serves a model repository on free ports until the context is left.

    Args:
        backends: A backend directory with `LIBRARY`; the libraries that this needs may lie in `lib` beside or above it.
        store: Its configurations name the backend `onnxruntime`.

    Raises:
        SystemExit: The server ended, or is not ready in time; the message has the end of its log.
    """
    http, grpc, metrics = free_ports(3)
    with tempfile.TemporaryFile("w+") as log:
        # fmt: off
        command = [
            *ending_with_us(), str(find_installation().binary), f"--model-repository={store}",
            f"--backend-directory={backends}",
            f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", f"--http-address={_HOST}",
            f"--grpc-address={_HOST}", f"--metrics-address={_HOST}", "--disable-auto-complete-config",
            "--exit-timeout-secs=5",
        ]
        # fmt: on
        server = subprocess.Popen(
            command,
            env=_environment(backends),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            reason = _wait_ready(server, f"http://{_HOST}:{http}/v2/health/ready")
            if reason:
                log.seek(0)
                sys.exit(f"the server with the C++ backend {reason}: {log.read()[-2000:]}")
            yield LocalServer(http_url=f"http://{_HOST}:{http}", grpc_url=f"grpc://{_HOST}:{grpc}", pid=server.pid)
        finally:
            stop(server)


def _environment(backends: Path) -> dict[str, str]:
    libraries = [backends / "onnxruntime", backends / "lib", backends.parent / "lib"]
    found = [str(folder) for folder in libraries if folder.is_dir()]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join([*found, find_installation().library_path])}


def _wait_ready(server: subprocess.Popen[bytes], url: str) -> str:
    """Why it is not ready; empty when it is."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            return f"ended with code {server.returncode}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return ""
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    return f"is not ready after {_READY_S:g} s"
