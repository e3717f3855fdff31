"""Model stores with small graphs, each made for one purpose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zoo
from onnx import TensorProto, helper


@pytest.fixture
def slow_store(tmp_path: Path) -> Path:
    """A store with the model `slow`: as many matrix products as the request asks for."""
    store = tmp_path / "slow store"
    zoo.add(store, "slow", zoo.slow(), 'backend: "graphkiln" max_batch_size: 1')
    return store


@pytest.fixture
def lookup_store(tmp_path: Path) -> Path:
    """A store with the model `lookup`: batches of indices into ten numbers; an index of 10 fails while it runs."""
    shape = ("batch", "length")
    nodes = [helper.make_node("Gather", ["table", "INDEX"], ["VALUE"])]
    inputs, outputs = [zoo.value("INDEX", shape, TensorProto.INT64)], [zoo.value("VALUE", shape)]
    config = """
        backend: "graphkiln"
        max_batch_size: 8
        dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: [8] }
    """
    table = np.arange(10, dtype=np.float32) * 10
    zoo.add(tmp_path / "store", "lookup", zoo.model(nodes, inputs, outputs, {"table": table}), config)
    return tmp_path / "store"
