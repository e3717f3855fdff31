"""Top-1 agreement: what counts as a flip, its confidence interval, and when samples decide nothing."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.proof.decision import Decision, confidence_interval, decide
from graphkiln_backend.proof.policy import BF16, INT8, Limits

CLASSES = 5


def scores(classes: list[int], *, margin: float = 10.0) -> AnyArray:
    """Scores whose best class leads by a margin."""
    return (np.eye(CLASSES, dtype=np.float32)[classes] * np.float32(margin)).astype(np.float32)


TRUTH = [index % CLASSES for index in range(100)]
REFERENCE = scores(TRUTH)


def flipped(count: int) -> AnyArray:
    """The reference's scores with another best class in the first samples."""
    return scores([(label + 1) % CLASSES if index < count else label for index, label in enumerate(TRUTH)])


class TestInterval:
    @pytest.mark.parametrize(
        ("successes", "trials"),
        [(0, 1), (1, 1), (1, 2), (5, 10), (9, 10), (10, 10), (47, 50), (1, 256), (255, 256), (390, 400), (4999, 5000)],
    )
    def test_is_clopper_pearsons(self, successes: int, trials: int) -> None:
        low = beta.ppf(0.025, successes, trials - successes + 1) if successes else 0.0
        high = beta.ppf(0.975, successes + 1, trials - successes) if successes < trials else 1.0
        assert confidence_interval(successes, trials) == pytest.approx((low, high), abs=1e-9)


class TestDecide:
    def test_counts_changed_classes(self) -> None:
        decision = decide(REFERENCE, flipped(7), INT8, noise=0.0)
        assert (decision.samples, decision.agreeing, decision.inconclusive) == (100, 93, "")
        assert decision.interval == confidence_interval(93, 100)
        assert decision.accuracy is None

    def test_a_flip_inside_the_noise_of_fp32_is_none(self) -> None:
        reference, judged = REFERENCE.copy(), REFERENCE.copy()
        reference[0] = [1.0, 1.0 - 1e-4, 0, 0, 0]
        judged[0] = [1.0 - 1e-4, 1.0, 0, 0, 0]
        assert decide(reference, judged, INT8, noise=1e-3).agreeing == 100
        assert decide(reference, judged, INT8, noise=1e-5).agreeing == 99

    def test_accuracy_is_counted_where_the_truth_is_known(self) -> None:
        targets = np.array(TRUTH)
        targets[50:60] += 1  # the reference is wrong on ten of them
        decision = decide(REFERENCE, flipped(7), INT8, noise=0.0, targets=targets)
        assert decision.accuracy == (0.9, 0.83)


class TestInconclusive:
    def test_random_scores_decide_nothing(self) -> None:
        close = np.random.default_rng(0).normal(1.0, 0.01, (50, CLASSES)).astype(np.float32)
        assert "give samples and weights that decide" in decide(close, close, INT8, noise=0.0).inconclusive

    def test_one_class_for_all_samples_decides_nothing(self) -> None:
        alike = scores([2] * 10)
        assert "same top-1 class" in decide(alike, alike, BF16, noise=0.0).inconclusive

    def test_what_is_not_judged_does_not_fail(self) -> None:
        alike = scores([2] * 10)
        decision = decide(alike, scores([3] * 10), BF16, noise=0.0)
        assert decision.agreeing == 0
        assert decision.within(BF16)
        assert str(decision).startswith("top-1 agreement not judged: every sample")


class TestWithin:
    @pytest.mark.parametrize(("agreeing", "passes"), [(98, True), (97, False)])
    def test_as_many_may_flip_as_the_row_allows(self, agreeing: int, passes: bool) -> None:
        assert Decision(samples=100, agreeing=agreeing, interval=(0, 1)).within(INT8) is passes

    @pytest.mark.parametrize(
        ("accuracy", "limits", "passes"),
        [
            ((0.90, 0.90), INT8, True),
            ((0.90, 0.95), INT8, True),
            ((0.90, 0.89), INT8, True),  # 0.01 exactly, however it is rounded
            ((0.90, 0.88), INT8, False),
            ((0.90, 0.90), BF16, False),  # that row knows no accuracy
            ((0.00, 0.00), INT8, False),  # nor does one that cannot fall decide
        ],
    )
    def test_accuracy_counts_instead_where_the_row_has_a_limit_for_it(
        self, accuracy: tuple[float, float], limits: Limits, passes: bool
    ) -> None:
        assert Decision(samples=100, agreeing=50, interval=(0, 1), accuracy=accuracy).within(limits) is passes


def test_the_text_gives_counts_interval_and_accuracy() -> None:
    plain = Decision(samples=40, agreeing=37, interval=(0.796, 0.984))
    assert str(plain) == "top-1 agreement 37/40 (>= 79.6% at 95%)"
    known = Decision(samples=40, agreeing=37, interval=(0.796, 0.984), accuracy=(0.95, 0.925))
    assert str(known).endswith(", accuracy 92.5% instead of 95.0%")
