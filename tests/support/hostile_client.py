"""A process that asks hostile servers and prints one line of JSON per URL.

    python hostile_client.py URL...

Its memory is limited: what a server can make it take, it cannot have.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from graphkiln_backend.graph.errors import ClientError
from graphkiln_client import AsyncClient, Client

ROOM_BYTES = 256 << 20
X = {"X": np.zeros(3, np.float32)}


def ask(url: str) -> Any:
    with Client(url, timeout_s=20, max_retries=3) as client:
        return client.model("m").infer(X) if "#metadata" not in url else client.model("m").metadata


async def ask_async(url: str) -> Any:
    async with AsyncClient(url, timeout_s=20, max_retries=3) as client:
        return await client.model("m").infer(X) if "#metadata" not in url else await client.model("m").metadata()


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def report(kind: str, url: str) -> dict[str, Any]:
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = str(ask(url) if kind == "blocking" else asyncio.run(ask_async(url)))[:100]
        error = ""
    except ClientError as caught:
        found, error = str(caught), type(caught).__name__
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"url": url, "kind": kind, "error": error, "says": found, "kib": grown, "s": time.monotonic() - begun}


if __name__ == "__main__":
    limit_memory()
    for address in sys.argv[1:]:
        for which in ("blocking", "async"):
            print(json.dumps(report(which, address)), flush=True)
