"""A table with a row for each row, whose types do not depend on what happens to stand in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scored_images import row

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.signature import TensorSpec
from graphkiln_backend.graph.task import Embedding
from graphkiln_backend.scoring.encoders import Encoder, all_scores, best_classes, raw_outputs, vectors
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.scorer import Answers

SCHEMA = pa.schema([pa.field("score", pa.list_(pa.float32(), 2))])


def scores(*rows: list[float]) -> pa.Array:
    return pa.array(rows, SCHEMA.field("score").type)


def test_rows_with_errors_have_no_answers() -> None:
    answers = Answers(SCHEMA, "digits", 3)
    answers.add_columns([scores([1, 2])])
    answers.add([row("a", b""), row("b", b"")], ["broken", None])
    answers.add_columns([scores([3, 4])])
    answers.add([row("c", b""), row("d", b"")], [None, "gone"])
    table = answers.table()
    assert table.schema.names == ["id", "score", "model", "version", "error"]
    assert table.column("id").to_pylist() == ["a", "b", "c", "d"]
    assert table.column("score").to_pylist() == [None, [1, 2], [3, 4], None]
    assert table.column("error").to_pylist() == ["broken", None, None, "gone"]
    assert table.column("model").to_pylist() == ["digits"] * 4
    assert table.column("version").to_pylist() == [3] * 4
    table.validate(full=True)


def ones(*shape: int) -> np.ndarray:
    return np.ones((1, *shape), np.float32)


SPEC = TensorSpec(name="y", dtype=DType.FP32, shape=("batch", 2, 3))
ENCODERS = [
    (all_scores(replace(SPEC, shape=("batch", 3))), ones(3)),
    (raw_outputs([SPEC]), ones(2, 3)),
    (raw_outputs([replace(SPEC, shape=("batch", "many"))]), ones(4)),
    (best_classes(replace(SPEC, shape=("batch", 3)), 2), ones(3)),
    (vectors(Embedding(vectors="y"), replace(SPEC, shape=("batch", 3))), ones(3)),
]


@pytest.mark.parametrize(("encoder", "output"), ENCODERS, ids=["scores", "fixed", "varying", "top", "vector"])
def test_a_file_with_errors_is_read_by_arrow(encoder: Encoder, output: np.ndarray, tmp_path: Path) -> None:
    """It cannot read lists of a fixed size of which one is null, though it writes them."""
    answers = Answers(encoder.schema, "m", 1)
    answers.add_columns(encoder.encode({"y": output}, []))
    answers.add([row("a", b""), row("b", b"")], [None, "broken"])
    pq.write_table(answers.table(), tmp_path / "rows.parquet")
    read = pq.read_table(tmp_path / "rows.parquet")
    assert read.to_pylist() == answers.table().to_pylist()
    assert read.column(1).null_count == 1


@pytest.mark.parametrize("errors", [[], ["broken"], ["broken", "gone"]])
def test_types_are_the_same_without_any_answer(errors: list[str]) -> None:
    answers = Answers(SCHEMA, "digits", 1)
    answers.add([row(error, b"") for error in errors], errors)
    table = answers.table()
    assert len(table) == len(errors)
    assert table.schema.field("score") == SCHEMA.field("score")
    assert table.schema.field("version").type == pa.int64()


def test_kept_columns_keep_their_types() -> None:
    answers = Answers(pa.schema([]), "digits", 1)
    answers.add([row("a", b"", price=pa.nulls(1, pa.decimal128(5, 2)), tag=pa.array(["x"]))], [None])
    table = answers.table()
    assert table.schema.field("price").type == pa.decimal128(5, 2)
    assert table.select(["id", "price", "tag"]).to_pylist() == [{"id": "a", "price": None, "tag": "x"}]


@pytest.mark.parametrize("name", ["id", "score", "error"])
def test_a_kept_column_cannot_have_the_name_of_another(name: str) -> None:
    answers = Answers(SCHEMA, "digits", 1)
    answers.add_columns([scores([1, 2])])
    answers.add([row("a", b"", **{name: pa.array([1])})], [None])
    with pytest.raises(ScoringError, match=f"column '{name}'"):
        answers.table()
