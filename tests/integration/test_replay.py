"""Weights that change in the memory of an instance of the real server are detected by the golden samples."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
from memory_damage import damage, weights_of
from running import Server, StartServer

from graphkiln_backend.graph.errors import ClientError
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

IMAGE = np.zeros((1, 1, 32, 32), np.float32)
STAGES = 'parameters { key: "parallel" value { string_value: "pipeline=2, micro_batches=2" } }'


def stubs(server: Server) -> list[int]:
    """Processes of the instances."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child.pid for child in children if "stub" in child.name()]


def total(server: Server, name: str) -> float:
    """Sum of a metric over all instances."""
    return sum(value for metric, value in server.metrics().items() if metric.startswith(name))


def ask(client: Client) -> str:
    """Send a sample; return the client's result."""
    try:
        return str(client.model("digits").infer({"INPUT_0": IMAGE}))
    except ClientError:
        return "refused"


@pytest.mark.parametrize("config", ["", STAGES], ids=["whole", "stages"])
def test_changed_weights_in_memory_are_detected(
    start_server: StartServer, digits: Path, tmp_path: Path, config: str
) -> None:
    """The whole graph, and one that is cut into stages."""
    store = tmp_path / "store"
    shutil.copytree(digits.parent, store)
    with (store / "digits" / "config.pbtxt").open("a") as file:
        file.write(f"\n{config}\n")
    server = start_server("--model-store", store, "--replay-interval", "1")
    server.wait_ready()
    with Client(server.url, max_retries=0) as client:
        expected = ask(client)
        server.wait_until(lambda: total(server, "graphkiln_self_test_replays_total") >= 2, timeout_s=60)
        assert total(server, "graphkiln_self_test_failures_total") == 0
        assert ask(client) == expected
        (stub,) = stubs(server)
        assert damage(stub, weights_of(store / "digits" / "1" / "model.onnx"))
        server.wait_until(lambda: ask(client) == "refused", timeout_s=60)
        server.wait_until(lambda: "an instance of digits version 1 no longer serves" in server.log)
        server.wait_until(lambda: ask(client) == expected)  # started again, with weights from the disk
        restarts = 'graphkiln_restarts_total{cause="wrong_outputs"}'
        server.wait_until(lambda: server.metrics().get(restarts) == 1)
    assert "OUTPUT_0: relative L2" in server.log
