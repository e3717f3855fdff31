"""How a cut through one tensor of a node cuts its others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import draw, graph, ints

from graphkiln_backend.passes.sharding_rules import CannotShard, Cut, follow_cuts


def follow(text: str, cuts: dict[str, Cut], **weights: Any) -> dict[str, Cut]:
    """The cuts that follow for a graph of one node, weights by the number of their input."""
    model = graph(text, **weights)
    values = {str(value.name): value for value in (*model.graph.inputs, *model.graph.outputs)}
    (node,) = model.graph
    effects = follow_cuts(node, {values[name]: cut for name, cut in cuts.items()}, 2)
    return {str(value.name): cut for value, cut in effects.values.items()} | {
        str(number): cut for number, cut in effects.weights.items()
    }


@pytest.mark.parametrize(
    ("text", "weights", "cuts", "found"),
    [
        ("MatMul(x, w)", {"w": draw(8, 8)}, {"y": Cut(2, 8)}, {"y": Cut(2, 8), "1": Cut(1, 8)}),
        ("MatMul(x, w)", {"w": draw(8, 8)}, {"x": Cut(2, 4)}, {"x": Cut(2, 4), "1": Cut(0, 4)}),
        ("MatMul(x, w)", {"w": draw(8, 8)}, {"x": Cut(1, 4)}, {"x": Cut(1, 4), "y": Cut(1, 4)}),
        ("Add(x, w)", {"w": draw(8)}, {"y": Cut(2, 4)}, {"x": Cut(2, 4), "y": Cut(2, 4), "1": Cut(0, 4)}),
        ("Mul(x, w)", {"w": draw(4, 1)}, {"x": Cut(2, 8)}, {"x": Cut(2, 8), "y": Cut(2, 8)}),
        ("Softmax<axis=-1>(x)", {}, {"x": Cut(1, 4)}, {"x": Cut(1, 4), "y": Cut(1, 4)}),
        ("LayerNormalization<axis=-1>(x, w)", {"w": draw(8)}, {"y": Cut(1, 4)}, {"x": Cut(1, 4), "y": Cut(1, 4)}),
    ],
)
def test_nodes_that_keep_their_shape(text: str, weights: Any, cuts: dict[str, Cut], found: dict[str, Cut]) -> None:
    assert follow(f"(float[2,4,8] x) => (float[2,4,8] y) {{ y = {text} }}", cuts, **weights) == found


@pytest.mark.parametrize(
    ("text", "shapes", "weights", "pairs"),
    [
        ("Transpose<perm=[0,2,1]>(x)", ("b,4,8", "b,8,4"), {}, [(Cut(1, 4), Cut(2, 4)), (Cut(2, 4), Cut(1, 4))]),
        ("Reshape(x, w)", ("b,5,24", "b,5,4,6"), {"w": ints(0, 0, 4, 6)}, [(Cut(2, 24), Cut(2, 4))]),
        ("Reshape(x, w)", ("b,5,24", "b,5,3,4,2"), {"w": ints(0, 0, 3, 4, 2)}, [(Cut(2, 8), Cut(3, 4))]),
        ("Reshape(x, w)", ("b,5,4,6", "b,5,24"), {"w": ints(0, 0, 24)}, [(Cut(2, 4), Cut(2, 24))]),
        ("Reshape(x, w)", ("b,12,5,8", "n,5,8"), {"w": ints(-1, 5, 8)}, [(Cut(1, 12), Cut(0, 12))]),
        ("Reshape(x, w)", ("7,b,24", "7,n,6"), {"w": ints(7, -1, 6)}, [(Cut(2, 24), Cut(1, 4))]),
        ("Unsqueeze(x, w)", ("b,8", "b,1,8"), {"w": ints(1)}, [(Cut(1, 8), Cut(2, 8))]),
        ("Squeeze(x, w)", ("b,1,8", "b,8"), {"w": ints(1)}, [(Cut(2, 8), Cut(1, 8))]),
        ("Gather<axis=1>(x, w)", ("b,3,8", "b,8"), {"w": ints(1).reshape(())}, [(Cut(2, 8), Cut(1, 8))]),
        ("Slice(x, v, u, w)", ("b,6,8", "b,2,8"), {"v": ints(1), "u": ints(3), "w": ints(1)}, [(Cut(2, 8), Cut(2, 8))]),
    ],
)
def test_forwards_and_backwards(text: str, shapes: Any, weights: Any, pairs: list[tuple[Cut, Cut]]) -> None:
    whole = f"(float[{shapes[0]}] x) => (float[{shapes[1]}] y) {{ y = {text} }}"
    for before, behind in pairs:
        expected = {"x": before, "y": behind}
        assert follow(whole, {"x": before}, **weights) == expected
        assert follow(whole, {"y": behind}, **weights) == expected


@pytest.mark.parametrize(
    ("cuts", "found"),
    [
        ({"q": Cut(1, 4)}, {"q": Cut(1, 4), "k": Cut(1, 4), "y": Cut(1, 4)}),
        ({"y": Cut(1, 4)}, {"q": Cut(1, 4), "k": Cut(1, 4), "y": Cut(1, 4)}),
        ({"q": Cut(2, 6)}, {"q": Cut(2, 6), "y": Cut(2, 6)}),
        ({"y": Cut(3, 6)}, {"k": Cut(3, 6), "y": Cut(3, 6)}),
    ],
)
def test_a_product_of_activations(cuts: dict[str, Cut], found: dict[str, Cut]) -> None:
    text = "(float[b,4,6,8] q, float[b,4,8,6] k) => (float[b,4,6,6] y) { y = MatMul(q, k) }"
    assert follow(text, cuts) == found


@pytest.mark.parametrize(
    ("text", "cuts", "weights", "words"),
    [
        ("(float[b,4] x) => (float[b,4] y) { y = Softmax<axis=1>(x) }", {"x": Cut(1, 4)}, {},
         "works along"),
        ("(float[b,4] x) => (float[b,4] y) { y = MatMul(x, w) }", {"x": Cut(1, 4), "y": Cut(1, 4)},
         {"w": draw(4, 4)}, "in 2 ways"),
        ("(float[2,4] x, float[4,2] z) => (float[2,2] y) { y = MatMul(x, z) }", {"x": Cut(1, 4)}, {}, "sums over"),
        ("(float[b,4] x, float[b,1] z) => (float[b,4] y) { y = Add(x, z) }", {"z": Cut(1, 1)}, {}, "the whole"),
        ("(float[b,6] x) => (float[b,3,2] y) { y = Reshape(x, w) }", {"x": Cut(1, 6)}, {"w": ints(0, 3, 2)},
         "whole parts"),
        ("(float[b,3,8] x) => (float[b,8] y) { y = Gather<axis=1>(x, w) }", {"x": Cut(1, 3)},
         {"w": ints(1).reshape(())}, "the whole"),
        ("(float[b,3] x) => (float[b,3] y) { y = MatMul(x, w) }", {"y": Cut(1, 3)}, {"w": draw(3, 3)}, "do not divide"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed(text: str, cuts: dict[str, Cut], weights: Any, words: str) -> None:
    with pytest.raises(CannotShard, match=words):
        follow(text, cuts, **weights)


def test_the_bias_of_a_partial_sum_is_the_first_shards() -> None:
    text = "(float[b,8] x) => (float[b,6] y) { y = Gemm<transB=1>(x, w, c) }"
    model = graph(text, w=draw(6, 8), c=draw(6))
    (node,) = model.graph
    effects = follow_cuts(node, {model.graph.inputs[0]: Cut(1, 8)}, 2)
    assert (effects.reduced, effects.first_only, effects.weights) == (True, {2}, {1: Cut(1, 8)})
    effects = follow_cuts(node, {model.graph.outputs[0]: Cut(1, 6)}, 2)
    assert (effects.reduced, effects.weights) == (False, {1: Cut(0, 6), 2: Cut(0, 6)})


@pytest.mark.parametrize(
    ("attributes", "scale", "cuts", "found"),
    [
        ("<axis=2>", draw(8), {"y": Cut(2, 4)}, {"x": Cut(2, 4), "y": Cut(2, 4), "1": Cut(0, 4), "2": Cut(0, 4)}),
        ("<axis=-1>", draw(8), {"x": Cut(2, 8)}, {"x": Cut(2, 8), "y": Cut(2, 8), "1": Cut(0, 8), "2": Cut(0, 8)}),
        ("<axis=2>", draw(8), {"x": Cut(1, 4)}, {"x": Cut(1, 4), "y": Cut(1, 4)}),
        ("", draw(), {"x": Cut(2, 8)}, {"x": Cut(2, 8), "y": Cut(2, 8)}),
    ],
)
def test_scales_along_the_cut_are_cut(attributes: str, scale: Any, cuts: dict[str, Cut], found: dict[str, Cut]) -> None:
    text = f"(float[2,4,8] x) => (uint8[2,4,8] y) {{ y = QuantizeLinear{attributes}(x, s, z) }}"
    assert follow(text, cuts, s=np.float32(scale), z=np.zeros(np.shape(scale), np.uint8)) == found


def test_weights_that_are_dequantized_are_cut_where_that_is_done() -> None:
    text = "(float[b,8] x) => (float[b,6] y) { d = DequantizeLinear<axis=1>(q, s) y = MatMul(x, d) }"
    model = graph(text, q=np.ones((8, 6), np.int8), s=draw(6))
    dequantize, product = model.graph
    (weight,), (x,), (y,) = dequantize.outputs, model.graph.inputs, model.graph.outputs
    columns = follow_cuts(product, {y: Cut(1, 6)}, 2)
    assert (columns.values, columns.weights, columns.reduced) == ({weight: Cut(1, 6), y: Cut(1, 6)}, {}, False)
    assert follow_cuts(dequantize, {weight: Cut(1, 6)}, 2).weights == {0: Cut(1, 6), 1: Cut(0, 6)}
    rows = follow_cuts(product, {x: Cut(1, 8)}, 2)
    assert (rows.values, rows.weights, rows.reduced) == ({weight: Cut(0, 8), x: Cut(1, 8)}, {}, True)
    assert follow_cuts(dequantize, {weight: Cut(0, 8)}, 2).weights == {0: Cut(0, 8)}
