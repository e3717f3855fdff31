"""Graphs cut into shards: together they compute what the whole graph does, with a part of the weights each."""

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
from graphkiln_backend.passes import sharding
from graphkiln_backend.passes.base import weight_bytes
from graphkiln_backend.passes.sharding import cut_columns, state_shapes

SHAPES = {
    **dict.fromkeys(("mlp", "quantized"), (3, 24)),
    **dict.fromkeys(("attention", "fused", "decoder", "relative"), (2, 5, 24)),
}
SUMS = {"mlp": 1, "quantized": 1, "attention": 2, "fused": 1, "decoder": 1, "relative": 1}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [2, 4])
def test_shards_equal_the_whole_graph(tmp_path: Path, name: str, count: int) -> None:
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
def test_operators_between_two_products(tmp_path: Path, name: str) -> None:
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
def test_weights_per_shard(tmp_path: Path, name: str) -> None:
    """The rest, such as normalizations and the biases behind sums, is less than a tenth."""
    make = getattr(split_graphs, name)
    whole = weight_bytes(make())
    for each in cut(make, tmp_path, 2):
        assert weight_bytes(each.model) <= 0.56 * whole


def test_missing_or_repeated_shard_changes_the_outputs(tmp_path: Path) -> None:
    x = draw(3, 24, seed=50)
    first, second = cut(split_graphs.mlp, tmp_path, 2)
    expected = compute(split_graphs.mlp(), x=x)["y"]
    for wrong in ([first, first], [second, second], [first]):
        found = together(wrong, tmp_path, x=x)["y"]
        assert np.abs(found - expected).max() > 0.1


class TestRefusals:
    def test_indivisible_columns(self, tmp_path: Path) -> None:
        with pytest.raises(LoweringError, match=r"can be cut into 5 shards.*48, which 5 does not divide"):
            cut(split_graphs.mlp, tmp_path, 5)

    def test_indivisible_heads(self, tmp_path: Path) -> None:
        """8 shards divide the 96 columns of the MLP, and not the 4 heads."""
        shards = cut(split_graphs.attention, tmp_path, 8)
        assert operators(shards[0].model).count("AllReduce") == 1
        x = draw(2, 5, 24, seed=50)
        expected = compute(split_graphs.attention(), x=x)["y"]
        np.testing.assert_allclose(together(shards, tmp_path, x=x)["y"], expected, rtol=1e-5, atol=1e-5)

    def test_graph_without_two_connected_products(self, tmp_path: Path) -> None:
        with pytest.raises(LoweringError, match=r"no product of .* can be cut into 2 shards.*input or output"):
            cut(lambda: graph("(float[b,4] x) => (float[b,4] y) { y = MatMul(x, w) }", w=draw(4, 4)), tmp_path, 2)

    def test_random_numbers(self, tmp_path: Path) -> None:
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

    def test_operator_without_rule(self, tmp_path: Path) -> None:
        text = "(float[b,4] x) => (float[b,4] y) { h = MatMul(x, w) c = CumSum(h, one) y = MatMul(c, w) }"
        with pytest.raises(LoweringError, match="CumSum node1 has no rule"):
            cut(lambda: graph(text, w=draw(4, 4), one=np.int64(1)), tmp_path, 2)


class TestQuantized:
    """Products of int8: a shard has its columns or rows, and the scales of those."""

    def held(self, model: onnx_ir.Model) -> dict[str, Any]:
        values = model.graph.initializers.items()
        return {str(name): value.const_value.numpy() for name, value in values if value.const_value is not None}

    def test_integer_bias_of_the_first_shard(self, tmp_path: Path) -> None:
        """A bias in floats would have the runtime compute the product of the second shard in floats."""
        first, second = (self.held(each.model) for each in cut(split_graphs.quantized, tmp_path, 2))
        assert first["qb"].any()
        assert (second["qb_zero"].dtype, second["qb_zero"].any()) == (np.int32, False)
        assert "qb" not in second

    def test_wrong_scale_changes_the_outputs(self, tmp_path: Path) -> None:
        x = draw(3, 24, seed=50)
        shards = cut(split_graphs.quantized, tmp_path, 2)
        scales = shards[1].model.graph.initializers["s1_part0x48"]
        assert scales.const_value is not None
        scales.const_value = onnx_ir.tensor(scales.const_value.numpy()[::-1].copy(), name=scales.name)
        expected = compute(split_graphs.quantized(), x=x)["y"]
        assert np.abs(together(shards, tmp_path, x=x)["y"] - expected).max() > 0.1

    def test_scales_of_blocks(self, tmp_path: Path) -> None:
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


HEAD = "(float[b,3,8] x) => (float[b,3,7] y) {{ {} }}"
MATRIX, ROW = draw(8, 7), draw(7, seed=1)
GEMM = "(float[b,8] x) => (float[b,7] y) { y = Gemm<transB=1>(x, w, c) }"


