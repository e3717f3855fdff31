"""Vectors are compared by their cosine, each for itself."""

from __future__ import annotations

import numpy as np
import pytest
from task_outputs import EMBEDDING, embedding_outputs

from graphkiln_backend.proof.policy import BF16, EXPORT, FP16, INT8, OTHER_ENGINE, Limits
from graphkiln_backend.proof.tasks import cosines, decide_vectors, vector_controls

OUTPUTS = embedding_outputs()


@pytest.mark.parametrize("limits", [EXPORT, OTHER_ENGINE, FP16, BF16, INT8])
def test_equal_vectors_pass_and_one_that_turned_is_refused(limits: Limits) -> None:
    assert decide_vectors(EMBEDDING, OUTPUTS, OUTPUTS, limits).within(limits)
    ((change, turned),) = vector_controls(EMBEDDING, OUTPUTS, limits)
    assert change == "a vector rotated"
    assert not decide_vectors(EMBEDDING, OUTPUTS, turned, limits).within(limits)
    longest = np.linalg.norm(OUTPUTS["vectors"], axis=1)
    np.testing.assert_allclose(np.linalg.norm(turned["vectors"], axis=1), longest, rtol=1e-5)


def test_the_worst_cosine_is_named() -> None:
    ((_, turned),) = vector_controls(EMBEDDING, OUTPUTS, INT8)
    text = str(decide_vectors(EMBEDDING, OUTPUTS, turned, INT8))
    assert "7/8" in text
    assert f"{cosines(OUTPUTS['vectors'], turned['vectors']).min():.7g}" in text
