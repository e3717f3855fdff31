"""Graphs saved by OneFlow as sources: batch sizes, folders, temporary files."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recipes import recipe

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import ConversionError, LoweringError
from graphkiln_converters.oneflow.translation import GROUP
from graphkiln_converters.sources.base import InputSpec
from graphkiln_converters.sources.oneflow_graph import OneflowGraph, open_source

OPTIONS = recipe()
ROWS, TOTAL = "tensor<3x2xf32>", "tensor<2xf32>"
TEXT = f"""module {{
  oneflow.job @G(%a: {ROWS}) -> {ROWS} {{
    %r = "oneflow.relu"(%a) {{op_name = "r"}} : ({ROWS}) -> {ROWS}
    oneflow.return %r : {ROWS}
  }}
}}"""
TOTALS = (
    TEXT.replace(f"-> {ROWS} {{", f"-> {TOTAL} {{")
    .replace(
        f'"oneflow.relu"(%a) {{op_name = "r"}} : ({ROWS}) -> {ROWS}',
        f'"oneflow.reduce_sum"(%a) {{op_name = "r", axis = [0 : si32], keepdims = false}} : ({ROWS}) -> {TOTAL}',
    )
    .replace(f"return %r : {ROWS}", f"return %r : {TOTAL}")
)


def saved(folder: Path, text: str = TEXT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.mlir").write_text(text)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> OneflowGraph:
    return open_source(str(saved(tmp_path / "g")), OPTIONS)


class TestRun:
    @pytest.mark.parametrize("rows", [1, 3, 7])
    def test_any_number_of_rows_is_padded_or_split_to_the_saved_batch(self, model: OneflowGraph, rows: int) -> None:
        x = np.random.default_rng(rows).standard_normal((rows, 2)).astype("f4")
        found = model.run({"INPUT_0": x})
        model.close()
        np.testing.assert_array_equal(found["OUTPUT_0"], np.maximum(x, 0))

    def test_an_output_without_the_batch_is_unchanged(self, tmp_path: Path) -> None:
        model = open_source(str(saved(tmp_path, TOTALS)), OPTIONS)
        found = model.run({"INPUT_0": np.ones((3, 2), "f4")})
        model.close()
        assert found["OUTPUT_0"].tolist() == [3, 3]


class TestExport:
    def test_only_the_batch_can_be_dynamic(self, model: OneflowGraph) -> None:
        with pytest.raises(ConversionError, match="only the batch"):
            replace(model, inputs=(InputSpec(name="INPUT_0", shape=(2,), dynamic={0: (1, 4)}),)).export()
        model.close()


class TestFolders:
    def test_the_folder_above_is_accepted(self, tmp_path: Path) -> None:
        saved(tmp_path / "model")
        model = open_source(str(tmp_path), OPTIONS)
        model.close()
        assert model.description == f"oneflow:{tmp_path}/model"

    @pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
    def test_a_folder_without_a_graph_is_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_text("")
        message = "there is no model.mlir in" if name == "empty" else "there is no folder"
        with pytest.raises(ConversionError, match=f"{message} .*{name}") as caught:
            open_source(str(tmp_path / name), OPTIONS)
        assert "flow.save" in caught.value.hint

    def test_errors_of_the_translation_name_the_file(self, tmp_path: Path) -> None:
        saved(tmp_path, TEXT.replace("oneflow.relu", "oneflow.warp"))
        with pytest.raises(ConversionError, match=r"model\.mlir: 1 of 1 kinds .*warp") as caught:
            open_source(str(tmp_path), OPTIONS)
        assert GROUP in caught.value.hint

    def test_an_empty_batch_is_refused(self, tmp_path: Path) -> None:
        saved(tmp_path, TEXT.replace("tensor<3x2xf32>", "tensor<0x2xf32>"))
        with pytest.raises(ConversionError, match=r"model\.mlir: the graph was saved with an empty batch"):
            open_source(str(tmp_path), OPTIONS)


class TestTemporaryFiles:
    @pytest.fixture
    def temporary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        return tmp_path / "temporary"

    def test_are_removed_with_the_model(self, temporary: Path, tmp_path: Path) -> None:
        model = open_source(str(saved(tmp_path / "g")), OPTIONS)
        assert len(list(temporary.iterdir())) == 1
        model.close()
        assert list(temporary.iterdir()) == []

    @pytest.mark.parametrize(
        ("error", "raised"),
        [(LoweringError("no such kernel", attempts=()), ConversionError), (KeyboardInterrupt(), KeyboardInterrupt)],
    )
    def test_are_removed_after_an_error(
        self,
        temporary: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: BaseException,
        raised: type[BaseException],
    ) -> None:
        def fails(*_: object) -> None:
            raise error

        monkeypatch.setattr(OnnxRuntimeEngine, "build_reference", fails)
        with pytest.raises(raised):
            open_source(str(saved(tmp_path / "g")), OPTIONS)
        assert list(temporary.iterdir()) == []
