"""A program that forks while a client is in use: `forked_client.py URL blocking|async`.

Prints one line for each way of forking: the result of the child, and that of its parent. A result is `answered`,
`wrong`, `hung` or the type of the error.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from graphkiln_backend.graph.errors import ClientError
from graphkiln_client import AsyncClient, Client

_TIMEOUT_S, _HANGS_S = 10.0, 30


class _InLoops:
    """An `AsyncClient` that is used by one event loop of its parent, and another one of each child or thread."""

    def __init__(self, url: str) -> None:
        self._client = AsyncClient(url, timeout_s=_TIMEOUT_S)
        self._loops = threading.local()

    def infer(self, x: Any) -> Any:
        loop = getattr(self._loops, str(os.getpid()), None)
        if loop is None:
            loop = asyncio.new_event_loop()
            setattr(self._loops, str(os.getpid()), loop)
        return loop.run_until_complete(self._client.model("m").infer({"X": x}, ["Y"]))["Y"]


class _Blocking:
    def __init__(self, url: str) -> None:
        self._client = Client(url, timeout_s=_TIMEOUT_S)

    def infer(self, x: Any) -> Any:
        return self._client.model("m").infer({"X": x}, ["Y"])["Y"]


def _use(infer: Callable[[Any], Any], value: int, rounds: int = 20) -> str:
    try:
        answers = [(np.full(64, value * 1000 + turn, np.float32)) for turn in range(rounds)]
        return "answered" if all((infer(x) == x).all() for x in answers) else "wrong"
    except ClientError as error:
        return type(error).__name__


def _fork(infer: Callable[[Any], Any], fork: Callable[[], int]) -> str:
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        faulthandler.dump_traceback_later(_HANGS_S, exit=True)
        os.write(writer, _use(infer, 1).encode())
        os._exit(0)
    parent = _use(infer, 2)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read() or "hung"
    os.waitpid(child, 0)
    return f"{answer} {parent}"


def main(url: str, kind: str) -> None:
    client: Any = _InLoops(url) if kind == "async" else _Blocking(url)
    first = _use(client.infer, 0)
    print("idle", _fork(client.infer, os.fork))
    print("unknown to Python", _fork(client.infer, ctypes.PyDLL(None).fork))
    if url.startswith("grpc") and kind == "async":
        _end(client, first)  # a fork during calls of several loops is beyond gRPC

    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            _use(client.infer, 3, 1)

    threads = [threading.Thread(target=keep_busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    print("busy", _fork(client.infer, os.fork))
    stop.set()
    for thread in threads:
        thread.join()
    _end(client, first)


def _end(client: Any, first: str) -> NoReturn:
    print("afterwards", first, _use(client.infer, 4), flush=True)
    os._exit(0)  # unclosed clients and loops are not the subject


if __name__ == "__main__":
    main(*sys.argv[1:])