@pytest.fixture
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small weights, too."""
    monkeypatch.setattr(sharding, "_WORTH_PRODUCT_BYTES", 224)
    monkeypatch.setattr(sharding, "_WORTH_TABLE_BYTES", 1600)


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize(
    ("text", "weights", "shape"),
    [
        (HEAD.format("y = MatMul(x, w)"), {"w": MATRIX}, (2, 3, 8)),
        (GEMM, {"w": np.ascontiguousarray(MATRIX.T), "c": ROW}, (2, 8)),
        (GEMM, {"w": np.ascontiguousarray(MATRIX.T), "c": ROW[:1]}, (2, 8)),
    ],
    ids=["matmul", "gemm", "gemm with one bias"],
)
@pytest.mark.usefixtures("small_weights")
def test_column_shards_sum_to_the_whole(text: str, weights: Any, shape: tuple[int, ...], shards: int) -> None:
    """Seven columns, in two or three parts."""
    x = draw(*shape, seed=5)
    parts = []
    for shard in range(shards):
        model = graph(text, **weights)
        (padded,) = cut_columns(model, shards, shard)
        assert model.graph.outputs[0] is padded
        assert operators(model)[-1] == "Pad"
        parts.append(compute(model, x=x)["y"])
    np.testing.assert_allclose(np.sum(parts, axis=0), compute(graph(text, **weights), x=x)["y"], rtol=1e-6)
    assert all(np.count_nonzero(part.any(axis=tuple(range(part.ndim - 1)))) in (2, 3, 4) for part in parts)


LOOKUP = "(int64[b,3] x) => (float[b,3,8] y) { r = Gather(table, x) y = Relu(r) }"
TABLE = draw(50, 8)


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.usefixtures("small_weights")
def test_table_shards_sum_to_the_whole(shards: int) -> None:
    x, width, parts = np.array([[1, 49, 1], [0, 7, 8]]), 8 // shards, []
    for shard in range(shards):
        model = graph(LOOKUP, table=TABLE)
        (padded,) = cut_columns(model, shards, shard)
        model.graph.outputs[0] = padded
        held = model.graph.initializers["table_columns"].const_value
        assert held is not None
        np.testing.assert_array_equal(held.numpy(), TABLE[:, shard * width : (shard + 1) * width])
        parts.append(compute(model, x=x)["r"])
    np.testing.assert_array_equal(np.sum(parts, axis=0), TABLE[x])


SMALL = "(float[b,3,8] x) => (float[b,3,6] y) { y = MatMul(x, w) }"


@pytest.mark.parametrize(
    ("text", "weights", "shards"),
    [
        (SMALL, {"w": draw(8, 6)}, 2),
        (HEAD.format("a = MatMul(x, w) c = MatMul(x, w) y = Add(a, c)"), {"w": MATRIX}, 2),
        ("(float[b,8] x) => (float[b,7] y) { y = Gemm(x, w, c) }", {"w": MATRIX, "c": draw(1, 7)}, 2),
        ("(float[8,b] x) => (float[b,7] y) { y = Gemm<transA=1>(x, w) }", {"w": MATRIX}, 2),
        ("(float[b,8] x, float[8,7] z) => (float[b,7] y) { y = MatMul(x, z) }", {}, 2),
        (LOOKUP, {"table": draw(49, 8)}, 2),
        (LOOKUP, {"table": TABLE}, 3),
        ("(int64[b] x) => (float[50,b] y) { y = Gather<axis=1>(table, x) }", {"table": TABLE}, 2),
        ("(float[b,8] x) => (float[2,8] y) { y = Gather(x, rows) }", {"rows": ints(0, 1)}, 2),
        ("() => (float[2,8] y) { y = Gather(table, rows) }", {"table": TABLE, "rows": ints(0, 1)}, 2),
        (
            "(int64[b] x) => (float[b,8] y) { r = Gather(table, x) t = ReduceSum(table) y = Add(r, t) }",
            {"table": TABLE},
            2,
        ),
    ],
)
@pytest.mark.usefixtures("small_weights")
def test_weights_that_are_not_cut_into_columns(text: str, weights: Any, shards: int) -> None:
    """Small weights, those that others read, too, biases of two dimensions, other forms, and columns left over."""
    model = graph(text, **weights)
    before = operators(model)
    assert cut_columns(model, shards, 0) == []
    assert operators(model) == before


@pytest.mark.usefixtures("small_weights")
@pytest.mark.usefixtures("small_weights")
def test_columns_behind_a_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's products are followed to their sums, the head behind it is not: both are cut."""
    monkeypatch.setattr(sharding, "_WORTH_PRODUCT_BYTES", 24 * 51 * 4)

    def make() -> onnx_ir.Model:
        text = split_graphs.MLP.replace("(float[batch,24] y)", "(float[batch,51] z)")
        text = text.replace("y = Add(e, x)", "y = Add(e, x)\n    z = MatMul(y, head)")
        small = {"s": draw(24), "o": draw(24, seed=1), "gate": draw(1, 48, seed=4)}
        biases = {"b1": draw(48, seed=3), "b2": draw(24, seed=6)}
        return graph(
            text, **small, **biases, w1=draw(24, 48, seed=2) * 0.1, w2=draw(24, 48, seed=5) * 0.1,
            head=draw(24, 51, seed=7),
        )  # fmt: skip

    shards = cut(make, tmp_path, 2)
    assert [operators(each.model).count("AllReduce") for each in shards] == [2, 2]
    x = draw(3, 24, seed=50)
    np.testing.assert_allclose(together(shards, tmp_path, x=x)["z"], compute(make(), x=x)["z"], rtol=1e-4, atol=1e-5)


COMPUTED = """(float[b,6] x) => (float[b,2,3] y) {
    shape = Shape<start=0, end=1>(x)
    sizes = Concat<axis=0>(shape, two, three)
    y = Reshape<allowzero=1>(x, sizes)
}"""


def test_computed_shape_becomes_a_weight() -> None:
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
def test_dynamic_sizes_in_shapes(shapes: tuple[str, str], stated: Any) -> None:
    text = f"(float[{shapes[0]}] x, int64[r] s) => (float[{shapes[1]}] y) {{ y = Reshape(x, s) }}"
    model = graph(text.replace("int64[r]", f"int64[{shapes[1].count(',') + 1}]"))
    state_shapes(model)
    weights = [list(value.const_value.numpy()) for value in model.graph.initializers.values() if value.const_value]
    assert weights == ([stated] if stated else [])


def test_equal_shapes_are_shared() -> None:
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
