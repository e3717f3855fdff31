"""The passes of a conversion, and their combined result."""

from __future__ import annotations

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph, operators

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS, catalog, edge_passes, without


def network() -> onnx_ir.Model:
    """Something for every optimization: a padded convolution with a batch norm, constants, a layer norm, a product."""
    return graph(
        """(float[b,3,6,6] image) => (float[b,4] scores, float[b,8] features) {
            padded = Pad(image, widths, zero)
            convolved = Conv(padded, kernel)
            normed = BatchNormalization(convolved, ones, zeros, mean, variance)
            active = Relu(normed)
            pooled = GlobalAveragePool(active)
            flat = Flatten(pooled)
            m = ReduceMean<keepdims=1>(flat, last)
            c = Sub(flat, m)
            q = Mul(c, c)
            v = ReduceMean<keepdims=1>(q, last)
            e = Add(v, epsilon)
            d = Sqrt(e)
            n = Div(c, d)
            g = Mul(n, scale)
            features = Add(g, zeros)
            offset = Add(half, half)
            p = MatMul(features, head)
            scores = Add(p, offset)
        }""",
        widths=np.array([0, 0, 1, 1, 0, 0, 1, 1]), zero=np.float32(0), kernel=draw(8, 3, 3, 3), last=np.array([-1]),
        ones=np.ones(8, np.float32), zeros=np.zeros(8, np.float32), mean=draw(8), variance=np.full(8, 0.5, np.float32),
        epsilon=np.float32(1e-5), scale=draw(8), head=draw(8, 4), half=np.full(4, 0.5, np.float32),
    )  # fmt: skip


def names(passes: object) -> list[str]:
    return [graph_pass.name for graph_pass in passes]  # type: ignore[attr-defined]


class TestOptimizations:
    def test_optimizations_keep_the_numbers(self) -> None:
        model, image = network(), draw(3, 3, 6, 6, seed=5)
        expected = compute(model, image=image)
        rewritten = run_passes(model, OPTIMIZATIONS)
        found = compute(model, image=image)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)
        assert rewritten.edge.to_graph_outputs(expected) == expected

    def test_optimizations_apply(self) -> None:
        model = network()
        run_passes(model, OPTIMIZATIONS)
        assert operators(model) == ["Conv", "Relu", "GlobalAveragePool", "Flatten", "LayerNormalization", "Gemm"]

    @pytest.mark.parametrize("skipped", names(OPTIMIZATIONS))
    def test_each_can_be_skipped(self, skipped: str) -> None:
        model, image = network(), draw(2, 3, 6, 6)
        expected = compute(model, image=image)["scores"]
        rewritten = run_passes(model, without(OPTIMIZATIONS, [skipped]))
        assert skipped not in [report.name for report in rewritten.reports]
        np.testing.assert_allclose(compute(model, image=image)["scores"], expected, rtol=1e-4, atol=1e-5)

    def test_optimizations_are_idempotent(self) -> None:
        model = network()
        run_passes(model, OPTIMIZATIONS)
        before = operators(model)
        run_passes(model, OPTIMIZATIONS)
        assert operators(model) == before


class TestWithout:
    def test_unknown_name(self) -> None:
        with pytest.raises(ConversionError, match="there is no pass 'cleanup' to skip") as caught:
            without(OPTIMIZATIONS, ["cleanup"])
        assert "'clean-up'" in caught.value.hint


