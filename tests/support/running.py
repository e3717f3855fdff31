"""Run the `graphkiln` command and servers in tests, always on free ports and always stopped."""

from __future__ import annotations

import http.client
import io
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from graphkiln.story.server import free_ports
from graphkiln_client import Model

START_TIMEOUT_S = 240
SAME_SIGNAL_S = 0.35  # `graphkiln serve` counts signals within 0.3 s as one
COMMAND = (sys.executable, "-m", "graphkiln.cli")


def run_command(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the `graphkiln` command to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_here(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the `graphkiln` command to its end in this process, where its libraries are already imported.

    A process of its own takes a second to import them. What only such a process shows (an exit code that a shell sees,
    standard input, signals) is tested with `run_command`.
    """
    from graphkiln.cli.main import main  # heavy, and needed by few

    out, err, words = io.StringIO(), io.StringIO(), [*map(str, arguments)]
    with chdir(cwd or Path()), _as_command(words, env or {}), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@contextmanager
def _as_command(words: list[str], env: dict[str, str]) -> Iterator[None]:
    """Set arguments, environment and terminal width of a command; restore the loggers afterwards."""
    logger = logging.getLogger("graphkiln")
    level, handlers = logger.level, logger.handlers
    environment = {**env, "COLUMNS": "80"}
    with mock.patch.object(sys, "argv", ["graphkiln", *words]), mock.patch.dict(os.environ, environment):
        try:
            yield
        finally:
            logger.level, logger.handlers = level, handlers


@dataclass
class Server:
    """A `graphkiln serve` process of a test."""

    process: subprocess.Popen[str]
    http_port: int
    grpc_port: int
    metrics_port: int
    log_path: Path
    temporary: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"grpc://127.0.0.1:{self.grpc_port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def status(self, path: str) -> int | None:
        """HTTP status of a GET; None if there is no response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=5)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Value of every graphkiln metric with its labels; empty until the metrics port responds."""
        try:
            with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
                text = answer.read().decode()
        except URLError:
            return {}
        return {name: float(value) for name, value in re.findall(r"^(graphkiln_.+) (\S+)$", text, re.MULTILINE)}

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"the server did not get there in {timeout_s} s:\n{self.log}"
            time.sleep(0.05)

    def computed_s(self) -> float:
        """Processor seconds of all model instances."""
        times = [
            process.cpu_times()
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if is_stub(process)
        ]
        return sum(each.user + each.system for each in times)

    def wait_computing(self, before_s: float) -> None:
        """Wait until an instance computes: its processor time has grown."""
        self.wait_until(lambda: self.computed_s() > before_s + 0.2)

    def wait_ready(self) -> None:
        self.wait_until(lambda: self.status("/v2/health/ready") == 200)

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 60) -> tuple[int, float]:
        """Send a signal; return the exit code and the seconds it took."""
        begun = time.monotonic()
        self.process.send_signal(signum)
        code = self.process.wait(timeout_s)
        return code, time.monotonic() - begun


def is_stub(process: psutil.Process) -> bool:
    """True if a process is an instance of a model; false if it has just ended."""
    try:
        return any("triton_python_backend_stub" in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


StartServer = Callable[..., Server]


class Serving:
    """Start `graphkiln serve`, and stop it at the end; it must leave nothing behind."""

    def __init__(self, folder: Path, *arguments: str | Path, cwd: Path | None = None) -> None:
        self._folder = folder
        self._arguments = arguments
        self._cwd = cwd

    def __enter__(self) -> Server:
        http_port, grpc_port, metrics_port = free_ports(3)
        temporary = self._folder / f"tmp{http_port}"
        temporary.mkdir()
        log_path = self._folder / f"serve{http_port}.log"
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [
                    *COMMAND,
                    "serve",
                    *map(str, self._arguments),
                    f"--http-port={http_port}",
                    f"--grpc-port={grpc_port}",
                    f"--metrics-port={metrics_port}",
                ],
                cwd=self._cwd,
                env={**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._server = Server(process, http_port, grpc_port, metrics_port, log_path, temporary)
        return self._server

    def __exit__(self, *_: object) -> None:
        process = self._server.process
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(SAME_SIGNAL_S)
            # A served model takes 1.5 s to stop in order, which tests of stopping show; a second signal skips that.
            if process.poll() is None and "serving " in self._server.log:
                process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        left = list(self._server.temporary.rglob("*"))
        assert not left, f"serve left temporary files behind: {left}"


def settled(model: Model) -> dict[str, Any]:
    """Statistics once they no longer change: Triton counts a request after its response."""
    seen: dict[str, Any] = {}
    while seen != (now := model.statistics()):
        seen = now
        time.sleep(0.3)
    return seen
