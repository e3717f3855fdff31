"""Passes at the edge of a graph: names, scores, kept outputs, layout, embedded preprocessing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import zoo
from graphs import compute, draw, graph, operators
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edge_passes import (
    EmbedPreprocess,
    Nhwc,
    PruneOutputs,
    Rename,
    Softmax,
    TopK,
    keep_outputs,
)

TWO = "(float[b,3] x, float[b,3] z) => (float[b,3] y, float[b,3] w) { y = Add(x, z) w = Sub(y, z) }"


def test_rename() -> None:
    model, x, z = graph(TWO), draw(2, 3), draw(2, 3, seed=1)
    run_passes(model, [Rename({"x": "INPUT_0", "z": "INPUT_1"}, {"y": "OUTPUT_0", "w": "OUTPUT_1"})])
    found = compute(model, INPUT_0=x, INPUT_1=z)
    assert list(found) == ["OUTPUT_0", "OUTPUT_1"]
    np.testing.assert_allclose(found["OUTPUT_0"], x + z)
    np.testing.assert_allclose(found["OUTPUT_1"], x, atol=1e-6)


def test_inner_value_with_the_new_name() -> None:
    model = graph("(float[b,3] x) => (float[b,3] y) { OUTPUT_0 = Relu(x) INPUT_0 = Neg(OUTPUT_0) y = Exp(INPUT_0) }")
    run_passes(model, [Rename({"x": "INPUT_0"}, {"y": "OUTPUT_0"})])
    x = draw(2, 3)
    np.testing.assert_allclose(compute(model, INPUT_0=x)["OUTPUT_0"], np.exp(-np.maximum(x, 0)), rtol=1e-6)


def test_input_that_is_an_output() -> None:
    model = graph("(float[b,3] x) => (float[b,3] x, float[b,3] y) { y = Relu(x) }")
    run_passes(model, [Rename({"x": "INPUT_0"}, {"x": "OUTPUT_0", "y": "OUTPUT_1"})])
    x = draw(2, 3)
    found = compute(model, INPUT_0=x)
    assert list(found) == ["OUTPUT_0", "OUTPUT_1"]
    np.testing.assert_array_equal(found["OUTPUT_0"], x)
    np.testing.assert_array_equal(found["OUTPUT_1"], np.maximum(x, 0))


def test_missing_name_is_noted() -> None:
    (report,) = run_passes(graph(TWO), [Rename({"x": "INPUT_0"}, {"other": "OUTPUT_0"})]).reports
    assert report.note == "missing: OUTPUT_0"


SCORES = "(float[b,5] x) => (float[b,5] y, float[b,5] other) { y = Relu(x) other = Neg(x) }"
MATRIX = arrays(np.float32, (3, 5), elements=st.floats(-80, 80, width=32))


class TestSoftmax:
    @settings(max_examples=60, deadline=None)
    @given(MATRIX)
    def test_edge_equals_the_graph(self, x: np.ndarray) -> None:
        model = graph(SCORES)
        edge = run_passes(model, [Softmax()]).edge
        expected = edge.to_graph_outputs(compute(graph(SCORES), x=x))
        found = compute(model, x=x)
        np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(expected["y"].sum(axis=-1), 1, rtol=1e-5)
        np.testing.assert_array_equal(found["other"], -x)

    def test_large_scores(self) -> None:
        edge = run_passes(graph(SCORES), [Softmax()]).edge
        found = edge.to_graph_outputs({"y": np.array([[1e4, 0, -1e4]], np.float32)})["y"]
        np.testing.assert_array_equal(found, [[1, 0, 0]])
        assert found.dtype == np.float32


class TestTopK:
    @settings(max_examples=60, deadline=None)
    @given(MATRIX, st.integers(1, 5))
    def test_edge_equals_the_graph(self, x: np.ndarray, k: int) -> None:
        model = graph(SCORES)
        edge = run_passes(model, [TopK(k)]).edge
        expected = edge.to_graph_outputs(compute(graph(SCORES), x=x))
        found = compute(model, x=x)
        assert list(found) == list(expected) == ["y", "INDEX_0", "other"]
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype

    def test_k_is_bounded(self) -> None:
        with pytest.raises(ConversionError, match=r"top-k 6: the output y has 5 scores \(choose at most 5"):
            run_passes(graph(SCORES), [TopK(k=6)])

    def test_equal_scores(self) -> None:
        edge = run_passes(graph(SCORES), [TopK(3)]).edge
        found = edge.to_graph_outputs({"y": np.array([[2, 7, 2, 7, 2]], np.float32)})
        np.testing.assert_array_equal(found["INDEX_0"], [[1, 3, 0]])

    def test_shapes_and_types(self) -> None:
        model = graph(SCORES)
        edge = run_passes(model, [TopK(2)]).edge
        assert [(value.name, str(value.dtype), str(value.shape)) for value in model.graph.outputs] == [
            ("y", "FLOAT", "[b,2]"),
            ("INDEX_0", "INT64", "[b,2]"),
            ("other", "FLOAT", "[b,5]"),
        ]
        assert edge.ranking == Ranking(scores="y", indices="INDEX_0")


THREE = """(float[b,3] x) => (float[b,3] scores, float[b,3] loss, float[b,3] features) {
    features = Relu(x)
    scores = Mul(features, w)
    e = Exp(scores)
    loss = Log(e)
}"""


def three() -> onnx_ir.Model:
    return graph(THREE, w=draw(3))


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (("scores",), ["Relu", "Mul"]),
        (("features",), ["Relu"]),
        (("loss", "features"), ["Relu", "Mul", "Exp", "Log"]),
    ],
)
def test_unneeded_nodes_are_removed(kept: tuple[str, ...], left: list[str]) -> None:
    model, x = three(), draw(2, 3, seed=1)
    edge = run_passes(model, [PruneOutputs(kept)]).edge
    assert operators(model) == left
    found, expected = compute(model, x=x), edge.to_graph_outputs(compute(three(), x=x))
    assert list(found) == list(expected), "in the graph's order, not in that of the request"
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    assert edge.kept == set(kept)


def test_unneeded_inputs_stay() -> None:
    model = graph("(float[b,3] x, float[b,3] z) => (float[b,3] y, float[b,3] w) { y = Relu(x) w = Relu(z) }")
    run_passes(model, [PruneOutputs(("y",))])
    assert [value.name for value in model.graph.inputs] == ["x", "z"]


def test_all_outputs_kept_is_skipped() -> None:
    (report,) = run_passes(three(), [PruneOutputs(("loss", "features", "scores"))]).reports
    assert (report.ran, report.note) == (False, "all outputs are kept")


def test_unknown_output_is_refused() -> None:
    with pytest.raises(ConversionError, match="the graph has no output 'score'") as caught:
        run_passes(three(), [PruneOutputs(("score",))])
    assert "'scores'" in caught.value.hint


class TestFiles:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        onnx_ir.save(three(), tmp_path / "model.onnx")
        return tmp_path / "model.onnx"

    def test_keep_outputs_returns_the_dropped_share(self, path: Path, tmp_path: Path) -> None:
        target = tmp_path / "part.onnx"
        assert keep_outputs(path, ["scores"], target) == 0.5
        part, x = onnx_ir.load(target), draw(2, 3)
        np.testing.assert_array_equal(compute(part, x=x)["scores"], compute(three(), x=x)["scores"])
        assert operators(onnx_ir.load(path)) == operators(three()), "the original is not changed"

    def test_keep_outputs_with_external_weights(self, tmp_path: Path) -> None:
        folder = zoo.add_external(tmp_path, "external")
        target = tmp_path / "part" / "model.onnx"
        target.parent.mkdir()
        keep_outputs(folder / "model.onnx", ["y"], target)
        onnx.checker.check_model(onnx.load(target), full_check=True)


MIXED = """(float[b,3,4,5] image, float[b,7] row) => (float[b,3,4,5] map, float[b,7] other) {
    map = Relu(image)
    other = Neg(row)
}"""


def test_nhwc_of_rank_4_tensors() -> None:
    model, image, row = graph(MIXED), draw(2, 3, 4, 5), draw(2, 7)
    run_passes(model, [Nhwc(inputs=True, outputs=True)])
    found = compute(model, image=np.ascontiguousarray(image.transpose(0, 2, 3, 1)), row=row)
    np.testing.assert_array_equal(found["map"], np.maximum(image, 0).transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(found["other"], -row)


def test_nhwc_by_declared_rank() -> None:
    edge = run_passes(graph(MIXED), [Nhwc(inputs=True, outputs=True)]).edge
    assert edge.to_graph_outputs({"other": draw(2, 3, 4, 5)})["other"].shape == (2, 3, 4, 5)
    assert edge.to_source_feeds({"row": draw(2, 3, 4, 5)})["row"].shape == (2, 3, 4, 5)


def test_preprocessing_of_a_graph_without_image() -> None:
    """Only its output is a feature map."""
    model = graph("(float[b,12] x) => (float[b,3,2,2] y) { y = Reshape(x, s) }", s=np.array([-1, 3, 2, 2]))
    edge = run_passes(model, [Nhwc(inputs=True, outputs=True)]).edge
    assert edge.to_graph_preprocess(Preprocess()).layout == "CHW"


CHW = "(float[b,3,4,5] x) => (float[b,3,4,5] y) { y = Relu(x) }"
HWC = "(float[b,4,5,3] x) => (float[b,4,5,3] y) { y = Relu(x) }"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pixels(channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (2, 4, 5, channels), np.uint8)


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
@pytest.mark.parametrize(
    "numbers", [{}, {"mean": MEAN}, {"std": STD}, {"mean": MEAN, "std": STD}], ids=["none", "mean", "std", "both"]
)
def test_graph_normalizes_as_the_client(layout: Any, numbers: dict[str, Any]) -> None:
    spec = Preprocess(layout=layout, **numbers)
    text = CHW if layout == "CHW" else HWC
    model = graph(text)
    run_passes(model, [EmbedPreprocess(spec)])
    normal = np.stack([spec.normalize(image) for image in pixels()])
    expected = compute(graph(text), x=normal)["y"]
    np.testing.assert_allclose(compute(model, x=pixels())["y"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", ["5", "w"], ids=["width 5", "any width"])
@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_normalization_is_exact(layout: Any, width: str) -> None:
    spec = Preprocess(layout=layout, mean=MEAN, std=STD)
    text = (CHW if layout == "CHW" else HWC).replace("Relu", "Identity")
    model = graph(text.replace("4,5", f"4,{width}"))
    run_passes(model, [EmbedPreprocess(spec)])
    shift, scale = (np.asarray(each, np.float32) * np.float32(255) for each in (MEAN, STD))
    expected = (pixels().astype(np.float32) - shift) / scale
    np.testing.assert_array_equal(
        compute(model, x=pixels())["y"], expected.transpose(0, 3, 1, 2) if layout == "CHW" else expected
    )


def test_one_channel() -> None:
    spec = Preprocess(color="L", mean=(0.3,), std=(0.2,))
    model = graph("(float[b,1,4,5] x) => (float[b,1,4,5] y) { y = Identity(x) }")
    run_passes(model, [EmbedPreprocess(spec)])
    expected = np.stack([spec.normalize(image) for image in pixels(1)])
    np.testing.assert_allclose(compute(model, x=pixels(1))["y"], expected, rtol=1e-5, atol=1e-5)


def test_input_takes_bytes_in_nhwc() -> None:
    model = graph(CHW)
    run_passes(model, [EmbedPreprocess(Preprocess())])
    (value,) = model.graph.inputs
    assert (value.name, str(value.dtype), str(value.shape)) == ("x", "UINT8", "[b,4,5,3]")
    assert operators(model) == ["Cast", "Sub", "Div", "Transpose", "Relu"]
    (rows,) = {each.const_value.shape.numpy() for each in model.graph.initializers.values()}
    assert rows == (5, 3)  # a whole row of pixels


@pytest.mark.parametrize(
    "text",
    [
        "(float[b,3] x) => (float[b,3] y) { y = Relu(x) }",
        "(int32[b,3,4,5] x) => (int32[b,3,4,5] y) { y = Neg(x) }",
        "(float[b,3,4,5] x, float[b,3,4,5] z) => (float[b,3,4,5] y) { y = Add(x, z) }",
    ],
    ids=["no image", "integers", "two inputs"],
)
def test_other_inputs_are_skipped(text: str) -> None:
    (report,) = run_passes(graph(text), [EmbedPreprocess(Preprocess())]).reports
    assert (report.ran, report.note) == (False, "the input is not an FP32 image")


@pytest.mark.parametrize(("mean", "ran"), [((0.5, 0.5, 0.5), False), ((), True)])
def test_letterbox_padding_after_normalization_is_skipped(mean: tuple[float, ...], ran: bool) -> None:
    spec = Preprocess(mean=mean, letterbox=Letterbox(size=(4, 4), padding=None))
    (report,) = run_passes(graph(CHW), [EmbedPreprocess(spec)]).reports
    assert report.ran == ran
