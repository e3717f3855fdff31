"""The best classes are those that the client names, with its scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.scoring.encoders import Ranked, TopK
from graphkiln_client.tasks import rank_scores, read_ranking

LABELS = ("cat", "dog", "cow")
RANDOM = np.random.default_rng(0)


def rows_of(encoder: TopK | Ranked, outputs: dict[str, AnyArray]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.table(encoder.encode(outputs), schema=encoder.schema).to_pylist()
    return rows


class TestTopK:
    @pytest.mark.parametrize("softmax", [False, True])
    @pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16, DType.FP64, DType.INT8])
    def test_agrees_with_the_client(self, dtype: DType, softmax: bool) -> None:
        scores = (RANDOM.standard_normal((4, 3)) * 9).astype(dtype.numpy)
        scores[1, :2] = scores[1, 2]  # a tie
        encoder = TopK("y", dtype, 2, LABELS, softmax=softmax)
        for row, found in zip(scores, rows_of(encoder, {"y": scores}), strict=True):
            expected = rank_scores(row, 2, LABELS, softmax=softmax)
            assert found["indices"] == [one.index for one in expected]
            assert found["labels"] == [one.label for one in expected]
            assert found["scores"] == [one.score for one in expected]

    def test_nan_comes_last(self) -> None:
        (row,) = rows_of(TopK("y", DType.FP32, 3), {"y": np.asarray([[np.nan, -np.inf, 1]], np.float32)})
        assert row["indices"] == [2, 1, 0]

    def test_without_labels_there_is_no_column(self) -> None:
        assert TopK("y", DType.FP32, 1).schema.names == ["indices", "scores"]

    def test_a_class_without_a_name_has_an_empty_one(self) -> None:
        (row,) = rows_of(TopK("y", DType.FP32, 3, ["only"]), {"y": np.asarray([[1, 3, 2]], np.float32)})
        assert row["labels"] == ["", "", "only"]

    def test_one_score_per_row_is_that_of_the_only_class(self) -> None:
        rows = rows_of(TopK("y", DType.FP32, 5), {"y": np.asarray([0.5, 2], np.float32)})
        assert rows == [{"indices": [0], "scores": [0.5]}, {"indices": [0], "scores": [2]}]

    def test_16_bit_scores_are_written_as_fp32(self) -> None:
        assert TopK("y", DType.FP16, 1).schema.field("scores").type == pa.list_(pa.float32())
        assert TopK("y", DType.FP64, 1).schema.field("scores").type == pa.list_(pa.float64())

    def test_scores_of_positions_are_an_error(self) -> None:
        with pytest.raises(ExecutionError, match=r"expected \[rows, classes\]") as raised:
            TopK("y", DType.FP32, 1).encode({"y": np.zeros((1, 2, 3), np.float32)})
        assert "--output y" in raised.value.hint


class TestRanked:
    RANKING = Ranking(scores="best", indices="which", labels=LABELS)

    def test_agrees_with_the_client(self) -> None:
        outputs: dict[str, AnyArray] = {
            "best": np.asarray([[3, 2, 1], [9, 8, 7]], np.float32),
            "which": np.asarray([[2, 0, 1], [1, 2, 0]]),
        }
        found = rows_of(Ranked(self.RANKING, DType.FP32, 2), outputs)
        for index, row in enumerate(found):
            expected = read_ranking(outputs["best"][index], outputs["which"][index], 2, LABELS)
            assert row["labels"] == [one.label for one in expected]
            assert row["indices"] == [one.index for one in expected]
            assert row["scores"] == [one.score for one in expected]

    def test_needs_both_outputs(self) -> None:
        assert Ranked(self.RANKING, DType.FP32, 2).outputs == ("best", "which")

    @pytest.mark.parametrize("which", [np.asarray([[-1]]), np.asarray([[0.0]]), np.asarray([[0, 1]])])
    def test_what_are_no_indices_is_an_error(self, which: AnyArray) -> None:
        with pytest.raises(ExecutionError, match="no class indices"):
            Ranked(self.RANKING, DType.FP32, 2).encode({"best": np.ones((1, 1), np.float32), "which": which})
