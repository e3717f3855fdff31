"""Constant additions become the bias of the convolution or product before them."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import compute, draw, graph, operators

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.passes.addition import AddIntoProducer
from graphkiln_backend.passes.base import run_passes

CONV = "(float[b,3,5,5] x) => (float[b,4,3,3] y) {{ c = Conv(x, kernel{bias}) y = Add({order}) }}"


def check(text: str, left: list[str], x: AnyArray, **weights: AnyArray) -> None:
    model = graph(text, **weights)
    expected = compute(model, x=x)["y"]
    run_passes(model, [AddIntoProducer()])
    assert operators(model) == left
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["c, offset", "offset, c"])
@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1)])
def test_one_value_a_channel(order: str, shape: tuple[int, ...]) -> None:
    check(CONV.format(bias="", order=order), ["Conv"], draw(2, 3, 5, 5), kernel=draw(4, 3, 3, 3), offset=draw(*shape))


def test_what_is_added_to_a_bias() -> None:
    weights = {"kernel": draw(4, 3, 3, 3), "bias": draw(4, seed=1), "offset": draw(4, 1, 1, seed=2)}
    check(CONV.format(bias=", bias", order="c, offset"), ["Conv"], draw(2, 3, 5, 5), **weights)


def test_the_attributes_of_the_convolution_stay() -> None:
    text = """(float[b,4,6,6] x) => (float[b,4,2,2] y) {
        c = Conv<strides=[2,2], group=2, dilations=[2,2]>(x, kernel)
        y = Add(c, offset)
    }"""
    check(text, ["Conv"], draw(2, 4, 7, 7)[:, :, :6, :6], kernel=draw(4, 2, 2, 2), offset=draw(4, 1, 1))


@pytest.mark.parametrize("shape", [(1, 3, 3), (4, 3, 3), (1,), (3,), (1, 1, 1, 3)])
def test_other_constants_stay(shape: tuple[int, ...]) -> None:
    """They differ from place to place, or are not one value a channel."""
    weights = {"kernel": draw(4, 3, 3, 3), "offset": draw(*shape, seed=1)}
    check(CONV.format(bias="", order="c, offset"), ["Conv", "Add"], draw(2, 3, 5, 5), **weights)


def test_a_residual_stays() -> None:
    text = "(float[b,4,5,5] x) => (float[b,4,5,5] y) { c = Conv(x, kernel) y = Add(c, x) }"
    check(text, ["Conv", "Add"], draw(2, 4, 5, 5), kernel=draw(4, 4, 1, 1))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("p = MatMul(x, w) y = Add(p, offset)", (4, 5)),
        ("t = Transpose<perm=[1,0]>(w) p = MatMul(x, t) y = Add(p, offset)", (5, 4)),
    ],
)
def test_a_product_becomes_a_gemm(text: str, sizes: tuple[int, int]) -> None:
    whole = f"(float[2,4] x) => (float[2,5] y) {{ {text} }}"
    check(whole, ["Gemm"], draw(2, 4), w=draw(*sizes), offset=draw(5, seed=1))


def test_a_product_of_more_than_matrices_stays() -> None:
    text = "(float[2,3,4] x) => (float[2,3,5] y) { p = MatMul(x, w) y = Add(p, offset) }"
    check(text, ["MatMul", "Add"], draw(2, 3, 4), w=draw(4, 5), offset=draw(5, seed=1))


def test_a_convolution_that_others_read_keeps_its_value() -> None:
    text = """(float[b,3,5,5] x) => (float[b,4,3,3] y) {
        c = Conv(x, kernel)
        a = Add(c, offset)
        y = Mul(a, c)
    }"""
    model, x = graph(text, kernel=draw(4, 3, 3, 3), offset=draw(4, 1, 1, seed=1)), draw(2, 3, 5, 5)
    expected = compute(model, x=x)["y"]
    run_passes(model, [AddIntoProducer()])
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-5, atol=1e-5)
