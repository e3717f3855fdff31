"""What stays fp32 in an int8 graph."""

from __future__ import annotations

from typing import Any

import pytest
from graphs import draw, graph

from graphkiln_converters.precision import behind_products, kept_by_recipe
from graphkiln_converters.recipe import Recipe

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


def test_what_no_product_reads_is_behind_them() -> None:
    assert behind_products(MODEL) == BEHIND


def test_a_graph_without_products_is_all_behind() -> None:
    assert behind_products(graph("(float[n] x) => (float[n] y) { y = Relu(x) }")) == ["node0"]


@pytest.mark.parametrize(
    ("fields", "more"),
    [({}, []), ({"keep_fp32": ["Sigmoid"]}, ["node2"]), ({"quantize_ends": False}, ["node1", "node6"])],
)
def test_a_recipe_keeps_more(fields: dict[str, Any], more: list[str]) -> None:
    recipe = Recipe.model_validate({"source": "text", "name": "m", **fields})
    assert kept_by_recipe(MODEL, recipe) == [*more, *BEHIND]
