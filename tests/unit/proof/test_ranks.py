"""Rankings are judged by the scores of what was chosen, not by the places of near ties."""

from __future__ import annotations

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.proof.comparison import prove, score_indices
from graphkiln_backend.proof.decision import scatter_scores
from graphkiln_backend.proof.policy import INT8, OTHER_ENGINE

RANKING = Ranking(scores="s", indices="i", labels=("a", "b", "c", "d"))


def arrays(scores: list[list[float]], indices: list[list[int]]) -> dict[str, AnyArray]:
    return {"s": np.array(scores, np.float32), "i": np.array(indices, np.int64)}


REFERENCE = arrays([[9.0, 2.0, 1.9999], [8.0, 5.0, 1.0]], [[3, 0, 1], [2, 1, 0]])


class TestScoreIndices:
    def test_a_class_in_another_place_is_as_wrong_as_its_score_is_away(self) -> None:
        expected, found = score_indices(REFERENCE, arrays([[9, 2, 2], [8, 5, 1]], [[3, 1, 0], [1, 2, 0]]), RANKING)
        np.testing.assert_allclose(found["i"] - expected["i"], [[0, -0.0001, 0.0001], [-3, 3, 0]], atol=1e-6)

    def test_a_class_that_the_reference_has_not_gets_its_last_score(self) -> None:
        _, found = score_indices(REFERENCE, arrays([[9, 2, 2], [8, 5, 1]], [[7, 0, 1], [2, 1, 9]]), RANKING)
        np.testing.assert_allclose(found["i"], [[1.9999, 2, 1.9999], [8, 5, 1]])

    @pytest.mark.parametrize("indices", [[[3, 0], [2, 1]], [[-1, 0, 1], [2, 1, 0]]])
    def test_what_are_no_indices_stays_for_the_comparison(self, indices: list[list[int]]) -> None:
        found = {**REFERENCE, "i": np.array(indices, np.int64)}
        assert score_indices(REFERENCE, found, RANKING)[1] is found

    def test_scatter_scores(self) -> None:
        np.testing.assert_allclose(
            scatter_scores(REFERENCE["s"], REFERENCE["i"], 4), [[2, 1.9999, 1.9999, 9], [1, 5, 8, 1]]
        )


class TestProof:
    def test_near_ties_may_change_places(self) -> None:
        found = arrays([[9.0, 2.0, 1.9999], [8.0, 5.0, 1.0]], [[3, 1, 0], [2, 1, 0]])
        assert "PASS" in prove(REFERENCE, found, OTHER_ENGINE, batch_sizes=(1,), reading=RANKING).verdict
        with pytest.raises(VerificationError, match="elements differ"):
            prove(REFERENCE, found, OTHER_ENGINE, batch_sizes=(1,))

    def test_decisions_are_judged(self) -> None:
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
