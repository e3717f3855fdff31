"""Products cut into shards: all shards together compute what the whole graph does, with a part of the weights each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import split_graphs
from graphs import compute, draw, graph, operators
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


def test_the_heads_of_a_shard_are_neighbors(tmp_path: Path) -> None:
    first, second = cut(split_graphs.fused, tmp_path, 2)
    whole = split_graphs.fused().graph.initializers["wqkv"].const_value.numpy()  # type: ignore[union-attr]
    halves = [
        next(v.const_value.numpy() for k, v in each.model.graph.initializers.items() if k.startswith("wqkv"))
        for each in (first, second)
    ]
    three = whole.reshape(24, 3, 2, 12)
    np.testing.assert_array_equal(halves[0], three[:, :, 0].reshape(24, 36))
    np.testing.assert_array_equal(halves[1], three[:, :, 1].reshape(24, 36))


def test_what_is_cut_is_named(tmp_path: Path) -> None:
    first, _ = cut(split_graphs.mlp, tmp_path, 2)
    assert first.local == {"h", "g", "m", "e_partial"}
    assert [list(value.shape or ()) for node in first.model.graph for value in node.outputs if value.name == "h"] == [
        ["batch", 24]
    ]


class TestRefusals:
    def test_numbers_that_do_not_divide(self, tmp_path: Path) -> None:
        with pytest.raises(LoweringError, match=r"can be cut into 5 shards.*48 in dimension 1, which 5 shards do not"):
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

    def test_scales_go_with_their_columns(self, tmp_path: Path) -> None:
        whole = self.held(split_graphs.quantized())
        for shard, half in ((0, slice(0, 24)), (1, slice(24, 48))):
            held = self.held(cut(split_graphs.quantized, tmp_path, 2)[shard].model)
            columns, scales, points = (held[name] for name in ("q1_part1x48", "s1_part0x48", "z1_part0x48"))
            np.testing.assert_array_equal(columns, whole["q1"][:, half])
            np.testing.assert_array_equal(scales, whole["s1"][half])
            assert points.shape == (24,)
            np.testing.assert_array_equal(held["q2_part1x48"], whole["q2"][:, half])
            np.testing.assert_array_equal(held["s2"], whole["s2"])  # of the other dimension: each shard has all

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
