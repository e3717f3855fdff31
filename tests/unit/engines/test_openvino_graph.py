"""Where OpenVINO computes otherwise than ONNX specifies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import zoo
from onnx import TensorProto, helper

from graphkiln_backend.engines import openvino as openvino_graph
from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.openvino import OpenVinoEngine, check_values
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import LoweringError, SignatureError

CONFIG = SessionConfig(engine="openvino", device=CPU, threads=1, spin=False, reason="test")
BOXES = np.array([[[0, 0, 1, 1], [0, 0, 1, 0.5], [5, 5, 6, 6], [0, 0, 1, 1]]], np.float32)
"""The second one overlaps half of the first, the last one all of it, the third none."""
SCORES = np.array([[[0.9, 0.8, 0.7, 0.85]]], np.float32)


def build(folder: Path, model: onnx.ModelProto, compiled: Path | None = None) -> Session:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return OpenVinoEngine().build(path, CONFIG, compiled)


def suppression(limit: float | None = None) -> onnx.ModelProto:
    constants: dict[str, Any] = {"most": np.array([4]), "least": np.array([0.0], np.float32)}
    inputs = [zoo.value("boxes", (1, 4, 4)), zoo.value("scores", (1, 1, 4))]
    if limit is None:
        inputs.append(zoo.value("limit", (1,)))
    else:
        constants["limit"] = np.array([limit], np.float32)
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "limit", "least"], ["kept"])
    return zoo.model([node], inputs, [zoo.value("kept", ("n", 3), TensorProto.INT64)], constants)


LIMITS = {0.0: [0, 2], 0.499: [0, 2], 0.5: [0, 1, 2], 0.501: [0, 1, 2], 1.0: [0, 3, 1, 2]}
"""Which boxes ONNX keeps."""


class TestSuppression:
    def test_boxes_that_overlap_by_more_than_the_limit_go(self, tmp_path: Path) -> None:
        with build(tmp_path, suppression()) as session:
            for limit, kept in LIMITS.items():
                feeds = {"boxes": BOXES, "scores": SCORES, "limit": np.array([limit], np.float32)}
                assert session.run(feeds)["kept"][:, 2].tolist() == kept, limit

    @pytest.mark.parametrize("old", [False, True])
    def test_what_was_compiled_before_is_compiled_again(self, tmp_path: Path, old: bool) -> None:
        model = suppression(0.5)
        onnx.save(model, tmp_path / "model.onnx")
        compiled = tmp_path / "compiled"
        compiled.mkdir()
        OpenVinoEngine().compile(tmp_path / "model.onnx", CONFIG, compiled)
        if old:
            (compiled / "as_onnx").unlink()
            (compiled / "model.blob").write_bytes(_compile_unmended(tmp_path / "model.onnx"))
        with build(tmp_path, model, compiled) as session:
            assert session.run({"boxes": BOXES, "scores": SCORES})["kept"][:, 2].tolist() == [0, 1, 2]


def _compile_unmended(path: Path) -> bytes:
    import openvino

    core = openvino.Core()
    blob = core.compile_model(core.read_model(str(path)), "CPU").export_model()
    return blob.getvalue() if hasattr(blob, "getvalue") else blob


@pytest.mark.parametrize(("inner", "outer"), [("FLOAT", "DOUBLE"), ("DOUBLE", "FLOAT")])
def test_what_it_would_compute_in_half_the_bits_is_refused(tmp_path: Path, inner: str, outer: str) -> None:
    ends = TensorProto.DataType.Value(inner), TensorProto.DataType.Value(outer)
    node = helper.make_node("Cast", ["x"], ["y"], to=ends[1])
    model = zoo.model([node], [zoo.value("x", (2,), ends[0])], [zoo.value("y", (2,), ends[1])])
    with pytest.raises(LoweringError, match="OpenVINO computes FP64 in FP32"):
        build(tmp_path, model)


class TestValues:
    @pytest.mark.parametrize("kind", [np.int64, np.uint64])
    def test_what_would_be_cut_off_is_refused(self, tmp_path: Path, kind: Any) -> None:
        dtype = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        shape = (2,)
        model = zoo.model(
            [helper.make_node("Add", ["x", "x"], ["y"])], [zoo.value("x", shape, dtype)], [zoo.value("y", shape, dtype)]
        )
        with build(tmp_path, model) as session:
            assert session.run({"x": np.array([1, 1 << 23], kind) - kind(1)})["y"].tolist() == [0, (1 << 24) - 2]
            with pytest.raises(SignatureError, match="'x' does not fit: OpenVINO computes integers in 32 bits"):
                session.run({"x": np.array([1, 1 << 40], kind)})

    def test_the_bounds(self) -> None:
        for beyond in (1 << 31, -(1 << 31) - 1):
            with pytest.raises(SignatureError, match=f"got {beyond} to {beyond}"):
                check_values("x", np.array([beyond]))


def with_constant(op_type: str, *constant: int) -> onnx.ModelProto:
    """An INT64 operator of the input and a constant."""
    names = ["c", "x"] if op_type == "Gather" else ["x", "c"]
    values = [zoo.value(name, ("n",), TensorProto.INT64) for name in "xy"]
    node = helper.make_node(op_type, names, ["y"])
    return zoo.model([node], values[:1], values[1:], {"c": np.array(constant)})


class TestConstants:
    @pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Div", "Mod", "Gather"])
    def test_of_more_than_32_bits_are_refused(self, tmp_path: Path, op_type: str) -> None:
        with pytest.raises(LoweringError, match=r"computes integers in 32 bits.*a constant that takes more"):
            build(tmp_path, with_constant(op_type, 2**40))

    @pytest.mark.parametrize(
        ("op_type", "constants", "expected"),
        [("Add", (7, 100_000), [7, 100_001]), ("Mul", (7, 8), [0, 8]), ("Gather", (7, 2**31 - 2), [7, 2**31 - 2])],
    )
    def test_of_32_bits_are_computed_with(
        self, tmp_path: Path, op_type: str, constants: tuple[int, ...], expected: list[int]
    ) -> None:
        with build(tmp_path, with_constant(op_type, *constants)) as session:
            assert session.run({"x": np.array([0, 1])})["y"].tolist() == expected

    def test_a_slice_may_end_anywhere(self, tmp_path: Path) -> None:
        """As exporters write "to the end"."""
        constants = {"from": np.array([1]), "to": np.array([2**63 - 1])}
        values = [zoo.value(name, ("n",), TensorProto.INT64) for name in "xy"]
        model = zoo.model([helper.make_node("Slice", ["x", "from", "to"], ["y"])], values[:1], values[1:], constants)
        with build(tmp_path, model) as session:
            assert session.run({"x": np.array([5, 6, 7])})["y"].tolist() == [6, 7]


class TestOtherwise:
    def test_shifts_of_short_signed_integers_are_refused(self, tmp_path: Path) -> None:
        """10 << 5 of eight bits is 64; OpenVINO says 127."""
        inputs = [zoo.value(name, (3,), TensorProto.INT8) for name in ("x", "by")]
        node = helper.make_node("BitShift", ["x", "by"], ["y"], direction="LEFT")
        graph = helper.make_graph([node], "shift", inputs, [zoo.value("y", (3,), TensorProto.INT8)])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)], ir_version=10)
        with pytest.raises(LoweringError, match="shifts signed integers of 8 and 16 bits"):
            build(tmp_path, model)

    @pytest.mark.parametrize("window", [{}, {"left_window_size": 2}, {"right_window_size": 1}])
    def test_attention_within_a_window_is_refused(self, tmp_path: Path, window: dict[str, int]) -> None:
        inputs = [zoo.value(name, (1, 2, 4, 8)) for name in ("q", "k", "v")]
        node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1, **window)
        graph = helper.make_graph([node], "attention", inputs, [zoo.value("y", (1, 2, 4, 8))])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=10)
        if not window:
            return build(tmp_path, model).close()
        with pytest.raises(LoweringError, match="leaves out the window"):
            build(tmp_path, model)
        return None

    @pytest.mark.parametrize("saturates", [False, True])
    def test_products_of_int8_are_refused_where_their_sums_are_cut_off(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saturates: bool
    ) -> None:
        monkeypatch.setattr(openvino_graph, "saturates_products_of_bytes", lambda: saturates)
        model, _ = zoo.integer_product()
        if not saturates:
            return build(tmp_path, model).close()
        with pytest.raises(LoweringError, match="products of int8 overflow on this CPU"):
            build(tmp_path, model)
        return None

    def test_products_of_int8_are_right_or_refused(self, tmp_path: Path) -> None:
        model, feeds = zoo.integer_product()
        try:
            session = build(tmp_path, model)
        except LoweringError:
            return
        with session, OnnxRuntimeEngine().build_reference(tmp_path / "model.onnx") as reference:
            np.testing.assert_allclose(session.run(feeds)["y"], reference.run(feeds)["y"], rtol=1e-3)


FIRST_RUNS = """
import os, sys, threading
import numpy as np
import openvino
from openvino import opset13
import graphkiln_backend.engines.openvino

x = opset13.parameter([-1, 3, 64, 64], np.float32, name="x")
model = openvino.Core().compile_model(openvino.Model([opset13.relu(x)], [x]), "CPU", {"NUM_STREAMS": 2})
feeds = {"x": np.ones((1, 3, 64, 64), np.float32)}
requests = [model.create_infer_request() for _ in range(8)]
threads = [threading.Thread(target=request.infer, args=(feeds,), daemon=True) for request in requests]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os._exit(0)
"""


@pytest.mark.slow
def test_first_runs_in_several_threads_do_not_wait_for_each_other() -> None:
    """Without the array that is made at the import, four of ten such processes never ended."""
    for _ in range(4):
        finished = subprocess.run([sys.executable, "-c", FIRST_RUNS], timeout=120, check=False)
        assert finished.returncode == 0
