"""Products cut into shards: all shards together compute what the whole graph does, with a part of the weights each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import split_graphs
from graphs import compute, draw, graph, ints, operators
from split_graphs import cut, together

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.passes.base import weight_bytes

SHAPES = {
    **dict.fromkeys(("mlp", "quantized"), (3, 24)),
    **dict.fromkeys(("attention", "fused", "decoder", "relative"), (2, 5, 24)),
}
SUMS = {"mlp": 1, "quantized": 1, "attention": 2, "fused": 1, "decoder": 1, "relative": 1}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [2, 4])
def test_shards_compute_what_the_whole_does(tmp_path: Path, name: str, count: int) -> None:
    make = getattr(split_graphs, name)
    x = draw(*SHAPES[name], seed=50)
    shards = cut(make, tmp_path, count)
    assert [operators(each.model).count("AllReduce") for each in shards] == [SUMS[name]] * count
    np.testing.assert_allclose(together(shards, tmp_path, x=x)["y"], compute(make(), x=x)["y"], rtol=1e-5, atol=1e-5)


BETWEEN = {
    "a scale for each column": "g = Mul(h, row)",
    "a number for each token": "g = Add(h, tokens)",
    "a softmax over tokens": "g = Softmax<axis=1>(h)",
    "a normalization over tokens": "t = Transpose<perm=[0,2,1]>(h) n = LayerNormalization<axis=-1>(t, three) "
    "g = Transpose<perm=[0,2,1]>(n)",
    "blocks of columns": "a, c = Split<axis=2>(h, halves) g = Mul(a, c)",
    "equal parts": "a, c = Split<axis=2, num_outputs=2>(h) g = Mul(a, c)",
    "parts of tokens": "a, c = Split<axis=1>(h, one_and_two) g = Add(a, c)",
    "heads and back": "r = Reshape(h, heads) t = Transpose<perm=[0,2,1,3]>(r) u = Transpose<perm=[0,2,1,3]>(t) "
    "g = Reshape(u, back)",
    "a shape that is computed": "s = Shape<start=0, end=2>(h) u = Concat<axis=0>(s, tail) r = Reshape(h, u) "
    "v = Concat<axis=0>(s, eight) g = Reshape(r, v)",
    "an axis that comes and goes": "u = Unsqueeze(h, axis1) g = Squeeze(u, axis1)",
    "what is expanded": "u = Unsqueeze(h, axis1) e = Expand(u, four) g = Gather<axis=1>(e, index)",
    "one of three tokens": "i = Gather<axis=1>(h, index) g = Unsqueeze(i, axis1)",
    "a slice of tokens": "g = Slice(h, axis1, three_index, axis1)",
}
WEIGHTS = {
    "row": draw(8, seed=3), "tokens": draw(3, 1, seed=4), "three": draw(3, seed=5), "halves": ints(4, 4),
    "one_and_two": ints(1, 2), "axis1": ints(1), "heads": ints(0, 0, 4, 2), "back": ints(0, 0, 8), "tail": ints(4, 2),
    "eight": ints(8), "four": ints(1, 4, 1, 1), "index": ints(1).reshape(()), "three_index": ints(3),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_what_lies_between_two_products(tmp_path: Path, name: str) -> None:
    """Each shard has half of the columns of the first product and half of the rows of the second."""
    nodes = BETWEEN[name]
    used = {key: value for key, value in WEIGHTS.items() if re.search(rf"\b{key}\b", nodes)}

    def make() -> onnx_ir.Model:
        text = f"(float[b,3,8] x) => (float[b,n,8] y) {{ h = MatMul(x, w1) {nodes} y = MatMul(g, w2) }}"
        return graph(text, w1=draw(8, 8), w2=draw(4 if "Mul(a, c)" in nodes else 8, 8, seed=1), **used)

    x = draw(2, 3, 8, seed=50)
    shards = cut(make, tmp_path, 2)
    assert all(operators(each.model).count("AllReduce") for each in shards)
    np.testing.assert_allclose(together(shards, tmp_path, x=x)["y"], compute(make(), x=x)["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_each_holds_its_part_of_the_weights(tmp_path: Path, name: str) -> None:
    """The rest, such as normalizations and the biases behind sums, is less than a tenth."""
    make = getattr(split_graphs, name)
    whole = weight_bytes(make())
    for each in cut(make, tmp_path, 2):
        assert weight_bytes(each.model) <= 0.56 * whole


def test_a_shard_that_is_missing_or_counted_twice_changes_the_outputs(tmp_path: Path) -> None:
    x = draw(3, 24, seed=50)
    first, second = cut(split_graphs.mlp, tmp_path, 2)
    expected = compute(split_graphs.mlp(), x=x)["y"]
    for wrong in ([first, first], [second, second], [first]):
        found = together(wrong, tmp_path, x=x)["y"]
        assert np.abs(found - expected).max() > 0.1


class TestRefusals:
    def test_numbers_that_do_not_divide(self, tmp_path: Path) -> None:
        with pytest.raises(LoweringError, match=r"can be cut into 5 shards.*48, which 5 does not divide"):
            cut(split_graphs.mlp, tmp_path, 5)

    def test_heads_that_do_not_divide_leave_the_products_behind_them(self, tmp_path: Path) -> None:
        """8 shards divide the 96 columns of the MLP, and not the 4 heads."""
        shards = cut(split_graphs.attention, tmp_path, 8)
        assert operators(shards[0].model).count("AllReduce") == 1
        x = draw(2, 5, 24, seed=50)
        expected = compute(split_graphs.attention(), x=x)["y"]
        np.testing.assert_allclose(together(shards, tmp_path, x=x)["y"], expected, rtol=1e-5, atol=1e-5)

    def test_a_graph_without_two_products_in_a_row(self, tmp_path: Path) -> None:
        with pytest.raises(LoweringError, match=r"no product of .* can be cut into 2 shards.*input or output"):
            cut(lambda: graph("(float[b,4] x) => (float[b,4] y) { y = MatMul(x, w) }", w=draw(4, 4)), tmp_path, 2)

    def test_random_numbers_that_each_shard_would_draw(self, tmp_path: Path) -> None:
        text = """(float[b,24] x) => (float[b,24] y) {
            n = RandomUniformLike(x)
            d = Add(x, n)
            h = MatMul(d, w)
            y = MatMul(h, w)
        }"""
        with pytest.raises(LoweringError, match=r"RandomUniformLike node0 draws random numbers.*choose `pipeline`"):
            cut(lambda: graph(text, w=draw(24, 24)), tmp_path, 2)
        same = text.replace("RandomUniformLike", "RandomUniformLike<seed=7.0>")
        assert len(cut(lambda: graph(same, w=draw(24, 24)), tmp_path, 2)) == 2, "which draw the same"

    def test_an_operator_without_a_rule_ends_a_cut(self, tmp_path: Path) -> None:
        text = "(float[b,4] x) => (float[b,4] y) { h = MatMul(x, w) c = CumSum(h, one) y = MatMul(c, w) }"
        with pytest.raises(LoweringError, match="CumSum node1 has no rule"):
            cut(lambda: graph(text, w=draw(4, 4), one=np.int64(1)), tmp_path, 2)


class TestQuantized:
    """Products of int8: a shard has its columns or rows, and the scales of those."""

    def held(self, model: onnx_ir.Model) -> dict[str, Any]:
        values = model.graph.initializers.items()
        return {str(name): value.const_value.numpy() for name, value in values if value.const_value is not None}

    def test_the_bias_is_the_first_shards_and_stays_an_integer(self, tmp_path: Path) -> None:
        """A bias in floats would have the runtime compute the product of the second shard in floats."""
        first, second = (self.held(each.model) for each in cut(split_graphs.quantized, tmp_path, 2))
        assert first["qb"].any()
        assert (second["qb_zero"].dtype, second["qb_zero"].any()) == (np.int32, False)
        assert "qb" not in second

    def test_a_wrong_scale_changes_the_outputs(self, tmp_path: Path) -> None:
        x = draw(3, 24, seed=50)
        shards = cut(split_graphs.quantized, tmp_path, 2)
        scales = shards[1].model.graph.initializers["s1_part0x48"]
        assert scales.const_value is not None
        scales.const_value = onnx_ir.tensor(scales.const_value.numpy()[::-1].copy(), name=scales.name)
        expected = compute(split_graphs.quantized(), x=x)["y"]
        assert np.abs(together(shards, tmp_path, x=x)["y"] - expected).max() > 0.1

    def test_scales_of_blocks_are_cut_along_the_other_dimension(self, tmp_path: Path) -> None:
        text = """(float[b,4] x) => (float[b,4] y) {
            d = DequantizeLinear<axis=0, block_size=2>(q, s)
            h = MatMul(x, d)
            y = MatMul(h, w)
        }"""
        integers = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)

        def make() -> onnx_ir.Model:
            return graph(text, opset=21, q=integers, s=np.abs(draw(2, 4)), w=draw(4, 4))

        x, shards = draw(3, 4), cut(make, tmp_path, 2)
        assert self.held(shards[0].model)["s_part1x4"].shape == (2, 2)
        np.testing.assert_allclose(
            together(shards, tmp_path, x=x)["y"], compute(make(), x=x)["y"], rtol=1e-5, atol=1e-5
        )
