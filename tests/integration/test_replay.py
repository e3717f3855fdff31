"""An instance of the real server whose weights change in memory: golden samples find it, before a person does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import numpy_helper
from running import Server, StartServer

from graphkiln_backend.graph.errors import ClientError
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

IMAGE = np.zeros((1, 1, 32, 32), np.float32)


def weights(store: Path) -> list[bytes]:
    """The bytes of every weight that is too long to stand in memory by chance."""
    graph = onnx.load(store / "digits" / "1" / "model.onnx").graph
    arrays = [numpy_helper.to_array(tensor) for tensor in graph.initializer]
    return [array.tobytes() for array in arrays if array.dtype == np.float32 and array.size > 4]


def stubs(server: Server) -> list[int]:
    """Processes of the instances."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child.pid for child in children if "stub" in child.name()]


def total(server: Server, name: str) -> float:
    """The sum of a metric over all instances."""
    return sum(value for metric, value in server.metrics().items() if metric.startswith(name))


def damage(pid: int, patterns: list[bytes]) -> int:
    """Overwrites weights in the memory of a process, as a fault of the memory would; returns how many were found."""
    found = 0
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for start, end in _writable(maps):
            memory.seek(start)
            try:
                content = memory.read(end - start)
            except OSError:
                continue
            for pattern in patterns:
                at = content.find(pattern)
                while at >= 0:
                    memory.seek(start + at)
                    memory.write(np.frombuffer(pattern, np.float32)[::-1].tobytes())
                    found += 1
                    at = content.find(pattern, at + 1)
    return found


def _writable(maps: list[str]) -> Iterator[tuple[int, int]]:
    for line in maps:
        addresses, permissions, *_ = line.split()
        if permissions.startswith("rw"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield start, end


def ask(client: Client) -> str:
    """What a client gets for a sample."""
    try:
        return str(client.model("digits").infer({"INPUT_0": IMAGE}))
    except ClientError:
        return "refused"


def test_weights_that_change_in_memory_are_found(start_server: StartServer, digits: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(digits.parent, store)
    server = start_server("--model-store", store, "--replay-interval", "1")
    server.wait_ready()
    with Client(server.url, max_retries=0) as client:
        expected = ask(client)
        server.wait_until(lambda: total(server, "graphkiln_self_test_replays_total") >= 2, timeout_s=60)
        assert total(server, "graphkiln_self_test_failures_total") == 0
        assert ask(client) == expected
        (stub,) = stubs(server)
        assert damage(stub, weights(store))
        server.wait_until(lambda: ask(client) == "refused", timeout_s=60)
        server.wait_until(lambda: "an instance of digits version 1 serves no more" in server.log)
        server.wait_until(lambda: ask(client) == expected)  # started again, with weights from the disk
        restarts = 'graphkiln_restarts_total{cause="wrong_outputs"}'
        server.wait_until(lambda: server.metrics().get(restarts) == 1)
    assert "OUTPUT_0: relative L2" in server.log
