"""Tables of embeddings, and large products at the end of a graph, cut into columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import split_graphs
from graphs import compute, draw, graph, ints, operators
from split_graphs import cut, together

from graphkiln_backend.passes import sharding
from graphkiln_backend.passes.sharding import cut_columns

HEAD = "(float[b,3,8] x) => (float[b,3,7] y) {{ {} }}"
MATRIX, ROW = draw(8, 7), draw(7, seed=1)
GEMM = "(float[b,8] x) => (float[b,7] y) { y = Gemm<transB=1>(x, w, c) }"


@pytest.fixture(autouse=True)
def _small_ones_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_sum_of_all_shards_is_the_whole(text: str, weights: Any, shape: tuple[int, ...], shards: int) -> None:
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
def test_the_sum_of_all_shards_is_the_row_of_a_table(shards: int) -> None:
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
def test_what_stays_whole(text: str, weights: Any, shards: int) -> None:
    """Small weights, those that others read, too, biases of two dimensions, other forms, and columns left over."""
    model = graph(text, **weights)
    before = operators(model)
    assert cut_columns(model, shards, 0) == []
    assert operators(model) == before


def test_behind_a_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
