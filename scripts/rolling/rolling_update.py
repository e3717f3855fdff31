"""Replace two servers behind haproxy, one after the other, while requests come at a fixed rate; none may fail.

The steps of Kubernetes with a pod, with the same signals: the proxy drains the old server (endpoints), some seconds
pass (preStop), SIGTERM, a new server, ready, traffic. Neither the proxy nor the caller retries. `--without-pause`
leaves out the first two steps and shows why they exist. With `--image` the servers are containers, which podman runs
from deploy/kubernetes. With `--from` the servers are first those of another release; a round replaces them by this
checkout's, the next one brings them back: an upgrade, and the way back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from graphkiln.story.variants import machine_facts
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.golden import GoldenSamples
from rolling.pods import ServedPod
from rolling.servers import SERVE, Proxy, Replaceable, ServedProcess, wait

_ROOT = Path(__file__).resolve().parents[2]
_NAMES = ("one", "two")
_PAUSE_S = 2.0
_TIMEOUT_S = 60
_TOLERANCE = 1e-4  # of scores; larger than differences between engines, smaller than between images


@dataclass
class Outcome:
    """Outcome of a rolling update.

    Attributes:
        rate: Requests per second.
        kind: `processes` or `containers`.
        replacements: Number of replacements.
        sent: Number of requests.
        answered: Number of correct answers.
        starts: Seconds from the start of each server to the first answer of its readiness, with the release.
        failed: Number of failed requests by reason.
        seconds: Duration of the requests.
        latency_ms: Percentiles, from the time when a request was due.
    """

    rate: float
    kind: str = "processes"
    replacements: int = 0
    sent: int = 0
    answered: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    starts: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    latency_ms: dict[str, float] = field(default_factory=dict)

    def fail(self, reason: str) -> None:
        """Count a request that failed."""
        self.failed[reason] = self.failed.get(reason, 0) + 1


@dataclass(frozen=True)
class Question:
    """An inference request whose answer is known: the row as a binary tensor; the answer is JSON.

    Source: "Binary Tensor Data Extension" in Triton's documentation of its protocol.

    Attributes:
        row: A sample, with the dimension of the batch.
        scores: The row of the answer.
    """

    row: AnyArray
    scores: AnyArray

    @classmethod
    def golden(cls, version: Path) -> Question:
        """The first golden sample of a version."""
        samples = GoldenSamples.read(version / "golden.npz")
        return cls(samples.inputs["INPUT_0"][:1], samples.graph_outputs["OUTPUT_0"][0])

    def request(self) -> tuple[bytes, dict[str, str]]:
        """Body and headers."""
        content = self.row.tobytes()
        tensor = {"name": "INPUT_0", "shape": self.row.shape, "datatype": "FP32"}
        described = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(content)}}]}).encode()
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(described))}
        return described + content, headers

    def is_answered_by(self, body: bytes) -> bool:
        """Return true if a body has the scores."""
        try:
            scores = json.loads(body)["outputs"][0]["data"]
        except (ValueError, KeyError, IndexError, TypeError):
            return False
        return len(scores) == len(self.scores) and bool(np.allclose(scores, self.scores, atol=_TOLERANCE))


async def send(url: str, question: Question, outcome: Outcome, stop: asyncio.Event) -> None:
    """Send the same request at a rate until `stop` is set, wait for the last responses, and count outcomes.

    Args:
        url: `http://HOST:PORT/v2/models/NAME/infer`.
        question: The request.
        outcome: Rate and counts.
        stop: Ends the sending.
    """
    body, headers = question.request()
    begun, latencies_ms = time.monotonic(), list[float]()
    timeout, connector = aiohttp.ClientTimeout(total=_TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as tasks:

        async def ask(due: float) -> None:
            try:
                async with session.post(url, data=body, headers=headers) as response:
                    status, answer = response.status, await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                outcome.fail(type(error).__name__)
                return
            if status == 200 and question.is_answered_by(answer):
                outcome.answered += 1
                latencies_ms.append((time.monotonic() - due) * 1e3)
            else:
                outcome.fail("wrong answer" if status == 200 else f"HTTP {status}")

        while not stop.is_set():
            due = begun + outcome.sent / outcome.rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.create_task(ask(due))
            outcome.sent += 1
        outcome.seconds = time.monotonic() - begun
    if latencies_ms:
        found = np.percentile(latencies_ms, (50, 99, 100))
        outcome.latency_ms = dict(zip(("p50", "p99", "worst"), (round(float(ms), 1) for ms in found), strict=True))


def replace(proxy: Proxy, name: str, server: Replaceable, *, pause: bool) -> float:
    """Replace one server, as a rolling update does, and return the seconds until it is ready."""
    if pause:
        proxy.command(f"set server servers/{name} state drain")
        time.sleep(_PAUSE_S)
    server.stop()
    begun = time.monotonic()
    server.start()
    seconds = time.monotonic() - begun
    if pause:
        proxy.command(f"set server servers/{name} state ready")
    wait(lambda: proxy.is_up(name), f"server {name}")
    return seconds


async def roll(rate: float, rounds: int, image: str, other: Sequence[str], *, pause: bool) -> Outcome:
    """Start everything, replace each server some times, and count outcomes.

    Args:
        rate: Requests per second.
        rounds: Replacements of each server.
        image: Image of the containers; empty for processes.
        other: `serve` of another release, with which processes begin and to which every second round returns.
        pause: Drain a server before it ends.
    """
    outcome, stop = Outcome(rate, "containers" if image else "processes"), asyncio.Event()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphkiln-rolling-")))
        store = _ROOT / "model_repository"
        servers: dict[str, Replaceable] = {}
        processes: dict[str, ServedProcess] = {}
        for name in _NAMES:
            if image:
                servers[name] = stack.enter_context(ServedPod(store, folder / name, image))
            else:
                served = processes[name] = ServedProcess(store, folder / name, other or SERVE)
                servers[name] = stack.enter_context(served)
        proxy = stack.enter_context(Proxy(folder, *(server.http_port for server in servers.values())))
        url = f"http://127.0.0.1:{proxy.port}/v2/models/digits/infer"
        question = Question.golden(store / "digits" / "1")
        sending = asyncio.create_task(send(url, question, outcome, stop))
        try:
            for number in range(rounds):
                back = bool(other) and number % 2 == 1
                for name, server in servers.items():
                    if process := processes.get(name):
                        process.command = other if back else SERVE
                    seconds = await asyncio.to_thread(replace, proxy, name, server, pause=pause)
                    outcome.starts.append(("other" if back else "this", round(seconds, 1)))
                    outcome.replacements += 1
        finally:
            stop.set()
            await sending
    return outcome


def machine() -> dict[str, object]:
    """Machine, system, date and load average."""
    facts = machine_facts()
    return {**{name: facts[name] for name in ("machine", "system", "date")}, "load_average": os.getloadavg()}


def main() -> None:
    """Run from the command line; the exit code is 1 if a request failed."""
    parser = argparse.ArgumentParser(description="Replace two servers behind haproxy under load.")
    parser.add_argument("--rate", type=float, default=200, help="requests per second")
    parser.add_argument("--rounds", type=int, default=2, help="replacements of each server")
    parser.add_argument("--image", default="", help="containers of this image, such as graphkiln:test, by podman")
    parser.add_argument("--from", dest="other", default="", metavar="COMMAND", help="begin with, and return to, this")
    parser.add_argument("--without-pause", action="store_true", help="SIGTERM at once, as without preStop")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    if options.other and options.image:
        parser.error("--from is a command, and --image has containers: give one of them")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all processes end
    for program in ("haproxy", "podman", "kubectl") if options.image else ("haproxy",):
        if shutil.which(program) is None:
            sys.exit(f"graphkiln: no {program} on this machine: apt-get install haproxy podman kubernetes-client")
    other = shlex.split(options.other)
    outcome = asyncio.run(roll(options.rate, options.rounds, options.image, other, pause=not options.without_pause))
    text = json.dumps({"pause": not options.without_pause, **asdict(outcome), "machine": machine()}, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    sys.exit(1 if outcome.failed else 0)


if __name__ == "__main__":
    main()
