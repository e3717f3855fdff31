"""Raw image bytes go in: cast, normalization and layout inside the graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import compute, graph, operators
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edge_passes import EmbedPreprocess

CHW = "(float[b,3,4,5] x) => (float[b,3,4,5] y) { y = Relu(x) }"
HWC = "(float[b,4,5,3] x) => (float[b,4,5,3] y) { y = Relu(x) }"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pixels(channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (2, 4, 5, channels), np.uint8)


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
@pytest.mark.parametrize(
    "numbers", [{}, {"mean": MEAN}, {"std": STD}, {"mean": MEAN, "std": STD}], ids=["none", "mean", "std", "both"]
)
def test_the_graph_normalizes_as_the_client_did(layout: Any, numbers: dict[str, Any]) -> None:
    spec = Preprocess(layout=layout, **numbers)
    text = CHW if layout == "CHW" else HWC
    model = graph(text)
    run_passes(model, [EmbedPreprocess(spec)])
    normal = np.stack([spec.normalize(image) for image in pixels()])
    expected = compute(graph(text), x=normal)["y"]
    np.testing.assert_allclose(compute(model, x=pixels())["y"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_in_whatever_order_the_numbers_are_computed_they_are_these_to_the_last_bit(layout: Any) -> None:
    """Those of the pixels as they lie, where the division came before the transpose."""
    spec = Preprocess(layout=layout, mean=MEAN, std=STD)
    model = graph((CHW if layout == "CHW" else HWC).replace("Relu", "Identity"))
    run_passes(model, [EmbedPreprocess(spec)])
    shift, scale = (np.asarray(each, np.float32) * np.float32(255) for each in (MEAN, STD))
    expected = (pixels().astype(np.float32) - shift) / scale
    np.testing.assert_array_equal(
        compute(model, x=pixels())["y"], expected.transpose(0, 3, 1, 2) if layout == "CHW" else expected
    )


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(*[st.floats(0, 1)] * 3),
    st.tuples(*[st.floats(0.01, 2)] * 3),
    st.integers(0, 1000),
)
def test_with_any_numbers(mean: tuple[float, ...], std: tuple[float, ...], seed: int) -> None:
    spec = Preprocess(mean=mean, std=std)
    model = graph("(float[b,3,4,5] x) => (float[b,3,4,5] y) { y = Identity(x) }")
    run_passes(model, [EmbedPreprocess(spec)])
    images = pixels(seed=seed)
    expected = np.stack([spec.normalize(image) for image in images])
    np.testing.assert_allclose(compute(model, x=images)["y"], expected, rtol=1e-4, atol=1e-4 / min(std))


def test_one_channel() -> None:
    spec = Preprocess(color="L", mean=(0.3,), std=(0.2,))
    model = graph("(float[b,1,4,5] x) => (float[b,1,4,5] y) { y = Identity(x) }")
    run_passes(model, [EmbedPreprocess(spec)])
    expected = np.stack([spec.normalize(image) for image in pixels(1)])
    np.testing.assert_allclose(compute(model, x=pixels(1))["y"], expected, rtol=1e-5, atol=1e-5)


def test_the_input_takes_bytes_of_the_images_shape() -> None:
    model = graph(CHW)
    run_passes(model, [EmbedPreprocess(Preprocess())])
    (value,) = model.graph.inputs
    assert (value.name, str(value.dtype), str(value.shape)) == ("x", "UINT8", "[b,4,5,3]")
    assert operators(model) == ["Cast", "Transpose", "Sub", "Div", "Relu"]


def test_a_spec_of_the_last_axis_needs_no_transpose() -> None:
    model = graph(HWC)
    run_passes(model, [EmbedPreprocess(Preprocess(layout="HWC"))])
    assert "Transpose" not in operators(model)


@pytest.mark.parametrize(
    "text",
    [
        "(float[b,3] x) => (float[b,3] y) { y = Relu(x) }",
        "(int32[b,3,4,5] x) => (int32[b,3,4,5] y) { y = Neg(x) }",
        "(float[b,3,4,5] x, float[b,3,4,5] z) => (float[b,3,4,5] y) { y = Add(x, z) }",
    ],
    ids=["no image", "integers", "two inputs"],
)
def test_what_is_no_fp32_image(text: str) -> None:
    (report,) = run_passes(graph(text), [EmbedPreprocess(Preprocess())]).reports
    assert (report.ran, report.note) == (False, "the input is not an FP32 image")


@pytest.mark.parametrize(("mean", "ran"), [((0.5, 0.5, 0.5), False), ((), True)])
def test_zeros_after_the_normalization_are_no_pixels(mean: tuple[float, ...], ran: bool) -> None:
    spec = Preprocess(mean=mean, letterbox=Letterbox(size=(4, 4), padding=None))
    (report,) = run_passes(graph(CHW), [EmbedPreprocess(spec)]).reports
    assert report.ran == ran
