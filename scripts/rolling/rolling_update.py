"""Replaces two servers behind haproxy, one after the other, while requests come at a fixed rate; none may fail.

What Kubernetes does to a pod, here with the same signals: the proxy is told to send nothing new to the old server
(endpoints), some seconds pass (preStop), SIGTERM, a new server, ready, traffic. Nothing retries: neither the proxy nor
the caller. `--without-pause` leaves out the first two, which shows what they are for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp

from graphkiln.story.server import free_ports

_ROOT = Path(__file__).resolve().parents[2]
_READY_S = 300
_STOP_S = 60
_PAUSE_S = 2.0
_TIMEOUT_S = 60
_CONFIGURATION = """\
global
    stats socket {socket} mode 600 level admin
defaults
    mode http
    timeout connect 10s
    timeout client 120s
    timeout server 120s
    retries 0
frontend front
    bind 127.0.0.1:{port}
    default_backend servers
backend servers
    balance roundrobin
    option httpchk GET /v2/health/ready
    server one 127.0.0.1:{one} check inter 500ms
    server two 127.0.0.1:{two} check inter 500ms
"""


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        rate: Requests that were sent each second.
        replacements: How often a server was replaced.
        answered: Right answers.
        failed: What else came -> how often.
        seconds: How long requests were sent.
    """

    rate: float
    replacements: int = 0
    answered: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def fail(self, reason: str) -> None:
        """Counts a request that failed."""
        self.failed[reason] = self.failed.get(reason, 0) + 1


class Proxy:
    """haproxy in front of two ports; use it as a context manager."""

    def __init__(self, folder: Path, one: int, two: int) -> None:
        (self.port,) = free_ports(1)
        self._socket = folder / "haproxy.sock"
        self._file = folder / "haproxy.cfg"
        self._file.write_text(_CONFIGURATION.format(socket=self._socket, port=self.port, one=one, two=two))

    def __enter__(self) -> Proxy:
        self._process = subprocess.Popen(["haproxy", "-db", "-f", self._file], stdout=subprocess.DEVNULL)
        _wait(self._socket.exists, "haproxy", self._process)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(_STOP_S)

    def tell(self, command: str) -> str:
        """Sends a command of haproxy's runtime API."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            connection.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()

    def is_up(self, name: str) -> bool:
        """Whether it sends requests to a server."""
        lines = (line.split(",") for line in self.tell("show stat").splitlines())
        return any(line[:2] == ["servers", name] and line[17].startswith("UP") for line in lines if len(line) > 17)


class Replaceable:
    """A server on ports that stay, whoever serves there; use it as a context manager."""

    def __init__(self, store: Path, log: Path) -> None:
        self.ports = free_ports(3)
        self._store, self._log = store, log

    def start(self) -> None:
        """Starts the next one and waits until it is ready."""
        names = ("http", "grpc", "metrics")
        ports = [f"--{name}-port={port}" for name, port in zip(names, self.ports, strict=True)]
        command = [sys.executable, "-m", "graphkiln.cli", "serve", f"--model-store={self._store}", "--drain=20", *ports]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        _wait(self._is_ready, "graphkiln serve", self._process)

    def stop(self) -> None:
        """As Kubernetes does it."""
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(_STOP_S)
        if code:
            raise RuntimeError(f"the server ended with {code}:\n{self._log.read_text()}")

    def __enter__(self) -> Replaceable:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(_STOP_S)

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.ports[0]}/v2/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False


def _wait(condition: Callable[[], bool], what: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{what} ended with {process.returncode}, or did not get ready in {_READY_S} s")
        time.sleep(0.05)


def replace(proxy: Proxy, name: str, server: Replaceable, *, pause: bool) -> None:
    """Replaces one server, as a rolling update does."""
    if pause:
        proxy.tell(f"set server servers/{name} state drain")
        time.sleep(_PAUSE_S)
    server.stop()
    server.start()
    if pause:
        proxy.tell(f"set server servers/{name} state ready")
    deadline = time.monotonic() + _READY_S
    while not proxy.is_up(name) and time.monotonic() < deadline:
        time.sleep(0.05)


async def send(url: str, outcome: Outcome, stop: asyncio.Event) -> None:
    """Sends requests at the outcome's rate, whatever becomes of earlier ones, until it is told to stop."""
    row = [0.5] * 1024
    body = {"inputs": [{"name": "INPUT_0", "shape": [1, 1, 32, 32], "datatype": "FP32", "data": row}]}
    text, begun, sent = json.dumps(body).encode(), time.monotonic(), 0
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as tasks:
        while not stop.is_set():
            tasks.create_task(_ask(session, url, text, outcome))
            sent += 1
            await asyncio.sleep(max(0.0, begun + sent / outcome.rate - time.monotonic()))
    outcome.seconds = time.monotonic() - begun


async def _ask(session: aiohttp.ClientSession, url: str, body: bytes, outcome: Outcome) -> None:
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
            found = await answer.json(content_type=None)
            if answer.status == 200 and len(found["outputs"][0]["data"]) == 10:
                outcome.answered += 1
            else:
                outcome.fail(f"HTTP {answer.status}")
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        outcome.fail(type(error).__name__)


async def roll(rate: float, rounds: int, *, pause: bool) -> Outcome:
    """Starts everything, replaces each server as often as it is told, and counts."""
    outcome, stop = Outcome(rate), asyncio.Event()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphkiln-rolling-")))
        store = _ROOT / "model_repository"
        servers = {name: stack.enter_context(Replaceable(store, folder / name)) for name in ("one", "two")}
        proxy = stack.enter_context(Proxy(folder, *(server.ports[0] for server in servers.values())))
        url = f"http://127.0.0.1:{proxy.port}/v2/models/digits/infer"
        sending = asyncio.create_task(send(url, outcome, stop))
        try:
            for _ in range(rounds):
                for name, server in servers.items():
                    await asyncio.to_thread(replace, proxy, name, server, pause=pause)
                    outcome.replacements += 1
        finally:
            stop.set()
            await sending
    return outcome


def main() -> None:
    """Runs it from the command line; the exit code is 1 where a request failed."""
    parser = argparse.ArgumentParser(description="Replaces two servers behind haproxy under load.")
    parser.add_argument("--rate", type=float, default=200, help="requests per second")
    parser.add_argument("--rounds", type=int, default=2, help="how often each server is replaced")
    parser.add_argument("--without-pause", action="store_true", help="SIGTERM at once, as without preStop")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    if shutil.which("haproxy") is None:
        sys.exit("graphkiln: no haproxy on this machine: apt-get install haproxy")
    outcome = asyncio.run(roll(options.rate, options.rounds, pause=not options.without_pause))
    text = json.dumps(asdict(outcome), indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    sys.exit(1 if outcome.failed else 0)


if __name__ == "__main__":
    main()
