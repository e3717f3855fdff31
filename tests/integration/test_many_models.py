"""Sixty models in one store: all serve, and the number of threads stays that of sixty instances."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
import zoo
from running import START_TIMEOUT_S, StartServer

from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

MODELS = 60
LEAST_THREADS = 2 * MODELS


def test_sixty_models(tmp_path: Path, start_server: StartServer) -> None:
    names = [f"m{number}" for number in range(MODELS)]
    for name in names:
        zoo.add(tmp_path / "store", name, zoo.scale(("batch", 3)), "instance_group { count: 1 }")
    server = start_server("--model-store", tmp_path / "store")
    server.wait_until(lambda: server.status("/v2/health/ready") == 200, timeout_s=3 * START_TIMEOUT_S)
    (triton,) = [each for each in psutil.Process(server.process.pid).children() if each.name() == "tritonserver"]
    threads = triton.num_threads()
    assert LEAST_THREADS < threads < 26 * MODELS, "36 for each, with Triton's own pools"
    ones = {"x": np.ones((1, 3), np.float32)}
    with Client(server.grpc_url) as client:
        answers = [client.model(name).infer(ones)["y"] for name in names]
    assert [answer.tolist() for answer in answers] == [[[2.0, 2.0, 2.0]]] * MODELS
    assert server.stop(timeout_s=120)[0] == 0
