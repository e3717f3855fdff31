"""Graphs from files and into files, weights included."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from graphs import compute, draw, graph
from onnx import TensorProto, helper, numpy_helper

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.passes import graph_file
from graphkiln_backend.passes.graph_file import load, save

W = draw(64, 64)


def model() -> onnx_ir.Model:
    return graph("(float[b,64] x) => (float[b,64] y) { y = MatMul(x, w) }", w=W)


def test_a_value_that_is_computed_twice(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 4]) for name in "xy")
    nodes = [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Mul", ["x", "x"], ["y"])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y])), tmp_path / "m.onnx")
    with pytest.raises(RepositoryError, match=r"m\.onnx is not a valid graph: Output 'y' is redeclared"):
        load(tmp_path / "m.onnx")


def test_weights_behind_a_link_that_leads_elsewhere(tmp_path: Path) -> None:
    """As in Hugging Face's cache, where it leads to `blobs`."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    onnx_ir.save(model(), tmp_path / "snapshot" / "m.onnx", external_data="w.bin", size_threshold_bytes=0)
    (tmp_path / "snapshot" / "w.bin").rename(tmp_path / "blobs" / "w")
    (tmp_path / "snapshot" / "w.bin").symlink_to("../blobs/w")
    with pytest.raises(RepositoryError, match=r"the weights of .*m\.onnx cannot be read") as caught:
        load(tmp_path / "snapshot" / "m.onnx")
    assert "cp -rL" in caught.value.hint


class TestLargeWeights:
    @pytest.fixture(autouse=True)
    def _small_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graph_file, "_EXTERNAL_DATA_FROM_BYTES", 1000)

    def test_lie_in_a_file_named_after_the_graph(self, tmp_path: Path) -> None:
        save(model(), tmp_path / "m.onnx")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
        assert (tmp_path / "m.onnx.data").stat().st_size >= W.nbytes
        assert (tmp_path / "m.onnx").stat().st_size < 1000

    def test_a_loaded_graph_no_longer_needs_its_file(self, tmp_path: Path) -> None:
        save(model(), tmp_path / "m.onnx")
        loaded = load(tmp_path / "m.onnx")
        (tmp_path / "m.onnx.data").unlink()
        x = draw(2, 64)
        np.testing.assert_allclose(compute(loaded, x=x)["y"], x @ W, rtol=1e-4, atol=1e-4)

    def test_a_copy_has_weights_of_its_own(self, tmp_path: Path) -> None:
        save(model(), tmp_path / "m.onnx")
        (tmp_path / "copy").mkdir()
        save(onnx_ir.load(tmp_path / "m.onnx"), tmp_path / "copy" / "n.onnx")
        (tmp_path / "m.onnx.data").unlink()
        shutil.move(tmp_path / "copy", tmp_path / "moved")
        x = draw(2, 64)
        found = compute(load(tmp_path / "moved" / "n.onnx"), x=x)["y"]
        np.testing.assert_allclose(found, x @ W, rtol=1e-4, atol=1e-4)

    def test_a_graph_is_saved_over_itself(self, tmp_path: Path) -> None:
        """The weights are read before their file is written."""
        save(model(), tmp_path / "m.onnx")
        save(onnx_ir.load(tmp_path / "m.onnx"), tmp_path / "m.onnx")
        x = draw(2, 64)
        np.testing.assert_allclose(compute(load(tmp_path / "m.onnx"), x=x)["y"], x @ W, rtol=1e-4, atol=1e-4)


def test_initializers_are_no_inputs_of_old_graphs(tmp_path: Path) -> None:
    """Of IR version 3; a pass that folds constants would leave one that is no input, which is not valid there."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "w", "y")]
    weights = [numpy_helper.from_array(np.ones(2, np.float32), "w")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "old", value[:2], value[2:], weights)
    onnx.save(helper.make_model(graph, ir_version=3, opset_imports=[helper.make_opsetid("", 8)]), tmp_path / "old.onnx")
    model = graph_file.load(tmp_path / "old.onnx")
    assert model.ir_version == 4
    assert [each.name for each in model.graph.inputs] == ["x"]
    assert list(model.graph.initializers) == ["w"]
