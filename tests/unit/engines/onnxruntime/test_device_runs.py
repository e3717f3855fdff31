"""Runs on fixed buffers and tensors that stay on the device, tested on the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import zoo

from graphkiln_backend.engines.base import PLAIN_RUNS, DeviceSession, SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.loading import CPU as CPU_PROVIDER
from graphkiln_backend.engines.onnxruntime.loading import CUDA
from graphkiln_backend.engines.onnxruntime.session import CudaGraphRunner, run_bound, why_not_on_device
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.signature import Signature, TensorSpec

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")
TWO_ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_runs_on_device_are_chained(tmp_path: Path) -> None:
    folder = zoo.add(tmp_path, "doubles", zoo.scale(("batch", 3)))
    with OnnxRuntimeEngine().build(folder / "model.onnx", CONFIG) as session:
        assert isinstance(session, DeviceSession)
        assert session.why_not_on_device == ""
        (first,) = session.run_on_device({"x": TWO_ROWS}, ["y"]).values()
        assert isinstance(first, onnxruntime.OrtValue)
        assert not isinstance(first, np.ndarray)
        (second,) = session.run_on_device({"x": first}, ["y"]).values()
        (third,) = session.run_on_device({"x": np.array(second)}, ["y"]).values()
        strided = session.run_on_device({"x": np.asfortranarray(TWO_ROWS)}, ["y"])["y"]
    np.testing.assert_array_equal(np.from_dlpack(second), TWO_ROWS * 4)
    np.testing.assert_array_equal(np.from_dlpack(third), TWO_ROWS * 8)
    np.testing.assert_array_equal(np.from_dlpack(strided), TWO_ROWS * 2)


def test_tensors_of_other_libraries(tmp_path: Path) -> None:
    class Foreign:
        """A tensor of another library."""

        def __dlpack__(self, *, stream: Any = None) -> Any:
            return TWO_ROWS.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return TWO_ROWS.__dlpack_device__()

    folder = zoo.add(tmp_path, "doubles", zoo.scale(("batch", 3)))
    with OnnxRuntimeEngine().build(folder / "model.onnx", CONFIG) as session:
        found = session.run_on_device({"x": Foreign()}, ["y"])["y"]
    np.testing.assert_array_equal(np.from_dlpack(found), TWO_ROWS * 2)


def test_outputs_are_bound_to_the_device() -> None:
    """With CUDA, to its GPU."""
    bound: list[tuple[object, ...]] = []
    binding = SimpleNamespace(bind_output=lambda *where: bound.append(where), get_outputs=lambda: ["tensor"])
    session: Any = SimpleNamespace(io_binding=lambda: binding, run_with_iobinding=lambda *_: None)
    options = onnxruntime.RunOptions()
    assert run_bound(session, (CUDA, {"device_id": "3"}), {}, ["y"], options) == {"y": "tensor"}
    assert bound == [("y", "cuda", 3)]


@pytest.mark.parametrize(
    ("dtype", "why"), [(DType.FP32, ""), (DType.BYTES, "'x' is BYTES"), (DType.BF16, "'x' is BF16")]
)
def test_types_that_cannot_be_bound(dtype: DType, why: str) -> None:
    spec = TensorSpec(name="x", dtype=dtype, shape=("batch", 3))
    found = why_not_on_device(Signature(inputs=(spec,), outputs=(spec,)))
    assert found.startswith(why) if why else found == ""


@pytest.fixture
def example_session(digits: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(digits / "1" / "model.onnx"), providers=[CPU_PROVIDER])


def test_captured_runs_equal_plain_runs(example_session: onnxruntime.InferenceSession) -> None:
    runner = CudaGraphRunner(example_session, "cpu")
    generator = np.random.default_rng(2)
    kept = []
    for rows in (1, 4, 1, 4, 1):
        feeds = {"INPUT_0": generator.normal(size=(rows, 1, 32, 32)).astype(np.float32)}
        outputs = runner.run(feeds, ["OUTPUT_0"])["OUTPUT_0"]
        np.testing.assert_allclose(outputs, example_session.run(None, feeds)[0], rtol=1e-6)
        kept.append((outputs, outputs.copy()))
    for outputs, copy in kept:  # later runs do not write into earlier outputs
        np.testing.assert_array_equal(outputs, copy)


def test_number_of_captures_is_bounded(
    example_session: onnxruntime.InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphkiln_backend.engines.onnxruntime.session._MAX_CAPTURES", 2)
    runner = CudaGraphRunner(example_session, "cpu")
    for rows in (1, 2, 3, 4, 3):
        outputs = runner.run({"INPUT_0": np.zeros((rows, 1, 32, 32), np.float32)}, ["OUTPUT_0"])
        assert len(outputs["OUTPUT_0"]) == rows
    assert len(runner._captures) == 2


@pytest.fixture
def pair(tmp_path: Path) -> onnxruntime.InferenceSession:
    """Two inputs and two outputs: their sum and their difference."""
    graph = zoo.add(tmp_path, "m", zoo.sum_and_difference()) / "model.onnx"
    return onnxruntime.InferenceSession(str(graph), providers=[CPU_PROVIDER])


def filled(value: float, count: int = 1) -> np.ndarray:
    return np.full((count, 2), value, np.float32)


def test_captures_by_outputs_and_shapes(pair: onnxruntime.InferenceSession) -> None:
    runner = CudaGraphRunner(pair, "cpu")
    for _ in range(2):
        for outputs in (["sum"], ["difference"], ["sum", "difference"], ["difference", "sum"]):
            for count in (1, 3):
                found = runner.run({"a": filled(1, count), "b": filled(5, count)}, outputs)
                assert {name: array[-1, 0] for name, array in found.items()} == {
                    name: {"sum": 6, "difference": 4}[name] for name in outputs
                }
    assert len(runner._captures) == 8
    ids = {capture.options.get_run_config_entry("gpu_graph_id") for capture in runner._captures.values()}
    assert ids == {str(number) for number in range(1, 9)}, "CUDA keeps a graph by its number"


def test_plain_runs_are_not_captured(pair: onnxruntime.InferenceSession) -> None:
    runner = CudaGraphRunner(pair, "cpu")
    feeds = {"a": filled(1), "b": filled(5)}
    token = PLAIN_RUNS.set(True)
    try:
        np.testing.assert_array_equal(runner.run(feeds, ["sum"])["sum"], filled(6))
    finally:
        PLAIN_RUNS.reset(token)
    assert not runner._captures
    runner.run(feeds, ["sum"])
    assert len(runner._captures) == 1
