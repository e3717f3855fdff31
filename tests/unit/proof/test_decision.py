"""Top-1 agreement: flips, confidence interval, undecided samples, and rankings."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.proof.comparison import prove, score_indices
from graphkiln_backend.proof.decision import Decision, confidence_interval, decide, scatter_scores
from graphkiln_backend.proof.policy import BF16, INT8, OTHER_ENGINE, Limits

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
    def test_interval_is_clopper_pearson(self, successes: int, trials: int) -> None:
        low = beta.ppf(0.025, successes, trials - successes + 1) if successes else 0.0
        high = beta.ppf(0.975, successes + 1, trials - successes) if successes < trials else 1.0
        assert confidence_interval(successes, trials) == pytest.approx((low, high), abs=1e-9)


class TestDecide:
    def test_changed_classes_are_counted(self) -> None:
        decision = decide(REFERENCE, flipped(7), INT8, noise=0.0)
        assert (decision.samples, decision.agreeing, decision.inconclusive) == (100, 93, "")
        assert decision.interval == confidence_interval(93, 100)
        assert decision.accuracy is None

    def test_flips_within_the_noise_are_ignored(self) -> None:
        reference, judged = REFERENCE.copy(), REFERENCE.copy()
        reference[0] = [1.0, 1.0 - 1e-4, 0, 0, 0]
        judged[0] = [1.0 - 1e-4, 1.0, 0, 0, 0]
        assert decide(reference, judged, INT8, noise=1e-3).agreeing == 100
        assert decide(reference, judged, INT8, noise=1e-5).agreeing == 99

    def test_accuracy_with_labels(self) -> None:
        targets = np.array(TRUTH)
        targets[50:60] += 1  # the reference is wrong on ten of them
        decision = decide(REFERENCE, flipped(7), INT8, noise=0.0, targets=targets)
        assert decision.accuracy == (0.9, 0.83)


class TestInconclusive:
    def test_random_scores_are_undecided(self) -> None:
        close = np.random.default_rng(0).normal(1.0, 0.01, (50, CLASSES)).astype(np.float32)
        assert "give samples and weights that decide" in decide(close, close, INT8, noise=0.0).inconclusive

    def test_one_class_is_undecided(self) -> None:
        alike = scores([2] * 10)
        assert "same top-1 class" in decide(alike, alike, BF16, noise=0.0).inconclusive

    def test_undecided_samples_do_not_fail(self) -> None:
        alike = scores([2] * 10)
        decision = decide(alike, scores([3] * 10), BF16, noise=0.0)
        assert decision.agreeing == 0
        assert decision.within(BF16)
        assert str(decision).startswith("top-1 agreement not judged: every sample")


class TestWithin:
    @pytest.mark.parametrize(("agreeing", "passes"), [(98, True), (97, False)])
    def test_limit_of_flips(self, agreeing: int, passes: bool) -> None:
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
    def test_accuracy_decides_where_the_row_allows(
        self, accuracy: tuple[float, float], limits: Limits, passes: bool
    ) -> None:
        assert Decision(samples=100, agreeing=50, interval=(0, 1), accuracy=accuracy).within(limits) is passes


def test_text_of_a_decision() -> None:
    plain = Decision(samples=40, agreeing=37, interval=(0.796, 0.984))
    assert str(plain) == "top-1 agreement 37/40 (>= 79.6% at 95%)"
    known = Decision(samples=40, agreeing=37, interval=(0.796, 0.984), accuracy=(0.95, 0.925))
    assert str(known).endswith(", accuracy 92.5% instead of 95.0%")


RANKING = Ranking(scores="s", indices="i", labels=("a", "b", "c", "d"))


def arrays(scores: list[list[float]], indices: list[list[int]]) -> dict[str, AnyArray]:
    return {"s": np.array(scores, np.float32), "i": np.array(indices, np.int64)}


RANKED = arrays([[9.0, 2.0, 1.9999], [8.0, 5.0, 1.0]], [[3, 0, 1], [2, 1, 0]])


class TestScoreIndices:
    def test_error_of_swapped_classes(self) -> None:
        expected, found = score_indices(RANKED, arrays([[9, 2, 2], [8, 5, 1]], [[3, 1, 0], [1, 2, 0]]), RANKING)
        np.testing.assert_allclose(found["i"] - expected["i"], [[0, -0.0001, 0.0001], [-3, 3, 0]], atol=1e-6)

    def test_class_missing_in_the_reference(self) -> None:
        _, found = score_indices(RANKED, arrays([[9, 2, 2], [8, 5, 1]], [[7, 0, 1], [2, 1, 9]]), RANKING)
        np.testing.assert_allclose(found["i"], [[1.9999, 2, 1.9999], [8, 5, 1]])

    @pytest.mark.parametrize("indices", [[[3, 0], [2, 1]], [[-1, 0, 1], [2, 1, 0]]])
    def test_invalid_indices_are_left_to_the_comparison(self, indices: list[list[int]]) -> None:
        found = {**RANKED, "i": np.array(indices, np.int64)}
        assert score_indices(RANKED, found, RANKING)[1] is found

    def test_scatter_scores(self) -> None:
        np.testing.assert_allclose(scatter_scores(RANKED["s"], RANKED["i"], 4), [[2, 1.9999, 1.9999, 9], [1, 5, 8, 1]])


class TestRanking:
    def test_near_ties_may_swap_ranks(self) -> None:
        found = arrays([[9.0, 2.0, 1.9999], [8.0, 5.0, 1.0]], [[3, 1, 0], [2, 1, 0]])
        assert "PASS" in prove(RANKED, found, OTHER_ENGINE, batch_sizes=(1,), reading=RANKING).verdict
        with pytest.raises(VerificationError, match="elements differ"):
            prove(RANKED, found, OTHER_ENGINE, batch_sizes=(1,))

    def test_decisions_of_a_ranking(self) -> None:
        """Scores within the limit of int8; of three images that were nearly undecided, the best class is another."""
        best = np.arange(40) % 5
        scores = np.tile(np.array([[10.0, 0.0, -9.0]], np.float32), (40, 1))
        scores[:3, 1] = 9.9
        indices = np.stack([best, best + 5, best + 10], axis=1)
        flipped = indices.copy()
        flipped[:3, [0, 1]] = indices[:3, [1, 0]]
        with pytest.raises(VerificationError, match="top-1 agreement 37/40"):
            prove(
                {"s": scores, "i": indices},
                {"s": scores, "i": flipped},
                INT8,
                batch_sizes=(1,),
                noise=1e-6,
                reading=RANKING,
            )
