"""Predictions beside those of eager PyTorch, by the numeric policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stories import make_judgment

from graphkiln.story.judgment import Judgment, judge, judge_parameter_gradients
from graphkiln.story.workloads.base import Predictions
from graphkiln_backend.proof.policy import BF16, INT8, OTHER_ENGINE


class TestJudgment:
    reference = np.random.default_rng(0).normal(0, 1, (50, 10)) + 8 * np.eye(10)[np.arange(50) % 10]
    targets = np.arange(50) % 10

    def judged(self, found: Predictions, **facts: Any) -> Judgment:
        usual = {"limits": OTHER_ENGINE, "noise": 0, "targets": None}
        return judge(Predictions(scores=self.reference), found, **{**usual, **facts})

    def test_the_same_answers(self) -> None:
        found = self.judged(Predictions(scores=self.reference * (1 + 1e-6)), targets=self.targets)
        assert found.passed
        assert (found.same, found.samples, found.right) == (50, 50, 1.0)
        assert found.error == pytest.approx(1e-6, rel=1e-2)

    def test_other_scores(self) -> None:
        assert not self.judged(Predictions(scores=self.reference * 1.01)).passed

    def flipped(self, count: int) -> Predictions:
        """So many images decided otherwise, by a hair."""
        scores = self.reference.copy()
        for row in range(count):
            best = scores[row].argmax()
            scores[row, (best + 1) % 10] = scores[row, best] + 0.01
        return Predictions(scores=scores)

    def test_other_decisions(self) -> None:
        found = self.judged(self.flipped(3), limits=BF16, noise=1e-6)
        assert not found.passed
        assert "top-1 agreement 47/50" in found.verdict

    def test_int8_may_decide_otherwise_where_as_many_are_right(self) -> None:
        """Two wrong answers instead of two right ones elsewhere: the metric did not drop."""
        wrong = self.targets.copy()
        wrong[:2] = (self.targets[:2] + 1) % 10
        limits, found = INT8, self.flipped(2)
        assert not self.judged(found, limits=limits, noise=1e-6).passed
        assert self.judged(found, limits=limits, noise=1e-6, targets=wrong).passed
        assert not self.judged(found, limits=limits, noise=1e-6, targets=self.targets).passed

    def test_the_best_few_are_compared_with_the_same_classes(self) -> None:
        order = np.argsort(-self.reference, axis=1)[:, :5]
        scores = np.take_along_axis(self.reference, order, axis=1)
        assert self.judged(Predictions(scores=scores, indices=order)).passed
        assert not self.judged(Predictions(scores=scores, indices=(order + 1) % 10)).passed
        near = order.copy()
        near[:, [3, 4]] = near[:, [4, 3]]  # with their scores: the same answer in another order
        swapped = scores.copy()
        swapped[:, [3, 4]] = swapped[:, [4, 3]]
        assert self.judged(Predictions(scores=swapped, indices=near)).passed

    def test_undecided_answers_are_not_judged(self) -> None:
        flat = np.full((20, 10), 1.0) + np.random.default_rng(0).normal(0, 1e-3, (20, 10))
        found = judge(Predictions(scores=flat), Predictions(scores=flat * 1.001), INT8, noise=1e-6, targets=None)
        assert found.passed
        assert "give samples and weights that decide" in found.undecided

    def test_gradients_have_a_row_of_their_own(self) -> None:
        gradients = np.random.default_rng(1).normal(size=(50, 3, 4, 4))
        reference = Predictions(scores=self.reference, gradients=gradients)
        for factor, passed in ((1 + 4e-4, True), (1 + 6e-4, False)):
            found = Predictions(scores=self.reference, gradients=gradients * factor)
            assert judge(reference, found, OTHER_ENGINE, noise=0, targets=None).passed is passed

    def test_gradients_by_parameters(self) -> None:
        row = np.random.default_rng(2).normal(size=1000)
        good = judge_parameter_gradients(make_judgment(), row, row * (1 + 1e-6), 0.0)
        assert good.passed
        assert good.gradient_error == pytest.approx(1e-6, rel=1e-2)
        assert not judge_parameter_gradients(make_judgment(), row, row[::-1].copy(), 0.0).passed
        assert not judge_parameter_gradients(make_judgment(), row, row * 1.001, 1e-5).passed
        assert judge_parameter_gradients(make_judgment(), row, row * 1.001, 1e-3).passed  # fp32 knows no better
