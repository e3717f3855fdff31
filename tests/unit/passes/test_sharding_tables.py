"""Tables of embeddings cut into columns."""

from __future__ import annotations

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph, ints, operators

from graphkiln_backend.passes import sharding as sharding_tables
from graphkiln_backend.passes.sharding import cut_tables

LOOKUP = "(int64[b,3] x) => (float[b,3,8] y) { r = Gather(table, x) y = Relu(r) }"
TABLE = draw(50, 8)


@pytest.fixture(autouse=True)
def _small_tables_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding_tables, "_WORTH_TABLE_BYTES", 1600)


def rows(shard: int, shards: int = 2) -> onnx_ir.Model:
    """A shard whose output is what it looks up, padded."""
    model = graph(LOOKUP, table=TABLE)
    (padded,) = cut_tables(model, shards, shard)
    model.graph.outputs[0] = padded
    return model


@pytest.mark.parametrize("shards", [2, 4])
def test_the_sum_of_all_shards_is_the_row(shards: int) -> None:
    x = np.array([[1, 49, 1], [0, 7, 8]])
    parts = [compute(rows(shard, shards), x=x)["r"] for shard in range(shards)]
    np.testing.assert_array_equal(np.sum(parts, axis=0), TABLE[x])
    width = 8 // shards
    for shard, part in enumerate(parts):
        own = slice(shard * width, (shard + 1) * width)
        np.testing.assert_array_equal(part[..., own], TABLE[x][..., own])
        assert np.count_nonzero(part) == np.count_nonzero(part[..., own])


def test_a_shard_holds_its_columns() -> None:
    model = graph(LOOKUP, table=TABLE)
    cut_tables(model, 2, 1)
    held = model.graph.initializers["table_columns"].const_value
    assert held is not None
    np.testing.assert_array_equal(held.numpy(), TABLE[:, 4:])
    assert operators(model) == ["Gather", "Pad", "Relu"]


@pytest.mark.parametrize(
    ("text", "weights", "shards"),
    [
        (LOOKUP, {"table": draw(49, 8)}, 2),
        (LOOKUP, {"table": TABLE}, 3),
        ("(int64[b] x) => (float[50,b] y) { y = Gather<axis=1>(table, x) }", {"table": TABLE}, 2),
        ("(float[b,8] x) => (float[2,8] y) { y = Gather(x, rows) }", {"rows": ints(0, 1)}, 2),
        ("() => (float[2,8] y) { y = Gather(table, rows) }", {"table": TABLE, "rows": ints(0, 1)}, 2),
        ("(int64[b] x) => (float[b,8] y) { r = Gather(table, x) t = ReduceSum(table) y = Add(r, t) }",
         {"table": TABLE}, 2),
    ],
)  # fmt: skip
def test_what_stays_whole(text: str, weights: dict[str, np.ndarray], shards: int) -> None:
    """Small tables, columns that do not divide, other axes, constants, and a table that others read, too."""
    model = graph(text, **weights)
    before = operators(model)
    assert cut_tables(model, shards, 0) == []
    assert operators(model) == before
