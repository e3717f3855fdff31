"""What is replaced: a server on ports that stay, as a process of this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol
from urllib.error import URLError
from urllib.request import urlopen

from graphkiln.story.server import free_ports
from rolling.proxy import STOP_S, wait


class Replaceable(Protocol):
    """A server on ports that stay, whoever serves there."""

    http_port: int

    def start(self) -> None:
        """Starts the next one and waits until it is ready."""

    def stop(self) -> None:
        """Ends it with SIGTERM, and waits until it is gone."""


class ServedProcess:
    """`graphkiln serve`; use it as a context manager.

    Args:
        store: The model store.
        log: Where its output goes.
    """

    def __init__(self, store: Path, log: Path) -> None:
        self.http_port, *rest = free_ports(3)
        self._ports = (self.http_port, *rest)
        self._store, self._log = store, log

    def start(self) -> None:
        """Starts the next one and waits until it is ready."""
        names = ("http", "grpc", "metrics")
        ports = [f"--{name}-port={port}" for name, port in zip(names, self._ports, strict=True)]
        command = [sys.executable, "-m", "graphkiln.cli", "serve", f"--model-store={self._store}", "--drain=20", *ports]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait(lambda: is_ready(self.http_port), "graphkiln serve", lambda: self._process.poll() is not None)

    def stop(self) -> None:
        """Ends it with SIGTERM.

        Raises:
            RuntimeError: It did not end as it should.
        """
        self._process.send_signal(signal.SIGTERM)
        if code := self._process.wait(STOP_S):
            raise RuntimeError(f"the server ended with {code}:\n{self._log.read_text()}")

    def __enter__(self) -> ServedProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(STOP_S)


def is_ready(port: int) -> bool:
    """Whether a server on a port of this machine is ready."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
