"""Shapes that a graph computes, written down where they are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import compute, draw, graph, ints, operators

from graphkiln_backend.passes.sharding import state_shapes

COMPUTED = """(float[b,6] x) => (float[b,2,3] y) {
    shape = Shape<start=0, end=1>(x)
    sizes = Concat<axis=0>(shape, two, three)
    y = Reshape<allowzero=1>(x, sizes)
}"""


def test_a_computed_shape_becomes_a_weight_and_what_computed_it_goes() -> None:
    model = graph(COMPUTED, two=ints(2), three=ints(3))
    state_shapes(model)
    assert operators(model) == ["Reshape"]
    (weight,) = model.graph.initializers.values()
    assert weight.const_value is not None
    assert list(weight.const_value.numpy()) == [0, 2, 3]
    for rows in (1, 4, 0):
        x = draw(rows, 6)
        np.testing.assert_array_equal(compute(model, x=x)["y"], x.reshape(rows, 2, 3))


@pytest.mark.parametrize(
    ("shapes", "stated"),
    [
        (("b,s,6", "b,s,2,3"), [0, 0, 2, 3]),
        (("b,4,6", "n,6"), [-1, 6]),
        (("b,4,6", "4,n,3"), [4, -1, 3]),
        (("b,c,6", "m,n,3"), None),
        (("b,0", "0,n"), None),
    ],
)
def test_sizes_that_vary_are_copied_or_follow_from_the_rest(shapes: tuple[str, str], stated: Any) -> None:
    text = f"(float[{shapes[0]}] x, int64[r] s) => (float[{shapes[1]}] y) {{ y = Reshape(x, s) }}"
    model = graph(text.replace("int64[r]", f"int64[{shapes[1].count(',') + 1}]"))
    state_shapes(model)
    weights = [list(value.const_value.numpy()) for value in model.graph.initializers.values() if value.const_value]
    assert weights == ([stated] if stated else [])


def test_equal_shapes_are_kept_once_and_stated_ones_as_they_are() -> None:
    text = """(float[b,6] x, int64[2] s) => (float[b,6] y) {
        h = Reshape(x, s)
        k = Reshape(h, s)
        y = Reshape(k, w)
    }"""
    model = graph(text, w=ints(-1, 6))
    for node in list(model.graph)[:2]:
        node.outputs[0].shape = model.graph.inputs[0].shape
    state_shapes(model)
    assert sorted(model.graph.initializers) == ["shape_0_6", "w"]
