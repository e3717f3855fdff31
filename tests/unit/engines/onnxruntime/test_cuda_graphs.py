"""Runs on fixed buffers. On those of the CPU: the bookkeeping is the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import zoo

from graphkiln_backend.engines.base import PLAIN_RUNS
from graphkiln_backend.engines.onnxruntime.loading import CPU
from graphkiln_backend.engines.onnxruntime.session import CudaGraphRunner


@pytest.fixture
def session(digits: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(digits / "1" / "model.onnx"), providers=[CPU])


def test_outputs_are_those_of_plain_runs(session: onnxruntime.InferenceSession) -> None:
    runner = CudaGraphRunner(session, "cpu")
    generator = np.random.default_rng(2)
    kept = []
    for rows in (1, 4, 1, 4, 1):
        feeds = {"INPUT_0": generator.normal(size=(rows, 1, 32, 32)).astype(np.float32)}
        outputs = runner.run(feeds, ["OUTPUT_0"])["OUTPUT_0"]
        np.testing.assert_allclose(outputs, session.run(None, feeds)[0], rtol=1e-6)
        kept.append((outputs, outputs.copy()))
    for outputs, copy in kept:  # later runs do not write into earlier outputs
        np.testing.assert_array_equal(outputs, copy)


def test_many_shapes_do_not_hold_many_buffers(
    session: onnxruntime.InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphkiln_backend.engines.onnxruntime.session._MAX_CAPTURES", 2)
    runner = CudaGraphRunner(session, "cpu")
    for rows in (1, 2, 3, 4, 3):
        outputs = runner.run({"INPUT_0": np.zeros((rows, 1, 32, 32), np.float32)}, ["OUTPUT_0"])
        assert len(outputs["OUTPUT_0"]) == rows
    assert len(runner._captures) == 2


@pytest.fixture
def pair(tmp_path: Path) -> onnxruntime.InferenceSession:
    """Two inputs and two outputs: their sum and their difference."""
    graph = zoo.add(tmp_path, "m", zoo.sum_and_difference()) / "model.onnx"
    return onnxruntime.InferenceSession(str(graph), providers=[CPU])


def rows(value: float, count: int = 1) -> np.ndarray:
    return np.full((count, 2), value, np.float32)


def test_other_outputs_and_other_shapes_are_other_captures(pair: onnxruntime.InferenceSession) -> None:
    runner = CudaGraphRunner(pair, "cpu")
    for _ in range(2):
        for outputs in (["sum"], ["difference"], ["sum", "difference"], ["difference", "sum"]):
            for count in (1, 3):
                found = runner.run({"a": rows(1, count), "b": rows(5, count)}, outputs)
                assert {name: array[-1, 0] for name, array in found.items()} == {
                    name: {"sum": 6, "difference": 4}[name] for name in outputs
                }
    assert len(runner._captures) == 8
    ids = {capture.options.get_run_config_entry("gpu_graph_id") for capture in runner._captures.values()}
    assert ids == {str(number) for number in range(1, 9)}, "CUDA keeps a graph by its number"


def test_a_plain_run_uses_no_capture_and_makes_none(pair: onnxruntime.InferenceSession) -> None:
    runner = CudaGraphRunner(pair, "cpu")
    feeds = {"a": rows(1), "b": rows(5)}
    token = PLAIN_RUNS.set(True)
    try:
        np.testing.assert_array_equal(runner.run(feeds, ["sum"])["sum"], rows(6))
    finally:
        PLAIN_RUNS.reset(token)
    assert not runner._captures
    runner.run(feeds, ["sum"])
    assert len(runner._captures) == 1
