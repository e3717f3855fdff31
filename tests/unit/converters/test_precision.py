"""Lowering a proven graph: fp16 and bf16 by a pass, int8 by calibration, and nodes that stay fp32."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.quantization import Quantization, quantize
from graphkiln_backend.engines.openvino import OpenVinoSession
from graphkiln_backend.engines.registry import load_engine
from graphkiln_backend.graph.errors import ConversionError, EngineUnavailable, LoweringError, VerificationError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.passes.base import Rewritten
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.passes.graph_file import load, save
from graphkiln_backend.passes.precision import name_nodes
from graphkiln_backend.proof.policy import EXPORT
from graphkiln_backend.repository.config import read_config
from graphkiln_converters import precision
from graphkiln_converters.convert import convert
from graphkiln_converters.precision import (
    compare_speed,
    kept_by_recipe,
    lower_and_prove,
    quantize_by_modelopt,
    quantize_by_nncf,
    quantize_graph,
    smallest_kept,
)
from graphkiln_converters.prove import Proof, ProvenGraph, ReferenceSamples, prove_graph
from graphkiln_converters.recipe import Recipe

TEXT = """(float[batch,8] x) => (float[batch,6] y) {
    a = MatMul(x, first)
    r = Relu(a)
    b = MatMul(r, second)
    c = MatMul(b, third)
    y = Relu(c)
}"""
USUAL = {"first": draw(8, 16), "second": draw(16, 16, seed=1), "third": draw(16, 6, seed=2)}
# The second product is above 65504; the third brings it back.
OVERFLOWING = {**USUAL, "second": USUAL["second"] * np.float32(2e4), "third": USUAL["third"] * np.float32(1e-4)}


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate({"source": "text", "name": "m", **fields})


def samples(weights: dict[str, Any]) -> list[ReferenceSamples]:
    x = draw(12, 8, seed=5)
    return [ReferenceSamples(feeds={"x": x}, outputs=compute(graph(TEXT, **weights), x=x))]


def proven(folder: Path, weights: dict[str, Any]) -> ProvenGraph:
    path = folder / "model.onnx"
    save(graph(TEXT, **weights), path)
    proof = prove_graph(path, samples(weights), EXPORT)
    rewritten = Rewritten(reports=(), edge=Edge())
    return ProvenGraph(graph=path, proof=proof, rewritten=rewritten, verification=proof.verification)


def lower(folder: Path, weights: dict[str, Any], **fields: Any) -> ProvenGraph:
    calibration = {"x": draw(64, 8, seed=6)}
    return lower_and_prove(proven(folder, weights), recipe(**fields), samples(weights), calibration, (1, 3))


class TestHalf:
    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_fp16_and_bf16_are_proven_against_the_source(self, tmp_path: Path, precision: str) -> None:
        lowered = lower(tmp_path, USUAL, precision=precision)
        assert [verdict.step for verdict in lowered.verification] == ["export", precision]
        assert lowered.graph == tmp_path / precision / "model.onnx"
        assert [report.note for report in lowered.rewritten.reports] == [f"3/3 products in {precision}"]
        model = onnx_ir.load(lowered.graph)
        assert {str(value.dtype) for value in model.graph.initializers.values()} == {
            "FLOAT16" if precision == "fp16" else "BFLOAT16"
        }

    def test_an_fp16_overflow_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(VerificationError, match="NaN or Inf"):
            lower(tmp_path, OVERFLOWING, precision="fp16", amp="O3")

    def test_lowering_nothing_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match=r"--precision fp16 lowers nothing: .+") as caught:
            lower(tmp_path, USUAL, precision="fp16", amp="O0")
        assert "--keep-fp32" in caught.value.hint


class TestSearch:
    def test_the_search_keeps_only_nodes_that_overflow(self, tmp_path: Path) -> None:
        lowered = lower(tmp_path, OVERFLOWING, precision="fp16", amp="O3", search_keep=True)
        assert lowered.notes[0] == "kept in fp32 by search: node2, node3"
        assert lowered.rewritten.reports[-1].note == "1/3 products in fp16"
        assert not (tmp_path / "fp16" / "trial").exists()


class TestInt8:
    def quantized(self, tmp_path: Path, **fields: Any) -> str:
        (tmp_path / "out").mkdir()
        lowered = quantize_graph(
            proven(tmp_path, USUAL).graph,
            recipe(precision="int8", **fields),
            {"x": draw(64, 8, seed=6)},
            tmp_path / "out" / "model.onnx",
        )
        assert lowered.emulated == lowered.graph == tmp_path / "out" / "model.onnx"
        return lowered.notes[0]

    def test_kept_products_stay_fp32(self, tmp_path: Path) -> None:
        assert self.quantized(tmp_path, keep_fp32=["*2", "Conv"]) == "2/3 products in int8"

    def test_no_integer_product_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match="was quantized"):
            self.quantized(tmp_path, keep_fp32=["MatMul"])

    def test_the_search_keeps_channels_of_different_scale(self, tmp_path: Path) -> None:
        """One channel is 10,000 times as large as the others, and its weight as much smaller."""
        scale = np.ones(16, np.float32)
        scale[0] = 1e4
        weights = {**USUAL, "first": USUAL["first"] * scale, "second": USUAL["second"] / scale[:, None]}
        with pytest.raises(VerificationError):
            lower(tmp_path, weights, precision="int8", int8_by="onnxruntime")
        (tmp_path / "searched").mkdir()
        fields = {"precision": "int8", "int8_by": "onnxruntime", "search_keep": True}
        lowered = lower(tmp_path / "searched", weights, **fields)
        kept = lowered.notes[0].removeprefix("kept in fp32 by search: ").split(", ")
        assert 0 < len(kept) < 4
        assert "1/3 products in int8" in lowered.notes[1]
        assert lowered.verification[-1].verdict.endswith("PASS")


# The speed of int8 on the machine that converts.

ONE_PRODUCT = "(float[batch,8] x) => (float[batch,6] y) { a = MatMul(x, first) y = Relu(a) }"
GRAPH = {"first": draw(8, 6)}


@pytest.fixture
def cpu_with_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both engines compute int8 on any CPU: without VNNI, OpenVINO's is refused."""
    for module in ("hardware", "openvino_numbers", "onnxruntime.loading", "onnxruntime.engine"):
        monkeypatch.setattr(f"graphkiln_backend.engines.{module}.saturates_products_of_bytes", lambda: False)


