"""Graphs from files and into files, weights included."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph

from graphkiln_backend.passes import graph_file
from graphkiln_backend.passes.graph_file import load, save

W = draw(64, 64)


def model() -> onnx_ir.Model:
    return graph("(float[b,64] x) => (float[b,64] y) { y = MatMul(x, w) }", w=W)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(model(), tmp_path / "m.onnx")
    x = draw(2, 64)
    np.testing.assert_allclose(compute(load(tmp_path / "m.onnx"), x=x)["y"], x @ W, rtol=1e-4, atol=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


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
