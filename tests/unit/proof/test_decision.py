"""Top-1 agreement: what counts as a flip, its confidence interval, and when samples decide nothing."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.proof.decision import Decision, confidence_interval, decide, lower_bound
from graphkiln_backend.proof.policy import BF16, EXPORT, INT8, Limits

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

    def test_all_of_many_is_near_one_and_none_is_zero(self) -> None:
        assert lower_bound(10_000, 10_000) > 0.999
        assert lower_bound(0, 10_000) == 0
        assert confidence_interval(0, 10)[1] == pytest.approx(0.3085, abs=1e-4)  # from a printed table

    @pytest.mark.parametrize("trials", [1, 2, 7, 60, 300])
    def test_more_successes_never_lower_it(self, trials: int) -> None:
        bounds = [lower_bound(successes, trials) for successes in range(0, trials + 1, max(1, trials // 7))]
        assert bounds == sorted(bounds)
        assert all(0 <= bound < 1 for bound in bounds)


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

    def test_only_the_best_class_counts(self) -> None:
        judged = REFERENCE - np.float32(3)
        judged[:, 0] -= 1
        assert decide(REFERENCE, judged, INT8, noise=0.0).agreeing == 100

    def test_ties_go_to_the_first_class_on_both_sides(self) -> None:
        reference = REFERENCE.copy()
        reference[3] = 0.0
        assert decide(reference, reference.copy(), INT8, noise=0.0).agreeing == 100

    @pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.FP64])
    def test_scores_of_every_float_type(self, dtype: DType) -> None:
        assert decide(REFERENCE, flipped(2).astype(dtype.numpy), INT8, noise=0.0).agreeing == 98
        assert decide(REFERENCE.astype(dtype.numpy), flipped(2).astype(dtype.numpy), INT8, noise=0.0).agreeing == 98

    def test_accuracy_is_counted_where_the_truth_is_known(self) -> None:
        targets = np.array(TRUTH)
        targets[50:60] += 1  # the reference is wrong on ten of them
        decision = decide(REFERENCE, flipped(7), INT8, noise=0.0, targets=targets)
        assert decision.accuracy == (0.9, 0.83)

    def test_the_inputs_are_left_alone(self) -> None:
        before = REFERENCE.copy()
        decide(REFERENCE, flipped(1), INT8, noise=0.0)
        np.testing.assert_array_equal(REFERENCE, before)


class TestInconclusive:
    def test_random_scores_decide_nothing(self) -> None:
        close = np.random.default_rng(0).normal(1.0, 0.01, (50, CLASSES)).astype(np.float32)
        assert "give samples and weights that decide" in decide(close, close, INT8, noise=0.0).inconclusive

    def test_the_same_scores_may_suffice_for_a_tighter_row(self) -> None:
        leads = scores(TRUTH, margin=0.5) + np.float32(1)
        assert decide(leads, leads, INT8, noise=0.0).inconclusive
        assert not decide(leads, leads, EXPORT, noise=0.0).inconclusive

    def test_one_class_for_all_samples_decides_nothing(self) -> None:
        alike = scores([2] * 10)
        assert "same top-1 class" in decide(alike, alike, BF16, noise=0.0).inconclusive

    def test_one_sample_is_judged_all_the_same(self) -> None:
        alone = scores([2])
        decision = decide(alone, scores([3]), BF16, noise=0.0)
        assert (decision.agreeing, decision.inconclusive) == (0, "")
        assert not decision.within(BF16)

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

    def test_enough_agreement_needs_no_accuracy(self) -> None:
        assert Decision(samples=100, agreeing=99, interval=(0, 1), accuracy=(0.9, 0.1)).within(INT8)


def test_the_text_gives_counts_interval_and_accuracy() -> None:
    plain = Decision(samples=40, agreeing=37, interval=(0.796, 0.984))
    assert str(plain) == "top-1 agreement 37/40 (>= 79.6% at 95%)"
    known = Decision(samples=40, agreeing=37, interval=(0.796, 0.984), accuracy=(0.95, 0.925))
    assert str(known).endswith(", accuracy 92.5% instead of 95.0%")
