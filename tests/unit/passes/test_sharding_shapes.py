"""Cuts through nodes that make other shapes; whole graphs of them are in `test_sharding.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph, ints

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.passes.sharding_rules import CannotShard, Cut, Effects, follow_cuts, state_size

TWO = "(float[b,t,12] x) => (float[b,t,6] y, float[b,t,6] z) {{ y, z = Split<axis={}{}>(x{}) }}"
COMPUTED = """(float[b,t,12] x) => (float[b,t,3,4] y) {
    s = Shape<start=0, end=2>(x)
    u = Concat<axis=0>(s, tail)
    y = Reshape(x, u)
}"""


def follow(model: onnx_ir.Model, cuts: dict[str, Cut], shards: int = 2) -> Effects:
    """What follows for the last node of a graph."""
    *_, node = model.graph
    values = {str(value.name): value for value in (*model.graph.inputs, *model.graph.outputs)}
    return follow_cuts(node, {values[name]: cut for name, cut in cuts.items()}, shards)


def named(effects: Effects) -> dict[str, Cut]:
    return {str(value.name): cut for value, cut in effects.values.items()}


class TestSplit:
    @pytest.mark.parametrize("known", ["x", "y"])
    def test_into_whole_blocks(self, known: str) -> None:
        effects = follow(graph(TWO.format(2, "", ", w"), w=ints(6, 6)), {known: Cut(2, 6)})
        assert named(effects) == dict.fromkeys("xyz", Cut(2, 6))
        assert effects.divided == {1}

    def test_in_equal_parts_that_nothing_states(self) -> None:
        effects = follow(graph(TWO.format(2, ", num_outputs=2", "")), {"x": Cut(2, 3)}, 3)
        assert named(effects) == dict.fromkeys("xyz", Cut(2, 3))
        assert not effects.divided

    def test_along_another_dimension(self) -> None:
        effects = follow(graph(TWO.format(2, "", ", w"), w=ints(6, 6)), {"x": Cut(1, 4)})
        assert named(effects) == dict.fromkeys("xyz", Cut(1, 4))
        assert not effects.divided

    def test_across_a_block(self) -> None:
        """Shards of the whole dimension would hold half of x's first output, or none of it."""
        with pytest.raises(CannotShard, match="needs the whole of dimension 2"):
            follow(graph(TWO.format(2, "", ", w"), w=ints(6, 6)), {"x": Cut(2, 12)})


@pytest.mark.parametrize(
    ("text", "weights", "cuts", "values", "cut_weights"),
    [
        ("(int64[n] i) => (float[n,4] y) { y = Gather(w, i) }", {"w": draw(9, 4)}, {"y": Cut(1, 4)},
         {"y": Cut(1, 4)}, {0: Cut(1, 4)}),
        ("(float[b,1,1] x) => (float[b,4,5] y) { y = Expand(x, w) }", {"w": ints(1, 4, 5)}, {"y": Cut(1, 4)},
         {"y": Cut(1, 4)}, {}),
        ("(float[4,1] x) => (float[2,4,5] y) { y = Expand(x, w) }", {"w": ints(2, 4, 5)}, {"x": Cut(0, 4)},
         {"x": Cut(0, 4), "y": Cut(1, 4)}, {}),
        ("(int64[3] i) => (float[2,4,5] y) { y = Expand(v, w) }", {"v": draw(4, 1), "w": ints(2, 4, 5)},
         {"y": Cut(1, 4)}, {"y": Cut(1, 4)}, {0: Cut(0, 4)}),
        ("(int64[3] i) => (float[2,4] y) { y = ConstantOfShape(w) }", {"w": ints(2, 4)}, {"y": Cut(1, 4)},
         {"y": Cut(1, 4)}, {}),
    ],
)  # fmt: skip
def test_what_is_repeated_filled_or_looked_up(
    text: str, weights: Any, cuts: dict[str, Cut], values: dict[str, Cut], cut_weights: dict[int, Cut]
) -> None:
    effects = follow(graph(text, **weights), cuts)
    assert named(effects) == values
    assert effects.weights == cut_weights


@pytest.mark.parametrize(
    ("text", "weights", "cuts", "words"),
    [
        ("(int64[n] i) => (float[n,3] y) { y = Gather(w, i) }", {"w": draw(9, 3)}, {"y": Cut(1, 3)}, "do not divide"),
        ("(float[b,1] x) => (float[b,4] y) { y = Expand(x, w) }", {"w": ints(1, 4)}, {"x": Cut(1, 2)}, "the whole"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed(text: str, weights: Any, cuts: dict[str, Cut], words: str) -> None:
    with pytest.raises(CannotShard, match=words):
        follow(graph(text, **weights), cuts)


class TestComputedShapes:
    def test_say_what_a_shard_has(self) -> None:
        """The node computes the shard's part from the shard's part."""
        model = graph(COMPUTED, tail=ints(3, 4))
        *_, node = model.graph
        effects = follow(model, {"x": Cut(2, 4)})
        assert effects.target == Cut(3, 4)
        state_size(model, node, effects, 2)
        model.graph.inputs[0].shape = onnx_ir.Shape(["b", "t", 6])
        node.outputs[0].shape = onnx_ir.Shape(["b", "t", 3, 2])
        x = draw(2, 5, 3, 4)
        half: AnyArray = np.ascontiguousarray(x[..., :2])
        np.testing.assert_array_equal(compute(model, x=half.reshape(2, 5, 6))["y"], half)

    def test_a_size_that_varies_cannot_be_stated(self) -> None:
        shape = "s = Shape<start=2, end=3>(x) u = Concat<axis=0>(m, s)"
        text = f"(float[b,4,8] x) => (float[n,8] y) {{ {shape} y = Reshape(x, u) }}"
        with pytest.raises(CannotShard, match="computes its shape"):
            follow(graph(text, m=ints(-1)), {"x": Cut(1, 4)})
