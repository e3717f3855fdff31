"""Runs on fixed buffers. On those of the CPU: the bookkeeping is the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from graphkiln_backend.engines.onnxruntime.cuda_graphs import CudaGraphRunner
from graphkiln_backend.engines.onnxruntime.providers import CPU


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
    monkeypatch.setattr("graphkiln_backend.engines.onnxruntime.cuda_graphs._MAX_CAPTURES", 2)
    runner = CudaGraphRunner(session, "cpu")
    for rows in (1, 2, 3, 4, 3):
        outputs = runner.run({"INPUT_0": np.zeros((rows, 1, 32, 32), np.float32)}, ["OUTPUT_0"])
        assert len(outputs["OUTPUT_0"]) == rows
    assert len(runner._captures) == 2
