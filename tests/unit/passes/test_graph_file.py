"""Graphs read from and written to files, with external and sparse weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import zoo
from graphs import compute, draw, graph
from onnx import TensorProto, helper, numpy_helper

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.passes import graph_file
from graphkiln_backend.passes.graph_file import load, make_dense, save

W = draw(64, 64)


def model() -> onnx_ir.Model:
    return graph("(float[b,64] x) => (float[b,64] y) { y = MatMul(x, w) }", w=W)


def test_value_computed_twice_is_refused(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 4]) for name in "xy")
    nodes = [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Mul", ["x", "x"], ["y"])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y])), tmp_path / "m.onnx")
    with pytest.raises(RepositoryError, match=r"m\.onnx is not a valid graph: Output 'y' is redeclared"):
        load(tmp_path / "m.onnx")


@pytest.mark.parametrize("is_hard", [False, True])
def test_weights_behind_a_link_to_another_folder(tmp_path: Path, is_hard: bool) -> None:
    """As in Hugging Face's cache, where it leads to `blobs`, and in a folder copied by `cp -al`."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    onnx_ir.save(model(), tmp_path / "snapshot" / "m.onnx", external_data="w.bin", size_threshold_bytes=0)
    (tmp_path / "snapshot" / "w.bin").rename(tmp_path / "blobs" / "w")
    link = tmp_path / "snapshot" / "w.bin"
    link.hardlink_to(tmp_path / "blobs" / "w") if is_hard else link.symlink_to("../blobs/w")
    with pytest.raises(RepositoryError, match=r"the weights of .*m\.onnx cannot be read") as caught:
        load(tmp_path / "snapshot" / "m.onnx")
    assert "cp -rL" in caught.value.hint


class TestLargeWeights:
    @pytest.fixture(autouse=True)
    def _small_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graph_file, "_EXTERNAL_DATA_FROM_BYTES", 1000)

    def test_weights_are_in_a_file_named_after_the_graph(self, tmp_path: Path) -> None:
        save(model(), tmp_path / "m.onnx")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
        assert (tmp_path / "m.onnx.data").stat().st_size >= W.nbytes
        assert (tmp_path / "m.onnx").stat().st_size < 1000

    def test_loaded_graph_does_not_need_its_file(self, tmp_path: Path) -> None:
        save(model(), tmp_path / "m.onnx")
        loaded = load(tmp_path / "m.onnx")
        (tmp_path / "m.onnx.data").unlink()
        x = draw(2, 64)
        np.testing.assert_allclose(compute(loaded, x=x)["y"], x @ W, rtol=1e-4, atol=1e-4)

    def test_copy_has_its_own_weights(self, tmp_path: Path) -> None:
        save(model(), tmp_path / "m.onnx")
        (tmp_path / "copy").mkdir()
        save(onnx_ir.load(tmp_path / "m.onnx"), tmp_path / "copy" / "n.onnx")
        (tmp_path / "m.onnx.data").unlink()
        shutil.move(tmp_path / "copy", tmp_path / "moved")
        x = draw(2, 64)
        found = compute(load(tmp_path / "moved" / "n.onnx"), x=x)["y"]
        np.testing.assert_allclose(found, x @ W, rtol=1e-4, atol=1e-4)

    def test_graph_saved_over_itself(self, tmp_path: Path) -> None:
        """The weights are read before their file is written."""
        save(model(), tmp_path / "m.onnx")
        save(onnx_ir.load(tmp_path / "m.onnx"), tmp_path / "m.onnx")
        x = draw(2, 64)
        np.testing.assert_allclose(compute(load(tmp_path / "m.onnx"), x=x)["y"], x @ W, rtol=1e-4, atol=1e-4)


def test_initializers_of_old_graphs_are_not_inputs(tmp_path: Path) -> None:
    """IR version 3, in which every initializer must be an input; folding constants would break that."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "w", "y")]
    weights = [numpy_helper.from_array(np.ones(2, np.float32), "w")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "old", value[:2], value[2:], weights)
    onnx.save(helper.make_model(graph, ir_version=3, opset_imports=[helper.make_opsetid("", 8)]), tmp_path / "old.onnx")
    model = graph_file.load(tmp_path / "old.onnx")
    assert model.ir_version == 4
    assert [each.name for each in model.graph.inputs] == ["x"]
    assert list(model.graph.initializers) == ["w"]


def test_a_domain_that_is_not_imported(tmp_path: Path) -> None:
    """ONNX Runtime runs such a graph; NNCF writes one below opset 21, ONNX's checker refuses it."""
    model = zoo.model(
        [helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")],
        [zoo.value("x", ("n", 4))],
        [zoo.value("y", ("n", 4))],
    )
    onnx.save(model, tmp_path / "m.onnx")
    assert "com.microsoft" not in {each.domain for each in model.opset_import}
    read = load(tmp_path / "m.onnx")
    assert read.opset_imports["com.microsoft"] == 1
    onnx.checker.check_model(onnx_ir.to_proto(read))


INDICES = ([0, 5, 15], [[0, 0], [1, 1], [3, 3]])
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def sparse_tensor(indices: Any) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(indices, np.int64), "i"), [4, 4])


def product(*before: onnx.NodeProto) -> onnx.ModelProto:
    nodes = [*before, helper.make_node("MatMul", ["x", "w"], ["y"])]
    return zoo.model(nodes, [zoo.value("x", ("n", 4))], [zoo.value("y", ("n", 4))])


def with_initializer(indices: Any) -> onnx.ModelProto:
    model = product()
    model.graph.sparse_initializer.append(sparse_tensor(indices))
    return model


def with_constant(indices: Any) -> onnx.ModelProto:
    return product(helper.make_node("Constant", [], ["w"], sparse_value=sparse_tensor(indices)))


def run_onnxruntime(model: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0]


@pytest.mark.parametrize("indices", INDICES, ids=["by element", "by axis"])
@pytest.mark.parametrize("make", [with_initializer, with_constant])
def test_sparse_constants_become_dense(make: Any, indices: Any, tmp_path: Path) -> None:
    onnx.save(make(indices), tmp_path / "model.onnx")
    np.testing.assert_array_equal(
        run_onnxruntime(onnx_ir.to_proto(load(tmp_path / "model.onnx"))), X @ np.diag([1, 2, 0, 3])
    )


def test_sparse_constants_in_a_branch() -> None:
    inner = with_constant(INDICES[0]).graph
    del inner.input[:]
    branch = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    model = zoo.model([branch], [zoo.value("c", (), 9), zoo.value("x", ("n", 4))], [zoo.value("y", ("n", 4))])
    make_dense(model)
    assert "sparse_tensor" not in str(model)
