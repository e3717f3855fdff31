"""Where OpenVINO computes otherwise than ONNX says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import zoo
from onnx import TensorProto, helper

from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.engines.openvino import OpenVinoEngine
from graphkiln_backend.engines.openvino_graph import check_values
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

    def test_a_constant_limit(self, tmp_path: Path) -> None:
        with build(tmp_path, suppression(0.5)) as session:
            assert session.run({"boxes": BOXES, "scores": SCORES})["kept"][:, 2].tolist() == [0, 1, 2]

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
            assert session.run({"x": np.array([1, 1 << 30], kind) - kind(1)})["y"].tolist() == [0, (1 << 31) - 2]
            with pytest.raises(SignatureError, match="'x' does not fit: OpenVINO computes integers in 32 bits"):
                session.run({"x": np.array([1, 1 << 40], kind)})

    @pytest.mark.parametrize(
        "array", [np.array([-(1 << 31), (1 << 31) - 1]), np.empty(0, np.int64), np.array([1 << 31], np.uint32)]
    )
    def test_what_fits(self, array: Any) -> None:
        check_values("x", array)

    def test_the_bounds(self) -> None:
        for beyond in (1 << 31, -(1 << 31) - 1):
            with pytest.raises(SignatureError, match=f"got {beyond} to {beyond}"):
                check_values("x", np.array([beyond]))
