"""Int8 by NNCF: what becomes integer, what stays, what is said where it cannot."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import compute, draw, graph

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import ConversionError, EngineUnavailable, LoweringError
from graphkiln_backend.passes.graph_file import load, save
from graphkiln_backend.passes.precision import name_nodes
from graphkiln_converters.convert import convert
from graphkiln_converters.precision import _import_nncf, quantize_by_nncf, quantize_graph
from graphkiln_converters.recipe import Recipe

TEXT = """(float[batch,8] x) => (float[batch,6] y) {
    a = MatMul(x, first)
    r = Relu(a)
    b = MatMul(r, second)
    y = Relu(b)
}"""
WEIGHTS = {"first": draw(8, 16), "second": draw(16, 6, seed=1)}
SAMPLES = {"x": draw(32, 8, seed=2)}


@pytest.fixture
def fp32(tmp_path: Path) -> Path:
    save(graph(TEXT, **WEIGHTS), tmp_path / "plain.onnx")
    model = load(tmp_path / "plain.onnx")
    name_nodes(model)
    save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_products_become_integer_and_outputs_stay_near(
    fp32: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coverage = quantize_by_nncf(fp32, SAMPLES, tmp_path / "int8.onnx")
    assert str(coverage) == "2/2 products in int8"
    x = draw(12, 8, seed=5)
    expected = compute(graph(TEXT, **WEIGHTS), x=x)["y"]
    with OnnxRuntimeEngine().build_reference(tmp_path / "int8.onnx") as session:
        found = session.run({"x": x})["y"]
    assert 0 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.3  # it cuts ranges off
    assert capsys.readouterr().out == ""  # JSON may go there


def test_excluded_nodes_stay_float(fp32: Path, tmp_path: Path) -> None:
    coverage = quantize_by_nncf(fp32, SAMPLES, tmp_path / "int8.onnx", exclude=["node0"])
    assert (coverage.integer, coverage.products) == (1, 2)


def test_what_it_cannot_do_is_told_with_a_way_out(fp32: Path, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="NNCF cannot quantize") as caught:
        quantize_by_nncf(fp32, {"z": SAMPLES["x"]}, tmp_path / "int8.onnx")
    assert "leave --int8-by out" in caught.value.hint


def test_without_the_library_the_extra_is_named(fp32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(EngineUnavailable, match="not installed") as caught:
        quantize_by_nncf(fp32, SAMPLES, tmp_path / "int8.onnx")
    assert caught.value.extra == "nncf"


class TestRecipe:
    def quantized(self, fp32: Path, **fields: Any) -> str:
        (fp32.parent / "out").mkdir()
        recipe = Recipe.model_validate(
            {"source": "text", "name": "m", "precision": "int8", "int8_by": "nncf", **fields}
        )
        return quantize_graph(fp32, recipe, SAMPLES, fp32.parent / "out" / "model.onnx").notes[0]

    def test_names_the_quantizer(self, fp32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("graphkiln_converters.precision.quantize", None)
        assert self.quantized(fp32) == "2/2 products in int8"

    def test_and_what_stays_fp32(self, fp32: Path) -> None:
        assert self.quantized(fp32, keep_fp32=["node0"]) == "1/2 products in int8"

    @pytest.mark.parametrize("fields", [{"calibration_method": "entropy"}, {"quantize_bias": False}])
    def test_what_nncf_does_otherwise_is_refused(self, fp32: Path, fields: dict[str, Any]) -> None:
        with pytest.raises(ConversionError, match="--int8-by nncf finds ranges"):
            self.quantized(fp32, **fields)


def test_what_others_log_is_still_heard(caplog: pytest.LogCaptureFixture) -> None:
    """NNCF's own way to be silent raises the level of the root logger's handlers, too."""
    _import_nncf()
    logging.getLogger("graphkiln.lowering").warning("said")
    assert "said" in caplog.text


def test_without_the_library_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is not even there: it would be missed first, minutes later it would be NNCF."""
    monkeypatch.setitem(sys.modules, "nncf", None)
    fields = {"source": "none.onnx", "name": "m", "model_store": tmp_path, "precision": "int8", "int8_by": "nncf"}
    with pytest.raises(EngineUnavailable, match="not installed") as caught:
        convert(Recipe.model_validate(fields))
    assert caught.value.extra == "nncf"


@pytest.mark.parametrize("fields", [{"int8_by": "nncf"}, {"calibration_method": "entropy"}])
def test_a_quantizer_that_would_quantize_nothing_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    recipe = Recipe.model_validate({"source": "none.onnx", "name": "m", "model_store": tmp_path, **fields})
    with pytest.raises(ConversionError, match="nothing is quantized in fp32") as caught:
        convert(recipe)
    assert "--precision int8" in caught.value.hint


def test_a_library_that_cannot_be_loaded_is_told(fp32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken" / "nncf").mkdir(parents=True)
    (tmp_path / "broken" / "nncf" / "__init__.py").write_text("raise AttributeError('onnx has no such thing')")
    monkeypatch.delitem(sys.modules, "nncf", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "broken")
    with pytest.raises(
        EngineUnavailable, match="NNCF cannot be loaded: AttributeError: onnx has no such thing"
    ) as told:
        quantize_by_nncf(fp32, SAMPLES, tmp_path / "int8.onnx")
    assert "leave --int8-by out" in told.value.hint


def test_a_graph_that_onnx_runtime_refuses_is_told(fp32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nncf = _import_nncf()

    def quantize(model: Any, *_: object, **__: object) -> Any:
        model.graph.node[0].op_type = "Nonsense"
        return model

    monkeypatch.setattr(nncf, "quantize", quantize)
    with pytest.raises(LoweringError, match="NNCF cannot quantize") as told:
        quantize_by_nncf(fp32, SAMPLES, tmp_path / "int8.onnx")
    assert "Nonsense" in told.value.attempts[0]
    assert "leave --int8-by out" in told.value.hint
