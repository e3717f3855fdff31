"""Copies of a model on separate cores, served: idle copies get the work, and the weights are in memory once."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir
import psutil
import pytest
import zoo
from graphs import draw, graph
from running import Server, Serving, is_stub

from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

COPIES = """max_batch_size: 1
instance_group [ { count: 2 kind: KIND_CPU } ]
parameters { key: "parallel" value { string_value: "data=2" } }"""
# Rounds of a request that takes seconds, and of one that takes milliseconds; number of the short ones.
LONG, SHORT, CALLS = 12_000, 1, 20
WIDTH, HIDDEN = 1024, 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("copies store")
    zoo.add(store, "uneven", zoo.slow(), COPIES)
    weights = {"w1": draw(WIDTH, HIDDEN) / WIDTH, "w2": draw(HIDDEN, WIDTH, seed=1) / HIDDEN}
    text = f"(float[batch,{WIDTH}] x) => (float[batch,{WIDTH}] y) {{ h = MatMul(x, w1) r = Relu(h) y = MatMul(r, w2) }}"
    zoo.add(store, "heavy", onnx_ir.to_proto(graph(text, **weights)), COPIES)
    with Serving(tmp_path_factory.mktemp("copies"), "--model-store", store) as running:
        running.wait_ready()
        yield running


def batches(server: Server, model: str) -> list[float]:
    """Number of batches that each instance of a model has computed, in ascending order."""
    name = "graphkiln_batch_size_count{"
    return sorted(
        value for key, value in server.metrics().items() if key.startswith(name) and f'instance="{model}_' in key
    )


def test_requests_do_not_wait_for_a_busy_copy(server: Server) -> None:
    """Triton gives a batch to an idle instance: one has a long request, the other computes all short ones."""
    found: list[np.ndarray] = []

    def compute(rounds: int) -> None:
        with Client(server.url, timeout_s=120, max_retries=0) as client:
            found.append(client.model("uneven").infer({"ROUNDS": np.array([[rounds]], np.int64)})["SUM"])

    before_s = server.computed_s()
    long = threading.Thread(target=compute, args=(LONG,))
    long.start()
    server.wait_computing(before_s)
    for _ in range(CALLS):
        compute(SHORT)
    assert long.is_alive(), "the short ones did not overtake the long one"
    assert len(found) == CALLS
    long.join()
    np.testing.assert_array_equal(np.concatenate(found), [[256]] * (CALLS + 1))
    server.wait_until(lambda: sum(batches(server, "uneven")) == CALLS + 1)
    assert batches(server, "uneven") == [1, CALLS]


def weights_in_memory(pid: int) -> dict[str, float]:
    """Resident size and proportional share of the mapped file of weights in a process.

    Source: proc(5), "smaps": a page that two processes have counts half in the PSS of each.
    """
    found = {"Rss": 0.0, "Pss": 0.0, "Private_Dirty": 0.0}
    mapped = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapped = "weights.bin" in line
        elif mapped and (name := line.split(":")[0]) in found:
            found[name] += float(line.split()[1]) / 1024
    return found


def test_weights_are_in_memory_once(server: Server) -> None:
    """32 MiB of weights in two processes."""
    with Client(server.url) as client:
        for seed in range(4):
            client.model("heavy").infer({"x": draw(1, WIDTH, seed=seed)})
    children = psutil.Process(server.process.pid).children(recursive=True)
    shares = [weights_in_memory(child.pid) for child in children if is_stub(child)]
    first, second = (share for share in shares if share["Rss"] > 16)
    size_mib = 2 * WIDTH * HIDDEN * 4 / 2**20
    assert min(first["Rss"], second["Rss"]) > 0.9 * size_mib, "both have read them all"
    assert first["Pss"] + second["Pss"] < 1.1 * max(first["Rss"], second["Rss"])
    assert first["Private_Dirty"] + second["Private_Dirty"] < 1
