"""Answers of a real server, in batches of several clients, hold no memory of other requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from memory_graphs import Caller, RandomGraph
from running import Serving

from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.wide]

BATCHING = "dynamic_batching { max_queue_delay_microseconds: 2000 }"
GRAPHS = {f"g{seed}": RandomGraph(seed, constants=False) for seed in (0, 2, 5)}


def call(url: str, shared: bool, seed: int) -> None:
    """Send requests of all graphs in any order, and compare the answers at once and at the end."""
    rng = np.random.default_rng(seed)
    names = [f"{name}_{engine}" for name in GRAPHS for engine in ("onnxruntime", "openvino")]
    callers = {name: Caller(GRAPHS[name.partition("_")[0]], seed) for name in names}
    with ExitStack() as opened:
        client: Any = opened.enter_context(Client(url))
        client = opened.enter_context(client.shared_memory()) if shared else client
        for name in rng.choice(names, 40):
            model = client.model(str(name))
            for _ in range(2):
                callers[name].call(
                    lambda feeds, outputs, model=model: model.infer(feeds, outputs or ()), rng.integers(1, 5)
                )
    for caller in callers.values():
        caller.check()


def test_answers_share_no_memory(tmp_path: Path) -> None:
    for name, graph in GRAPHS.items():
        for engine in ("onnxruntime", "openvino"):
            settings = f'parameters {{ key: "engine" value {{ string_value: "{engine}" }} }}'
            zoo.add(tmp_path / "store", f"{name}_{engine}", graph.model(), f"max_batch_size: 8 {BATCHING} {settings}")
    with Serving(tmp_path, "--model-store", tmp_path / "store") as server, ThreadPoolExecutor(6) as pool:
        server.wait_ready()
        urls = [server.url, server.grpc_url] * 3
        for called in [pool.submit(call, url, number % 3 == 0, number) for number, url in enumerate(urls)]:
            called.result()
