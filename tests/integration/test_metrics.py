"""graphkiln's Prometheus metrics on Triton's metrics port, on the real server."""

from __future__ import annotations

import time

import numpy as np
import pytest
from running import Server

from graphkiln_client import Client

pytestmark = pytest.mark.server


def settled_metrics(server: Server) -> dict[str, float]:
    """Metrics after Triton's warm-up requests are counted; they are published once a second."""

    def batches(found: dict[str, float]) -> list[float]:
        return [number for name, number in found.items() if name.startswith("graphkiln_batch_size_count")]

    seen = server.metrics()
    time.sleep(1.5)
    while batches(seen) != batches(now := server.metrics()):
        seen = now
        time.sleep(1.5)
    return now


def test_every_metric_has_the_right_value(server: Server) -> None:
    server.wait_until(lambda: bool(server.metrics()))  # this port opens last
    before = settled_metrics(server)

    def value(found: dict[str, float], name: str, *words: str) -> float:
        (key,) = (key for key in found if key.startswith(name + "{") and all(word in key for word in words))
        assert 'model="digits"' in key
        assert 'version="1"' in key
        return found[key]

    info = ('engine="onnxruntime"', 'precision="fp32"', 'device="cpu"')
    assert value(before, "graphkiln_instance_info", *info) == 1
    assert 0 < value(before, "graphkiln_warmup_seconds") < value(before, "graphkiln_load_seconds") < 60
    assert 0 <= value(before, "graphkiln_self_test_error") < 1e-4
    assert value(before, "graphkiln_fallbacks_total") == 0
    assert value(before, "graphkiln_shared_memory_bytes") >= 1 << 20
    with Client(server.url) as client:
        for rows in (1, 3, 3):
            client.model("digits").infer({"INPUT_0": np.zeros((rows, 1, 32, 32), np.float32)})
    counted = value(before, "graphkiln_batch_size_count")
    server.wait_until(lambda: value(server.metrics(), "graphkiln_batch_size_count") == counted + 3)
    after = server.metrics()
    for bound, count in (('le="1"', 1), ('le="2"', 1), ('le="4"', 3), ('le="+Inf"', 3)):
        name = "graphkiln_batch_size_bucket"
        assert value(after, name, bound) - value(before, name, bound) == count
    assert value(after, "graphkiln_batch_size_sum") - value(before, "graphkiln_batch_size_sum") == 7
