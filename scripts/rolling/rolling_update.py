"""Replaces two servers behind haproxy, one after the other, while requests come at a fixed rate; none may fail.

What Kubernetes does to a pod, here with the same signals: the proxy is told to send nothing new to the old server
(endpoints), some seconds pass (preStop), SIGTERM, a new server, ready, traffic. Nothing retries: neither the proxy nor
the caller. `--without-pause` leaves out the first two, which shows what they are for. With `--image` the servers are
containers, played by podman from deploy/kubernetes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from graphkiln.story.request import machine_facts
from rolling.load import Outcome, Sender
from rolling.pods import ServedPod
from rolling.proxy import Proxy, wait
from rolling.servers import Replaceable, ServedProcess

_ROOT = Path(__file__).resolve().parents[2]
_NAMES = ("one", "two")
_PAUSE_S = 2.0


def replace(proxy: Proxy, name: str, server: Replaceable, *, pause: bool) -> None:
    """Replaces one server, as a rolling update does."""
    if pause:
        proxy.tell(f"set server servers/{name} state drain")
        time.sleep(_PAUSE_S)
    server.stop()
    server.start()
    if pause:
        proxy.tell(f"set server servers/{name} state ready")
    wait(lambda: proxy.is_up(name), f"server {name}")


async def roll(rate: float, rounds: int, image: str, *, pause: bool) -> Outcome:
    """Starts everything, replaces each server as often as it is told, and counts.

    Args:
        rate: Requests per second.
        rounds: How often each server is replaced.
        image: Of the containers; empty for processes.
        pause: Whether the proxy is told before a server goes.
    """
    outcome, stop = Outcome(rate, "containers" if image else "processes"), asyncio.Event()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphkiln-rolling-")))
        store = _ROOT / "model_repository"
        servers: dict[str, Replaceable] = {}
        for name in _NAMES:
            if image:
                servers[name] = stack.enter_context(ServedPod(store, folder / name, image))
            else:
                servers[name] = stack.enter_context(ServedProcess(store, folder / name))
        proxy = stack.enter_context(Proxy(folder, *(server.http_port for server in servers.values())))
        sender = Sender(f"http://127.0.0.1:{proxy.port}/v2/models/digits/infer", outcome)
        sending = asyncio.create_task(sender.run(stop))
        try:
            for _ in range(rounds):
                for name, server in servers.items():
                    await asyncio.to_thread(replace, proxy, name, server, pause=pause)
                    outcome.replacements += 1
        finally:
            stop.set()
            await sending
    return outcome


def machine() -> dict[str, object]:
    """Where and when it was: figures of a machine that is busy are others."""
    facts = machine_facts()
    return {**{name: facts[name] for name in ("machine", "system", "date")}, "load_average": os.getloadavg()}


def main() -> None:
    """Runs it from the command line; the exit code is 1 where a request failed."""
    parser = argparse.ArgumentParser(description="Replaces two servers behind haproxy under load.")
    parser.add_argument("--rate", type=float, default=200, help="requests per second")
    parser.add_argument("--rounds", type=int, default=2, help="how often each server is replaced")
    parser.add_argument("--image", default="", help="containers of this image, such as graphkiln:test, by podman")
    parser.add_argument("--without-pause", action="store_true", help="SIGTERM at once, as without preStop")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended, however this ends
    for program in ("haproxy", "podman", "kubectl") if options.image else ("haproxy",):
        if shutil.which(program) is None:
            sys.exit(f"graphkiln: no {program} on this machine: apt-get install haproxy podman kubernetes-client")
    outcome = asyncio.run(roll(options.rate, options.rounds, options.image, pause=not options.without_pause))
    text = json.dumps({"pause": not options.without_pause, **asdict(outcome), "machine": machine()}, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    sys.exit(1 if outcome.failed else 0)


if __name__ == "__main__":
    main()
