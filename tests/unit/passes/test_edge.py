"""Edges: equivalence with the rewritten graph, composition and inverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.passes.base import Pass, run_passes
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.passes.edge_passes import EmbedPreprocess, Nhwc, PruneOutputs, Rename, Softmax, TopK
from graphkiln_backend.passes.precision import LowerPrecision

SPEC = Preprocess(mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 0.4))


def classifier() -> onnx_ir.Model:
    """An image in; scores, another vector and a feature map out."""
    return graph(
        """(float[b,3,4,4] image) => (float[b,5] scores, float[b,3] means, float[b,2,2,2] features) {
            pooled = GlobalAveragePool(image)
            means = Flatten(pooled)
            scores = MatMul(means, head)
            features = Conv<strides=[2,2]>(image, kernel)
        }""",
        head=draw(3, 5),
        kernel=draw(2, 3, 2, 2, seed=1),
    )


PASSES: dict[str, list[Pass]] = {
    "nothing": [],
    "names": [Rename({"image": "INPUT_0"}, {"scores": "OUTPUT_0", "means": "OUTPUT_1", "features": "OUTPUT_2"})],
    "swapped names": [Rename({}, {"scores": "means", "means": "scores"})],
    "layout": [Nhwc(inputs=True, outputs=True)],
    "layout of outputs": [Nhwc(inputs=False, outputs=True)],
    "probabilities": [Softmax()],
    "best": [TopK(2)],
    "pruned": [PruneOutputs(("features", "scores"))],
    "pixels": [EmbedPreprocess(SPEC)],
    "fp16": [LowerPrecision(Precision.FP16, "O1", edges=True)],
}


def combined(kinds: Sequence[str]) -> list[Pass]:
    return [graph_pass for kind in kinds for graph_pass in PASSES[kind]]


@st.composite
def sequences(draw_from: st.DrawFn) -> list[Pass]:
    """A selection of passes in the order of a conversion."""
    order = ("pruned", "names", "probabilities", "best", "pixels", "layout of outputs")
    chosen = combined([kind for kind in order if draw_from(st.booleans())])
    pruned = any(isinstance(graph_pass, PruneOutputs) for graph_pass in chosen)
    return [
        Rename(graph_pass.inputs, {"scores": "OUTPUT_0", "features": "OUTPUT_1"})
        if pruned and isinstance(graph_pass, Rename)
        else graph_pass
        for graph_pass in chosen
    ]


def images(count: int = 3) -> AnyArray:
    return np.random.default_rng(2).integers(0, 256, (count, 4, 4, 3), np.uint8)


def source_feeds(seed: int = 0) -> dict[str, AnyArray]:
    """Normalized images, which pixels represent exactly."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 4, 4, 3), np.uint8)
    return {"image": np.stack([SPEC.normalize(image) for image in pixels])}


def check_equal(found: dict[str, AnyArray], expected: dict[str, AnyArray], rtol: float = 1e-5) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=rtol, err_msg=name)


class TestEquivalence:
    """The source's outputs, mapped by the edge, equal those of the rewritten graph."""

    def check(self, passes: Sequence[Pass], rtol: float = 1e-4) -> Edge:
        model = classifier()
        edge = run_passes(model, passes).edge
        feeds = edge.to_graph_feeds(source_feeds())
        expected = edge.to_graph_outputs(edge.keep(compute(classifier(), **edge.to_source_feeds(feeds))))
        check_equal(compute(model, **feeds), expected, rtol)
        assert [value.name for value in model.graph.inputs] == [edge.input_name("image")]
        return edge

    @pytest.mark.parametrize("kind", [kind for kind in PASSES if kind != "fp16"])
    def test_each_pass(self, kind: str) -> None:
        self.check(PASSES[kind])

    def test_lower_types_at_the_edge(self) -> None:
        self.check(PASSES["fp16"], rtol=2e-2)

    @settings(max_examples=40, deadline=None)
    @given(sequences())
    def test_combinations(self, passes: list[Pass]) -> None:
        self.check(passes)

    def test_outputs_pruned_last(self) -> None:
        passes: list[Pass] = [*combined(["names", "best"]), PruneOutputs(("OUTPUT_0", "INDEX_0"))]
        edge = self.check(passes)
        assert edge.kept == {"scores"}
        assert edge.ranking == Ranking(scores="OUTPUT_0", indices="INDEX_0")

    def test_pruned_output_with_probabilities(self) -> None:
        edge = self.check([Softmax(), TopK(2), PruneOutputs(("features",))])
        assert edge.kept == {"features"}


