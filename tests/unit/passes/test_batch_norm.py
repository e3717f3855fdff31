"""Batch norms become weights of what stands before them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import compute, draw, graph, operators

from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.pipeline import FoldBatchNorm

NORM = "BatchNormalization<epsilon=0.01>({}, scale, shift, mean, variance)"


def norm(channels: int) -> dict[str, Any]:
    return {
        "scale": draw(channels, seed=1),
        "shift": draw(channels, seed=2),
        "mean": draw(channels, seed=3),
        "variance": draw(channels, seed=4) ** 2 + np.float32(1e-3),  # so small that epsilon counts
    }


@pytest.mark.parametrize(
    ("text", "weights", "folded"),
    [
        ("c = Conv(x, w)", {"w": draw(4, 3, 3, 3)}, "Conv"),
        ("c = Conv(x, w, b)", {"w": draw(4, 3, 3, 3), "b": draw(4)}, "Conv"),
        ("c = Conv<strides=[2,2]>(x, w)", {"w": draw(4, 3, 3, 3)}, "Conv"),
        ("c = ConvTranspose(x, w)", {"w": draw(3, 4, 2, 2)}, "ConvTranspose"),
        ("c = ConvTranspose(x, w, b)", {"w": draw(3, 4, 2, 2), "b": draw(4)}, "ConvTranspose"),
    ],
)
def test_into_a_convolution(text: str, weights: dict[str, Any], folded: str) -> None:
    model = graph(f"(float[b,3,6,6] x) => (float[b,n,h,k] y) {{ {text} y = {NORM.format('c')} }}", **weights, **norm(4))
    x = draw(2, 3, 6, 6, seed=9)
    expected = compute(model, x=x)["y"]
    (report,) = run_passes(model, [FoldBatchNorm()]).reports
    assert operators(model) == [folded]
    assert (report.nodes_before, report.nodes_after, report.note) == (2, 1, "")
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-3, atol=1e-4)


def test_into_a_product() -> None:
    model = graph(
        f"(float[b,3] x) => (float[b,4] y) {{ p = Gemm(x, w) y = {NORM.format('p')} }}", w=draw(3, 4), **norm(4)
    )
    x = draw(5, 3, seed=9)
    expected = compute(model, x=x)["y"]
    run_passes(model, [FoldBatchNorm()])
    assert operators(model) == ["Gemm"]
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("text", ["c = Relu(x)", "c = MaxPool<kernel_shape=[2,2]>(x)"])
def test_behind_something_else_it_stays_and_is_told(text: str) -> None:
    model = graph(f"(float[b,3,6,6] x) => (float[b,3,h,k] y) {{ {text} y = {NORM.format('c')} }}", **norm(3))
    (report,) = run_passes(model, [FoldBatchNorm()]).reports
    assert "BatchNormalization" in operators(model)
    assert report.note.startswith("1 left")


def test_a_convolution_that_others_read_is_not_changed_for_them() -> None:
    text = f"(float[b,3,6,6] x) => (float[b,4,4,4] y) {{ c = Conv(x, w) n = {NORM.format('c')} y = Add(n, c) }}"
    model, x = graph(text, w=draw(4, 3, 3, 3), **norm(4)), draw(2, 3, 6, 6, seed=9)
    expected = compute(model, x=x)["y"]
    run_passes(model, [FoldBatchNorm()])
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-3, atol=1e-4)


def test_weights_that_two_convolutions_share_are_not_folded_twice() -> None:
    text = f"""(float[b,3,6,6] x) => (float[b,4,4,4] y) {{
        c = Conv(x, w)
        d = Conv(x, w)
        n = {NORM.format("c")}
        y = Sub(n, d)
    }}"""
    model, x = graph(text, w=draw(4, 3, 3, 3), **norm(4)), draw(2, 3, 6, 6, seed=9)
    expected = compute(model, x=x)["y"]
    run_passes(model, [FoldBatchNorm()])
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-3, atol=1e-4)


def test_statistics_of_the_request_are_not_folded() -> None:
    training = NORM.replace("epsilon=0.01", "epsilon=0.01, training_mode=1")
    text = f"(float[b,3,6,6] x) => (float[b,4,4,4] y) {{ c = Conv(x, w) y, m, v = {training.format('c')} }}"
    model = graph(text, w=draw(4, 3, 3, 3), **norm(4))
    (report,) = run_passes(model, [FoldBatchNorm()]).reports
    assert (report.ran, report.note) == (False, "batch norms in training mode")
    assert operators(model) == ["Conv", "BatchNormalization"]
