"""Explicit mode on a real server: what a user has loaded stays, whatever failed before, however soon it was mended."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import zoo
from running import StartServer

from graphkiln_backend.graph.errors import ClientError
from graphkiln_client import Client

WRONG = 'input [ { name: "x" data_type: TYPE_FP32 dims: [999] } ]'


def add(store: Path, factor: float, version: int, extra: str = "") -> None:
    shutil.rmtree(store / "m" / str(version), ignore_errors=True)
    zoo.add(store, "m", zoo.scale(("batch", 3), factor), f"max_batch_size: 8 {extra}", version=version)


def answer(client: Client) -> float:
    return float(client.model("m").infer({"x": np.ones((1, 3), np.float32)})["y"][0, 0])


@pytest.mark.wide
@pytest.mark.parametrize("seed", [0, 1])
def test_a_mended_model_serves_and_stays(start_server: StartServer, tmp_path: Path, seed: int) -> None:
    """Pauses of 0 to 10 s between a failed load, the next one and an unload; two versions, in place and beside."""
    store, chance = tmp_path / "store", random.Random(seed)
    zoo.add(store, "keep", zoo.scale(("batch", 3), 1), "")
    add(store, 1, 1)
    server = start_server("--model-store", store, "--model-control-mode=explicit", "--load-model=keep")
    server.wait_ready()
    pauses = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, *(chance.uniform(0, 4) for _ in range(4))]
    chance.shuffle(pauses)
    with Client(server.url, timeout_s=60) as client:
        for turn, pause in enumerate(pauses):
            version, factor = chance.choice([1, 2]), turn + 2.0
            add(store, factor, version, WRONG)
            with pytest.raises(ClientError, match="load failed"):
                client.load("m")
            assert server.status("/v2/health/ready") == 200
            time.sleep(pause)
            newest = max(int(path.name) for path in (store / "m").iterdir() if path.name.isdecimal())
            add(store, factor, newest)
            client.load("m")
            until = time.monotonic() + 3
            while time.monotonic() < until:
                assert answer(client) == factor, f"a pause of {pause} s"
                time.sleep(0.1)
            if chance.random() < 0.5:
                client.unload("m")
