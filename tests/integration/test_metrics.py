"""graphkiln's Prometheus metrics beside Triton's on the metrics port, on the real server."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import zoo
from running import Server, StartServer

from graphkiln_backend.server.ports import fetch_metrics
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
    server.wait_until(lambda: "graphkiln_instance_info" in str(server.metrics()))  # tritonserver opens this port last
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


def test_proofs_and_restarts_while_tritonserver_is_away(
    start_server: StartServer, digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "digits").symlink_to(digits)
    zoo.add(tmp_path / "store", "unproven", zoo.scale(("batch", 3)), "max_batch_size: 4")  # without golden samples
    server = start_server("--model-store", tmp_path / "store")
    proven = {
        'graphkiln_version_proven{model="digits",version="1",backend="graphkiln",seat="python"}': 1.0,
        'graphkiln_version_proven{model="unproven",version="1",backend="onnxruntime",seat="python"}': 0.0,
    }
    server.wait_until(lambda: proven.items() <= server.metrics().items())
    (triton,) = [each for each in psutil.Process(server.process.pid).children() if each.name() == "tritonserver"]
    os.kill(triton.pid, signal.SIGKILL)
    server.wait_until(lambda: not triton.is_running() or triton.status() == psutil.STATUS_ZOMBIE)
    texts = []
    while not texts or not all(name in texts[-1] for name in proven):
        texts.append(fetch_metrics(f"http://127.0.0.1:{server.metrics_port}/metrics"))  # it answers at any time
    alone = [text for text in texts if "graphkiln_triton_info" not in text]
    assert alone
    assert not any("nv_" in text for text in alone)
    counts = [float(count) for text in texts for count in re.findall(r"graphkiln_restarts_total{.*} (.+)", text)]
    assert set(counts) <= {0.0, 1.0}
    server.wait_ready()
    restarts = {name: value for name, value in server.metrics().items() if "restarts_total" in name}
    assert sum(restarts.values()) == 1
    assert restarts['graphkiln_restarts_total{cause="server_died"}'] == 1


def test_series_end_with_their_version(start_server: StartServer, tmp_path: Path) -> None:
    """An upgrade, a reload in place and an unload: no frozen time stamp stays, which would raise an alert."""
    zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3)), "max_batch_size: 4")
    server = start_server("--model-store", tmp_path / "store", "--model-control-mode=explicit", "--load-model=m")
    server.wait_ready()

    def series() -> set[str]:
        return {
            found[1]
            for name in server.metrics()
            if name.startswith("graphkiln_self_test_timestamp_seconds") and (found := re.search('version="(.)"', name))
        }

    server.wait_until(lambda: series() == {"1"})
    with Client(server.url, timeout_s=60) as client:
        zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3)), version=2)
        client.load("m")
        server.wait_until(lambda: series() == {"2"})
        (tmp_path / "store" / "m" / "2" / "model.onnx").write_bytes(zoo.scale(("batch", 3), 5).SerializeToString())
        client.load("m")
        server.wait_until(lambda: series() == {"2"})
        client.unload("m")
        server.wait_until(lambda: series() == set())
