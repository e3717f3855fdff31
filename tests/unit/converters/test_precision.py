"""Lowering a proven graph: fp16 and bf16 by a pass, int8 by calibration, and what must stay fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph

from graphkiln_backend.graph.errors import ConversionError, VerificationError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.base import Rewritten
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.proof.policy import EXPORT, FP16
from graphkiln_converters.precision import limits_for, lower_and_prove, lower_graph, quantize_graph
from graphkiln_converters.proving import ProvenGraph, ReferenceSamples, prove_graph
from graphkiln_converters.recipe import Recipe

TEXT = """(float[batch,8] x) => (float[batch,6] y) {
    a = MatMul(x, first)
    r = Relu(a)
    b = MatMul(r, second)
    c = MatMul(b, third)
    y = Relu(c)
}"""
USUAL = {"first": draw(8, 16), "second": draw(16, 16, seed=1), "third": draw(16, 6, seed=2)}
OVERFLOWING = {**USUAL, "second": USUAL["second"] * np.float32(2e4), "third": USUAL["third"] * np.float32(1e-4)}
"""The second product is above 65504; the third brings it back."""


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
    return lower_and_prove(proven(folder, weights), recipe(**fields), samples(weights), calibration)


class TestLimits:
    def test_are_those_of_the_precision(self) -> None:
        assert limits_for(recipe(), Precision.FP32) == EXPORT
        assert limits_for(recipe(), Precision.FP16) == FP16

    def test_can_be_loosened(self) -> None:
        limits = limits_for(recipe(relative_l2=0.3), Precision.FP16)
        assert (limits.relative_l2, limits.worst_element) == (0.3, FP16.worst_element)


class TestHalf:
    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_is_proven_beside_the_source(self, tmp_path: Path, precision: str) -> None:
        lowered = lower(tmp_path, USUAL, precision=precision)
        assert [verdict.step for verdict in lowered.verification] == ["export", precision]
        assert lowered.graph == tmp_path / precision / "model.onnx"
        assert [report.note for report in lowered.rewritten.reports] == [f"3/3 products in {precision}"]
        model = onnx_ir.load(lowered.graph)
        assert {str(value.dtype) for value in model.graph.initializers.values()} == {
            "FLOAT16" if precision == "fp16" else "BFLOAT16"
        }

    def test_the_note_on_bf16_says_where_to_serve_it(self, tmp_path: Path) -> None:
        assert "OpenVINO" in lower(tmp_path, USUAL, precision="bf16").notes[-1]

    def test_inputs_and_outputs_too(self, tmp_path: Path) -> None:
        lowered = lower(tmp_path, USUAL, precision="fp16", lower_edges=True)
        assert [str(spec) for spec in lowered.proof.signature.inputs] == ["x FP16[batch,8]"]
        assert lowered.proof.golden.inputs["x"].dtype == np.float16
        assert lowered.rewritten.edge.to_graph_feeds({"x": draw(1, 8)})["x"].dtype == np.float16

    def test_an_overflow_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(VerificationError, match="NaN or Inf"):
            lower(tmp_path, OVERFLOWING, precision="fp16", amp="O3")

    @pytest.mark.parametrize("fields", [{"amp": "O0"}, {"keep_fp32": ["MatMul"]}])
    def test_lowering_nothing_is_refused(self, tmp_path: Path, fields: dict[str, Any]) -> None:
        with pytest.raises(ConversionError, match=r"--precision fp16 lowers nothing: .+") as caught:
            lower(tmp_path, USUAL, precision="fp16", **fields)
        assert "--keep-fp32" in caught.value.hint

    def test_the_emulated_graph_lies_beside_and_computes_the_same(self, tmp_path: Path) -> None:
        fp32 = proven(tmp_path, USUAL)
        (tmp_path / "out").mkdir()
        lowered = lower_graph(fp32.graph, recipe(precision="fp16"), tmp_path / "out" / "model.onnx")
        assert lowered.emulated == tmp_path / "out" / "emulated" / "model.onnx"
        x = draw(3, 8)
        expected = compute(graph(TEXT, **USUAL), x=x)["y"]
        np.testing.assert_allclose(compute(onnx_ir.load(lowered.emulated), x=x)["y"], expected, rtol=2e-2, atol=2e-2)


class TestSearch:
    def test_keeps_what_overflows_and_nothing_else(self, tmp_path: Path) -> None:
        lowered = lower(tmp_path, OVERFLOWING, precision="fp16", amp="O3", search_keep=True)
        assert lowered.notes[0] == "kept in fp32 by search: node2, node3"
        assert lowered.rewritten.reports[-1].note == "1/3 products in fp16"
        assert not (tmp_path / "fp16" / "trial").exists()

    def test_keeps_nothing_where_nothing_must_be(self, tmp_path: Path) -> None:
        lowered = lower(tmp_path, USUAL, precision="fp16", search_keep=True)
        assert lowered.notes[0] == "kept in fp32 by search: nothing"

    def test_says_what_it_found(self, tmp_path: Path, logged: list[str]) -> None:
        lower(tmp_path, OVERFLOWING, precision="fp16", amp="O3", search_keep=True)
        assert "2 of 5 nodes stay fp32: node2, node3" in logged


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

    @pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
    def test_all_products_become_integer(self, tmp_path: Path, method: str) -> None:
        assert self.quantized(tmp_path, calibration_method=method) == "3/3 products in int8"

    @pytest.mark.parametrize("fields", [{"keep_fp32": ["node2"]}, {"keep_fp32": ["*2", "Conv"]}])
    def test_but_those_that_are_kept(self, tmp_path: Path, fields: dict[str, Any]) -> None:
        assert self.quantized(tmp_path, **fields) == "2/3 products in int8"

    def test_or_the_first_and_the_last(self, tmp_path: Path) -> None:
        assert self.quantized(tmp_path, quantize_ends=False) == "1/3 products in int8"

    def test_none_of_them_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match="not one product became integer"):
            self.quantized(tmp_path, keep_fp32=["MatMul"])

    def test_search_keeps_what_256_steps_cannot_tell_apart(self, tmp_path: Path) -> None:
        """One channel is 10,000 times as large as the others, and weighs as much less in what reads it."""
        scale = np.ones(16, np.float32)
        scale[0] = 1e4
        weights = {**USUAL, "first": USUAL["first"] * scale, "second": USUAL["second"] / scale[:, None]}
        with pytest.raises(VerificationError):
            lower(tmp_path, weights, precision="int8")
        (tmp_path / "searched").mkdir()
        lowered = lower(tmp_path / "searched", weights, precision="int8", search_keep=True)
        kept = lowered.notes[0].removeprefix("kept in fp32 by search: ").split(", ")
        assert 0 < len(kept) < 4
        assert "1/3 products in int8" in lowered.notes[1]
        assert lowered.verification[-1].verdict.endswith("PASS")

    def test_the_fp32_graph_is_not_changed(self, tmp_path: Path) -> None:
        fp32 = proven(tmp_path, USUAL)
        before = fp32.graph.read_bytes()
        (tmp_path / "out").mkdir()
        quantize_graph(fp32.graph, recipe(precision="int8"), {"x": draw(8, 8)}, tmp_path / "out" / "model.onnx")
        assert fp32.graph.read_bytes() == before
