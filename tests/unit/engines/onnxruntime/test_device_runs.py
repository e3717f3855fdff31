"""Tensors that stay where they were computed. On the CPU, where bindings are those of a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import zoo

from graphkiln_backend.engines.base import DeviceSession, SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.loading import CUDA
from graphkiln_backend.engines.onnxruntime.session import run_bound, why_not_on_device
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.signature import Signature, TensorSpec

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_what_one_run_leaves_the_next_one_reads(tmp_path: Path) -> None:
    folder = zoo.add(tmp_path, "doubles", zoo.scale(("batch", 3)))
    with OnnxRuntimeEngine().build(folder / "model.onnx", CONFIG) as session:
        assert isinstance(session, DeviceSession)
        assert session.why_not_on_device == ""
        (first,) = session.run_on_device({"x": X}, ["y"]).values()
        assert isinstance(first, onnxruntime.OrtValue)
        assert not isinstance(first, np.ndarray)
        (second,) = session.run_on_device({"x": first}, ["y"]).values()
        (third,) = session.run_on_device({"x": np.array(second)}, ["y"]).values()
        strided = session.run_on_device({"x": np.asfortranarray(X)}, ["y"])["y"]
    np.testing.assert_array_equal(np.from_dlpack(second), X * 4)
    np.testing.assert_array_equal(np.from_dlpack(third), X * 8)
    np.testing.assert_array_equal(np.from_dlpack(strided), X * 2)


def test_tensors_of_other_libraries_are_read_where_they_are(tmp_path: Path) -> None:
    class Foreign:
        """A tensor of another library."""

        def __dlpack__(self, *, stream: Any = None) -> Any:
            return X.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return X.__dlpack_device__()

    folder = zoo.add(tmp_path, "doubles", zoo.scale(("batch", 3)))
    with OnnxRuntimeEngine().build(folder / "model.onnx", CONFIG) as session:
        found = session.run_on_device({"x": Foreign()}, ["y"])["y"]
    np.testing.assert_array_equal(np.from_dlpack(found), X * 2)


def test_outputs_are_bound_to_the_providers_device() -> None:
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
def test_what_cannot_be_bound(dtype: DType, why: str) -> None:
    spec = TensorSpec(name="x", dtype=dtype, shape=("batch", 3))
    found = why_not_on_device(Signature(inputs=(spec,), outputs=(spec,)))
    assert found.startswith(why) if why else found == ""
