"""OpenVINO as the peer of stages: the same answers, from two callers at once; a request that never ends is an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import parallel_peer
import pytest
from graphs import compute, draw, graph
from parallel_peer import WAYS, Peer

from graphkiln_backend.graph.errors import LoweringError, MeasurementError

TEXT = "(float[batch,4] x) => (float[batch,3] y) { h = MatMul(x, w) y = Tanh(h) }"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx_ir.save(graph(TEXT, w=draw(4, 3)), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize("way", WAYS)
def test_two_callers_at_once_get_what_the_graph_computes(path: Path, way: str) -> None:
    x = draw(5, 4, seed=1)
    peer = Peer(path, WAYS[way])
    assert peer.devices
    with ThreadPoolExecutor(2) as callers:
        found: list[Any] = list(callers.map(lambda _: peer.run({"x": x})["y"], range(6)))  # type: ignore[index]
    for answer in found:
        np.testing.assert_allclose(answer, compute(graph(TEXT, w=draw(4, 3)), x=x)["y"], rtol=1e-5, atol=1e-6)


def test_devices_that_are_not_there(path: Path) -> None:
    with pytest.raises(LoweringError, match="OpenVINO on HETERO:NPU"):
        Peer(path, "HETERO:NPU")


def test_a_request_that_never_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def start_async(self, feeds: object, *, share_inputs: bool) -> None:
            pass

        def wait_for(self, timeout_ms: int) -> bool:
            assert timeout_ms == 2000
            return False

    monkeypatch.setattr(parallel_peer, "LIMIT_S", 2.0)
    peer = Peer(path, "CPU")
    for _ in range(parallel_peer.CALLERS):
        peer._free.get()
    peer._free.put(Endless())  # type: ignore[arg-type]
    with pytest.raises(MeasurementError, match="OpenVINO did not answer within 2 s"):
        peer.run({"x": draw(1, 4)})
    assert not peer._free.empty(), "whoever comes next is told, too"