@pytest.fixture
def fp32(tmp_path: Path) -> Path:
    save(graph(ONE_PRODUCT, **GRAPH), tmp_path / "fp32.onnx")
    return tmp_path / "fp32.onnx"


@pytest.fixture
def int8(fp32: Path) -> Path:
    quantize(fp32, {"x": draw(64, 8, seed=6)}, Quantization(), fp32.with_name("int8.onnx"))
    return fp32.with_name("int8.onnx")


@pytest.fixture
def golden() -> GoldenSamples:
    x = draw(2, 8, seed=5)
    outputs = compute(graph(ONE_PRODUCT, **GRAPH), x=x)
    return GoldenSamples(inputs={"x": x}, source_outputs=outputs, graph_outputs=outputs)


def taking(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[float, float]) -> None:
    """Set the seconds of each engine for fp32 and int8; both are run once."""
    left = iter(pairs)

    def times(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        assert all(run() for run in runs.values())
        return dict(zip(runs, next(left), strict=True))

    monkeypatch.setattr("graphkiln_converters.precision.fastest_runs_s", times)


def only(monkeypatch: pytest.MonkeyPatch, engine: str, error: Exception) -> None:
    """Leave one engine; the others raise."""

    def fail(name: str) -> object:
        if name == engine:
            return load_engine(name)
        raise error

    monkeypatch.setattr("graphkiln_converters.precision.load_engine", fail)


@pytest.mark.usefixtures("cpu_with_vnni")
def test_int8_slower_than_fp32_is_warned_about(
    fp32: Path, int8: Path, golden: GoldenSamples, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With OpenVINO int8 is faster than fp32, but slower than fp32 with ONNX Runtime."""
    taking(monkeypatch, (0.1, 0.3), (0.4, 0.2))
    with caplog.at_level(logging.WARNING):
        reported = compare_speed(fp32, int8, golden)
    assert "0.33x with onnxruntime and 2.00x with openvino" in reported
    assert reported.endswith("the fastest there is fp32 with onnxruntime")
    assert [record.getMessage() for record in caplog.records] == [reported]


@pytest.mark.usefixtures("cpu_with_vnni")
def test_an_engine_that_refuses_int8_is_not_measured(
    fp32: Path, int8: Path, golden: GoldenSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO's sums overflow on CPUs without VNNI."""
    only(monkeypatch, "openvino", LoweringError("refused", attempts=()))
    taking(monkeypatch, (0.1, 0.3))
    assert "onnxruntime" not in compare_speed(fp32, int8, golden)


def taking_by_quantizer(monkeypatch: pytest.MonkeyPatch, **seconds: tuple[float, float]) -> None:
    """Set the seconds of each quantizer's graph with ONNX Runtime and OpenVINO; those of fp32 are 0.5."""
    engine = iter(range(2))

    def times(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        assert all(run() for run in runs.values())
        at = next(engine)
        return {name: {"fp32": (0.5, 0.5), **seconds}[name][at] for name in runs}

    monkeypatch.setattr("graphkiln_converters.precision.fastest_runs_s", times)


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let modules not be installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(precision, "find_spec", lambda name: None if name in modules else found(name))


INT8: dict[str, Any] = {"precision": "int8", "relative_l2": 0.9}


@pytest.mark.usefixtures("cpu_with_vnni")
class TestFastestQuantizer:
    def test_the_fastest_in_any_engine_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        proofs, prove = list[str](), precision.prove_graph
        monkeypatch.setattr(
            precision, "prove_graph", lambda graph, *of: proofs.append(graph.parent.name) or prove(graph, *of)
        )
        taking_by_quantizer(monkeypatch, onnxruntime=(0.2, 0.3), nncf=(0.4, 0.1))
        lowered = lower(tmp_path, USUAL, **INT8)
        assert lowered.graph == tmp_path / "int8-nncf" / "model.onnx"
        assert proofs == ["int8-nncf"], "slower ones need no proof"
        assert [verdict.step for verdict in lowered.verification] == ["export", "int8"]
        choice, speed = lowered.notes[-2:]
        assert choice.startswith("quantized by nncf, to be served with openvino; a batch of 4 on ")
        assert choice.endswith(
            "takes 100 ms by nncf with openvino, 200 ms by onnxruntime with onnxruntime, 300 ms by onnxruntime with "
            "openvino, 400 ms by nncf with onnxruntime; written into config.pbtxt: engine: auto"
        )
        assert "1.25x with onnxruntime and 5.00x with openvino; the fastest there is int8 with openvino" in speed
        assert (lowered.quantizer, lowered.engine) == ("nncf", "auto")

    def test_a_version_has_its_engine_and_its_quantizer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(graph(TEXT, **USUAL), tmp_path / "source.onnx")
        np.savez(tmp_path / "calibration.npz", x=draw(64, 8, seed=6))
        taking_by_quantizer(monkeypatch, onnxruntime=(0.2, 0.3), nncf=(0.4, 0.1))
        given = {"source": str(tmp_path / "source.onnx"), "name": "m", "model_store": tmp_path / "store"}
        version = convert(Recipe.model_validate({**given, **INT8, "calibration": tmp_path / "calibration.npz"}))
        parameters = read_config(version.parent / "config.pbtxt").parameters
        assert parameters["engine"].string_value == "auto"
        manifest = Manifest.read(version / "manifest.json")
        assert manifest.conversion is not None
        assert manifest.conversion.recipe["int8_by"] == "nncf"  # repeated, it is the same graph
        assert "nncf" in manifest.provenance.versions

    @pytest.mark.parametrize(
        ("written", "kept"),
        [("", "onnxruntime"), ('parameters { key: "engine" value { string_value: "auto" } }', "nncf")],
    )
    def test_engines_are_those_of_an_existing_configuration(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        written: str,
        kept: str,
    ) -> None:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.pbtxt").write_text(written)
        taking_by_quantizer(monkeypatch, int8=(0.2, 0.3), onnxruntime=(0.2, 0.3), nncf=(0.4, 0.1))
        with caplog.at_level(logging.INFO):
            lowered = lower(tmp_path, USUAL, **INT8, model_store=tmp_path)
        assert (lowered.quantizer, lowered.engine) == (kept, "")  # the configuration is the user's
        assert ("with engine: auto, NNCF's quantizer would be tried" in caplog.text) == (not written)

    @pytest.mark.parametrize(
        ("missing", "fields"),
        [("nncf", {}), ("openvino", {}), ("", {"calibration_method": "entropy"}), ("", {"int8_by": "onnxruntime"})],
    )
    def test_nothing_is_compared_without_a_choice(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, fields: dict[str, Any]
    ) -> None:
        hide(monkeypatch, missing)
        taking_by_quantizer(monkeypatch, int8=(0.2, 0.3))
        lowered = lower(tmp_path, USUAL, **INT8, **fields)
        assert lowered.graph == tmp_path / "int8" / "model.onnx"
        assert (lowered.quantizer, lowered.engine) == ("onnxruntime", "")

    def test_a_cpu_without_vnni_has_no_choice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(precision.hardware, "saturates_products_of_bytes", lambda: True)
        taking_by_quantizer(monkeypatch, int8=(0.2, 0.3))
        assert lower(tmp_path, USUAL, **INT8).graph.parent.name == "int8"

    def test_equal_times_keep_the_default(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Noise decides neither on the quantizer nor on the engine."""
        taking_by_quantizer(monkeypatch, onnxruntime=(0.1, 0.3), nncf=(0.4, 0.099))
        lowered = lower(tmp_path, USUAL, **INT8)
        assert lowered.graph.parent.name == "int8-onnxruntime"
        assert (lowered.quantizer, lowered.engine) == ("onnxruntime", "")

    def test_the_next_one_follows_a_graph_that_is_not_proven(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However fast it is."""
        prove = precision.prove_graph

        def refuse(graph: Path, *given: Any) -> Proof:
            if graph.parent.name == "int8-nncf":
                raise VerificationError("wrong numbers", report="none")
            return prove(graph, *given)

        monkeypatch.setattr(precision, "prove_graph", refuse)
        taking_by_quantizer(monkeypatch, onnxruntime=(0.2, 0.3), nncf=(0.1, 0.1))
        lowered = lower(tmp_path, USUAL, **INT8)
        assert lowered.graph.parent.name == "int8-onnxruntime"
        assert "nncf refused: wrong numbers" in lowered.notes[-2]

    def test_an_engine_with_other_outputs_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = OpenVinoSession.run
        monkeypatch.setattr(
            OpenVinoSession,
            "run",
            lambda *feeds: {name: array + np.float32(9) for name, array in run(*feeds).items()},
        )
        taking_by_quantizer(monkeypatch, onnxruntime=(0.2, 0.02), nncf=(0.4, 0.01))
        lowered = lower(tmp_path, USUAL, **INT8)
        assert lowered.graph.parent.name == "int8-onnxruntime"
        assert "nncf with openvino refused" in lowered.notes[-2]
        assert (lowered.quantizer, lowered.engine) == ("onnxruntime", "")

    def test_the_search_is_for_the_fastest_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        taking_by_quantizer(monkeypatch, onnxruntime=(0.2, 0.3), nncf=(0.4, 0.1))
        monkeypatch.setattr(precision, "compare_speed", lambda *_: "compared again")
        lowered = lower(tmp_path, USUAL, **INT8, search_keep=True)
        assert lowered.graph == tmp_path / "int8-nncf" / "model.onnx"
        assert lowered.notes[0] == "kept in fp32 by search: nothing"
        assert lowered.notes[-1] == "compared again"

    def test_no_proven_graph_is_refused_as_the_default_is(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match="was quantized"):
            lower(tmp_path, USUAL, **INT8, keep_fp32=["MatMul"])


# Search for the fewest nodes that must be kept.

NAMES = [f"node{number}" for number in range(16)]


class Needs:
    """Pass if all needed nodes are kept; record the tried sets."""

    def __init__(self, *needed: str) -> None:
        self.needed = set(needed)
        self.tried: list[list[str]] = []

    def __call__(self, kept: Sequence[str]) -> bool:
        self.tried.append(list(kept))
        return self.needed <= set(kept)


@given(st.sets(st.frozensets(st.sampled_from(NAMES[:6]), min_size=1), min_size=1))
def test_a_found_set_of_kept_nodes_is_minimal(ways: set[frozenset[str]]) -> None:
    def passes(kept: Sequence[str]) -> bool:
        return any(way <= set(kept) for way in ways)

    found = smallest_kept(NAMES[:6], passes)
    assert passes(found)
    assert not any(passes([name for name in found if name != left_out]) for left_out in found)


@pytest.mark.parametrize("needed", [NAMES[0], NAMES[5], NAMES[15]])
def test_one_node_is_found_in_logarithmic_time(needed: str) -> None:
    test = Needs(needed)
    smallest_kept(NAMES, test)
    assert len(test.tried) <= 2 * 4 + 2


# Nodes that stay fp32 in an int8 graph.

MODEL = graph(
    """(float[n,4] x) => (float[n,4] y, float[n,4] z) {
        h = Relu(x)
        a = MatMul(h, first)
        s = Sigmoid(a)
        b = MatMul(s, second)
        t = Softplus(b)
        y = Add(t, s)
        z = MatMul(s, third)
    }""",
    **{name: draw(4, 4) for name in ("first", "second", "third")},
)
BEHIND = ["node4", "node5"]


@pytest.mark.parametrize(
    ("fields", "more"),
    [({}, []), ({"keep_fp32": ["Sigmoid"]}, ["node2"]), ({"quantize_ends": False}, ["node1", "node6"])],
)
def test_nodes_kept_by_a_recipe(fields: dict[str, Any], more: list[str]) -> None:
    recipe = Recipe.model_validate({"source": "text", "name": "m", **fields})
    assert kept_by_recipe(MODEL, recipe) == [*more, *BEHIND]


# Int8 by NNCF.

TWO_PRODUCTS = """(float[batch,8] x) => (float[batch,6] y) {
    a = MatMul(x, first)
    r = Relu(a)
    b = MatMul(r, second)
    y = Relu(b)
}"""
WEIGHTS = {"first": draw(8, 16), "second": draw(16, 6, seed=1)}
SAMPLES = {"x": draw(32, 8, seed=2)}


@pytest.fixture
def unquantized(tmp_path: Path) -> Path:
    save(graph(TWO_PRODUCTS, **WEIGHTS), tmp_path / "plain.onnx")
    model = load(tmp_path / "plain.onnx")
    name_nodes(model)
    save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_nncf_makes_integer_products_of_nearly_the_same_outputs(
    unquantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coverage = quantize_by_nncf(unquantized, SAMPLES, tmp_path / "int8.onnx")
    assert str(coverage) == "2/2 products in int8"
    x = draw(12, 8, seed=5)
    expected = compute(graph(TWO_PRODUCTS, **WEIGHTS), x=x)["y"]
    with OnnxRuntimeEngine().build_reference(tmp_path / "int8.onnx") as session:
        found = session.run({"x": x})["y"]
    assert 0 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.3  # it cuts ranges off
    assert capsys.readouterr().out == ""  # JSON may go there


def test_an_error_of_nncf_suggests_the_default_quantizer(unquantized: Path, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="NNCF cannot quantize") as caught:
        quantize_by_nncf(unquantized, {"z": SAMPLES["x"]}, tmp_path / "int8.onnx")
    assert "--int8-by onnxruntime" in caught.value.hint


def test_nncf_keeps_nodes_of_the_recipe_in_fp32(unquantized: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    lowered = quantize_graph(
        unquantized,
        recipe(precision="int8", int8_by="nncf", keep_fp32=["node0"]),
        SAMPLES,
        tmp_path / "out" / "model.onnx",
    )
    assert lowered.notes[0] == "1/2 products in int8"


def test_a_missing_nncf_is_reported_before_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing source is reported later."""
    monkeypatch.setitem(sys.modules, "nncf", None)
    fields = {"source": "none.onnx", "name": "m", "model_store": tmp_path, "precision": "int8", "int8_by": "nncf"}
    with pytest.raises(EngineUnavailable, match="not installed") as caught:
        convert(Recipe.model_validate(fields))
    assert caught.value.extra == "nncf"


@pytest.fixture
def convolutions(tmp_path: Path) -> Path:
    """Two of 16 channels: ModelOpt leaves fewer in float, and products of a row: they gain nothing there."""
    text = """(float[batch,16,8,8] x) => (float[batch,16,8,8] y) {
        a = Conv<pads=[1,1,1,1]>(x, first) r = Relu(a) b = Conv<pads=[1,1,1,1]>(r, second) y = Tanh(b)
    }"""
    save(
        graph(text, first=draw(16, 16, 3, 3) / 12, second=draw(16, 16, 3, 3, seed=1) / 12),
        tmp_path / "convolutions.onnx",
    )
    return tmp_path / "convolutions.onnx"


@pytest.mark.parametrize(
    ("keep", "quantized"),
    [
        pytest.param([], "2/2", marks=pytest.mark.slow),  # each takes ten seconds to import it
        pytest.param(["node0"], "1/2", marks=pytest.mark.wide),
    ],
)
def test_modelopt_makes_symmetric_quantizers_of_nearly_the_same_outputs(
    convolutions: Path, tmp_path: Path, keep: list[str], quantized: str
) -> None:
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "model.onnx"
    lowered = quantize_graph(
        convolutions,
        recipe(precision="int8", int8_by="modelopt", keep_fp32=keep),
        {"x": draw(16, 16, 8, 8, seed=3)},
        target,
    )
    assert lowered.notes[0] == f"{quantized} products in int8"
    zeros = [node.inputs[2] for node in onnx_ir.load(target).graph if node.op_type == "QuantizeLinear"]
    assert {str(zero.dtype) for zero in zeros if zero} == {"INT8"}
    x = draw(12, 16, 8, 8, seed=5)
    with (
        OnnxRuntimeEngine().build_reference(target) as session,
        OnnxRuntimeEngine().build_reference(convolutions) as source,
    ):
        found, expected = session.run({"x": x})["y"], source.run({"x": x})["y"]
    assert 0 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.1


@pytest.mark.slow
def test_an_error_of_modelopt_suggests_the_default_quantizer(unquantized: Path, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="ModelOpt cannot quantize") as caught:
        quantize_by_modelopt(unquantized, {"z": SAMPLES["x"]}, tmp_path / "int8.onnx")
    assert "use --int8-by onnxruntime" in caught.value.hint


@pytest.mark.parametrize("quantizer", ["nncf", "modelopt"])
@pytest.mark.parametrize("fields", [{"calibration_method": "entropy"}, {"quantize_bias": False}])
def test_options_that_others_lack_are_refused(tmp_path: Path, fields: dict[str, Any], quantizer: str) -> None:
    usual = {"source": "none.onnx", "name": "m", "model_store": tmp_path, "precision": "int8", "int8_by": quantizer}
    with pytest.raises(ConversionError, match=f"--int8-by {quantizer} finds ranges"):
        convert(Recipe.model_validate({**usual, **fields}))


def test_a_missing_modelopt_is_reported_before_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(precision, "find_spec", lambda name: None if name == "modelopt" else found(name))
    fields = {"source": "none.onnx", "name": "m", "model_store": tmp_path, "precision": "int8", "int8_by": "modelopt"}
    with pytest.raises(EngineUnavailable, match="not installed") as caught:
        convert(Recipe.model_validate(fields))
    assert caught.value.extra == "modelopt"


@pytest.mark.parametrize(
    ("fields", "flag", "needed"),
    [
        ({"int8_by": "nncf"}, "--int8-by", "int8"),
        ({"calibration_method": "entropy"}, "--calibration-method", "int8"),
        ({"calibration": ".", "precision": "bf16"}, "--calibration", "int8"),
        ({"amp": "O1"}, "--amp", "fp16 or bf16"),
        ({"search_keep": True}, "--search-keep", "fp16 or bf16"),
    ],
)
def test_options_of_another_precision_are_refused(
    tmp_path: Path, fields: dict[str, Any], flag: str, needed: str
) -> None:
    recipe = Recipe.model_validate({"source": "none.onnx", "name": "m", "model_store": tmp_path, **fields})
    with pytest.raises(ConversionError, match=f"{flag} without effect") as caught:
        convert(recipe)
    assert f"--precision {needed}" in caught.value.hint


def test_calibration_on_the_samples_of_the_proof_is_refused(tmp_path: Path) -> None:
    """Also by another name; before the source is opened."""
    np.savez(tmp_path / "c.npz", INPUT_0=SAMPLES["x"])
    (tmp_path / "link.npz").symlink_to(tmp_path / "c.npz")
    usual = {"source": "none.onnx", "name": "m", "model_store": tmp_path / "store", "precision": "int8"}
    for name in ("c.npz", "link.npz"):
        given = {"calibration": tmp_path / "c.npz", "samples": tmp_path / name}
        with pytest.raises(ConversionError, match="proves nothing"):
            convert(Recipe.model_validate({**usual, **given}))


def test_a_broken_nncf_is_reported(unquantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken" / "nncf").mkdir(parents=True)
    (tmp_path / "broken" / "nncf" / "__init__.py").write_text("raise AttributeError('onnx has no such thing')")
    monkeypatch.delitem(sys.modules, "nncf", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "broken")
    with pytest.raises(
        EngineUnavailable, match="NNCF cannot be loaded: AttributeError: onnx has no such thing"
    ) as reported:
        quantize_by_nncf(unquantized, SAMPLES, tmp_path / "int8.onnx")
    assert "use --int8-by onnxruntime" in reported.value.hint