class TestInverse:
    @settings(max_examples=40, deadline=None)
    @given(sequences(), st.integers(0, 1000))
    def test_feeds_survive_a_round_trip(self, passes: list[Pass], seed: int) -> None:
        edge = run_passes(classifier(), passes).edge
        check_equal(edge.to_source_feeds(edge.to_graph_feeds(source_feeds(seed))), source_feeds(seed))

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.floats(0, 1), min_size=3, max_size=3),
        st.lists(st.floats(0.05, 2), min_size=3, max_size=3),
        st.sampled_from(["CHW", "HWC"]),
    )
    def test_pixels_survive_normalization(self, mean: list[float], std: list[float], layout: Any) -> None:
        spec = Preprocess(mean=tuple(mean), std=tuple(std), layout=layout)
        dims = "b,3,16,16" if layout == "CHW" else "b,16,16,3"
        model = graph(f"(float[{dims}] x) => (float[{dims}] y) {{ y = Relu(x) }}")
        edge = run_passes(model, [EmbedPreprocess(spec)]).edge
        pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
        np.testing.assert_array_equal(edge.to_graph_feeds(edge.to_source_feeds({"x": pixels}))["x"], pixels)

    def test_half_precision_round_trip(self) -> None:
        edge = run_passes(classifier(), PASSES["fp16"]).edge
        feeds = edge.to_graph_feeds(source_feeds())
        assert feeds["image"].dtype == np.float16
        check_equal(edge.to_source_feeds(feeds), source_feeds(), rtol=1e-3)

    def test_values_are_clipped_to_pixels(self) -> None:
        edge = run_passes(classifier(), PASSES["pixels"]).edge
        wild = np.full((1, 3, 4, 4), 1e6, np.float32)
        wild[:, 1] = -1e6
        pixels = edge.to_graph_feeds({"image": wild})["image"]
        assert pixels.dtype == np.uint8
        np.testing.assert_array_equal(pixels[0, 0, 0], [255, 0, 255])


class TestNames:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.permutations("abcd"), max_size=4))
    def test_composed_renamings(self, orders: list[list[str]]) -> None:
        edge, names = Edge(), dict(zip("abcd", "abcd", strict=True))
        for order in orders:
            change = dict(zip("abcd", order, strict=True))
            edge = edge.then(Edge(inputs=change, outputs=change))
            names = {source: change[name] for source, name in names.items()}
        assert {name: edge.input_name(name) for name in "abcd"} == names
        assert {name: edge.output_name(name) for name in "abcd"} == names


class TestPreprocess:
    def test_remaining_preprocessing(self) -> None:
        spec = replace(SPEC, resize=8, crop=(4, 4), color="BGR")
        expected = {
            "pixels": Preprocess(resize=8, crop=(4, 4), color="BGR", layout="HWC", dtype=DType.UINT8),
            "layout": replace(spec, layout="HWC"),
            "layout of outputs": spec,
            "fp16": replace(spec, dtype=DType.FP16),
            "names": spec,
            "best": spec,
        }
        for kind, left in expected.items():
            assert run_passes(classifier(), PASSES[kind]).edge.to_graph_preprocess(spec) == left, kind

    @pytest.mark.parametrize("kind", ["pixels", "layout", "fp16"])
    def test_remaining_preprocessing_feeds_the_graph(self, kind: str) -> None:
        edge = run_passes(classifier(), PASSES[kind]).edge
        left = edge.to_graph_preprocess(SPEC)
        made = {"image": np.stack([left.normalize(image) for image in images()])}
        feeds = {"image": np.stack([SPEC.normalize(image) for image in images()])}
        check_equal(made, edge.to_graph_feeds(feeds))