class TestEdgePasses:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, ["rename"]),
            ({"keep_names": True}, []),
            ({"keep_names": True, "softmax": True, "top_k": 2}, ["softmax", "top-k"]),
            ({"outputs": ("features",)}, ["prune-outputs", "rename"]),
            ({"preprocess": Preprocess()}, ["rename", "input-uint8-nhwc"]),
            ({"preprocess": Preprocess(), "nhwc": True}, ["rename", "input-uint8-nhwc", "nhwc"]),
        ],
    )
    def test_requested_passes(self, options: dict[str, object], expected: list[str]) -> None:
        assert names(edge_passes(network(), **options)) == expected  # type: ignore[arg-type]

    def test_names_of_kept_outputs(self) -> None:
        model = network()
        edge = run_passes(model, edge_passes(model, outputs=("features",))).edge
        assert [value.name for value in model.graph.outputs] == ["OUTPUT_0"]
        assert edge.output_name("features") == "OUTPUT_0"
        assert edge.input_name("image") == "INPUT_0"

    def test_kept_names_that_no_request_could_hold_are_numbered(self) -> None:
        """A value that is both an input and an output; NUL, which ends a name in Triton, and its kind."""
        model = graph("(int64[b] x, int64[b] y, int64[b] INPUT_1) => (int64[b] sum, int64[b] x) { sum = Add(x, y) }")
        model.graph.inputs[1].name = "a\0b"
        edge = run_passes(model, edge_passes(model, keep_names=True)).edge
        assert [value.name for value in model.graph.inputs] == ["x", "INPUT_1_", "INPUT_1"]
        assert [value.name for value in model.graph.outputs] == ["sum", "OUTPUT_1"]
        assert (edge.inputs, edge.outputs) == ({"a\0b": "INPUT_1_"}, {"x": "OUTPUT_1"})
        x, y = np.array([1, 2]), np.array([5, 7])
        found = compute(model, x=x, INPUT_1_=y, INPUT_1=y)
        np.testing.assert_array_equal(found["sum"], x + y)
        np.testing.assert_array_equal(found["OUTPUT_1"], x)

    def test_kept_names_like_those_of_inserted_nodes(self) -> None:
        text = """(float[b,3,6,6] image) => (float[b,3] image_cast, float[b,3] INDEX_0) {
            div_pixels = GlobalAveragePool(image)
            image_cast_before_topk = Flatten(div_pixels)
            image_cast = Mul(image_cast_before_topk, image_cast_k)
            INDEX_0 = Relu(image_cast_before_topk)
        }"""
        weights = {"image_cast_k": np.array([3, 2, 1], np.float32)}
        model, pixels = graph(text, **weights), np.random.default_rng(0).integers(0, 256, (2, 6, 6, 3), np.uint8)
        edge = run_passes(
            model, edge_passes(model, keep_names=True, top_k=2, preprocess=Preprocess(std=(2.0, 3.0, 4.0)))
        ).edge
        expected = edge.to_graph_outputs(compute(graph(text, **weights), **edge.to_source_feeds({"image": pixels})))
        found = compute(model, image=pixels)
        assert [*found] == [*expected] == ["image_cast", "INDEX_0_", "INDEX_0"]
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)
        assert edge.ranking is not None
        assert edge.ranking.indices == "INDEX_0_"

    def test_numbered_names_that_inner_values_have(self) -> None:
        """Of weights, and of values in the branches of an If."""
        text = """(float[b] x, bool c) => (float[b] y) {
            z = Mul(x, INPUT_0)
            y = If(c) <then_branch = one () => (float[b] t) { OUTPUT_0 = Add(z, z) t = Neg(OUTPUT_0) },
                       else_branch = two () => (float[b] e) { e = Neg(z) }>
        }"""
        weights = {"INPUT_0": np.array([2], np.float32)}
        model, x = graph(text, **weights), draw(3)
        run_passes(model, edge_passes(model))
        for taken in (True, False):
            expected = compute(graph(text, **weights), x=x, c=np.array(taken))["y"]
            np.testing.assert_array_equal(compute(model, INPUT_0=x, INPUT_1=np.array(taken))["OUTPUT_0"], expected)

    def test_all_edge_passes(self) -> None:
        model, image = network(), np.random.default_rng(0).integers(0, 256, (2, 6, 6, 3), np.uint8)
        passes = edge_passes(model, softmax=True, top_k=2, preprocess=Preprocess(std=(2.0, 3.0, 4.0)), nhwc=True)
        edge = run_passes(model, passes).edge
        expected = edge.to_graph_outputs(compute(network(), **edge.to_source_feeds({"INPUT_0": image})))
        found = compute(model, INPUT_0=image)
        assert list(found) == ["OUTPUT_0", "INDEX_0", "OUTPUT_1"]
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)

    def test_bytes_are_transposed_once(self) -> None:
        """With embedded preprocessing the input is `[batch, height, width, channels]` already."""
        model = network()
        run_passes(model, edge_passes(model, preprocess=Preprocess(), nhwc=True))
        assert str(model.graph.inputs[0].shape) == "[b,6,6,3]"


class TestCatalog:
    def test_catalog_lists_each_pass_once(self) -> None:
        listed = names(graph_pass for graph_pass, _ in catalog())
        assert len(set(listed)) == len(listed)
        assert listed[: len(OPTIMIZATIONS)] == names(OPTIMIZATIONS)
        model = network()
        requested = edge_passes(model, outputs=("scores",), softmax=True, top_k=1, preprocess=Preprocess(), nhwc=True)
        assert listed[len(OPTIMIZATIONS) :] == names(requested), "in the order in which they run"
