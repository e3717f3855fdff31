"""Zero padding becomes the convolution's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import compute, draw, graph, operators

from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.pipeline import PadIntoConv

TEXT = "(float[b,3,6,6] x) => (float[b,n,h,k] y) {{ p = Pad{mode}(x, widths, value) y = Conv{attributes}(p, w) }}"


def check(left: list[str], widths: list[int], value: float = 0.0, mode: str = "", attributes: str = "") -> str:
    model = graph(
        TEXT.format(mode=mode, attributes=attributes),
        widths=np.array(widths), value=np.float32(value), w=draw(4, 3, 3, 3),
    )  # fmt: skip
    x = draw(2, 3, 6, 6, seed=1)
    expected = compute(model, x=x)["y"]
    (report,) = run_passes(model, [PadIntoConv()]).reports
    assert operators(model) == left
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-5, atol=1e-5)
    return report.note


@pytest.mark.parametrize("widths", [[0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 2, 0, 0, 0, 1, 3], [0, 0, 0, 0, 0, 0, 0, 1]])
@pytest.mark.parametrize("attributes", ["", "<pads=[1,0,1,2]>", "<strides=[2,2], dilations=[2,1]>"])
def test_of_the_spatial_axes(widths: list[int], attributes: str) -> None:
    assert check(["Conv"], widths, attributes=attributes) == ""


@pytest.mark.parametrize(
    "options",
    [
        {"value": 1.0},
        {"mode": '<mode="reflect">'},
        {"mode": '<mode="edge">'},
    ],
    ids=["ones", "reflected", "repeated"],
)
def test_with_other_values_it_stays_and_is_told(options: dict[str, Any]) -> None:
    note = check(["Pad", "Conv"], [0, 0, 1, 1, 0, 0, 1, 1], **options)
    assert note.startswith("1 left")


def test_of_channels_it_stays() -> None:
    model = graph(
        "(float[b,3,6,6] x) => (float[b,4,6,6] y) { p = Pad(x, widths) y = Conv(p, w) }",
        widths=np.array([0, 1, 0, 0, 0, 0, 0, 0]), w=draw(4, 4, 1, 1),
    )  # fmt: skip
    run_passes(model, [PadIntoConv()])
    assert operators(model) == ["Pad", "Conv"]


def test_before_no_convolution_it_stays_and_is_told() -> None:
    text = "(float[b,3,6,6] x) => (float[b,3,8,8] y) { p = Pad(x, widths) y = Relu(p) }"
    (report,) = run_passes(graph(text, widths=np.array([0, 0, 1, 1, 0, 0, 1, 1])), [PadIntoConv()]).reports
    assert report.note.startswith("1 left")
