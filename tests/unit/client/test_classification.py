"""Rankings of outputs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from graphkiln_client.classification import rank_scores


class TestRankScores:
    def test_positions_come_one_after_the_other(self) -> None:
        values = np.array([[[0, 5], [7, 1]]], np.int32)  # [1, 2 positions, 2 classes]
        answers = rank_scores(values, 1, ("cat", "dog"), softmax=False)
        assert [(a.position, a.index, a.label, a.score) for a in answers] == [
            ((0, 0), 1, "dog", 5),
            ((0, 1), 0, "cat", 7),
        ]

    def test_labels_may_be_fewer(self) -> None:
        assert [a.label for a in rank_scores(np.arange(3.0), 3, ("a", "b"), softmax=False)] == ["", "b", "a"]

    def test_softmax_keeps_the_order_of_the_scores(self) -> None:
        values = np.array([1000.0, 1001.0, 0.0, 0.5])
        answers = rank_scores(values, 4, (), softmax=True)
        assert [a.index for a in answers] == [1, 0, 3, 2]
        assert answers[0].score == pytest.approx(1 / (1 + math.exp(-1)))

    def test_a_scalar_is_one_class(self) -> None:
        (answer,) = rank_scores(np.array(2.5), 5, (), softmax=False)
        assert (answer.index, answer.score, answer.position) == (0, 2.5, ())
