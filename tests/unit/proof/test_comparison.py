"""The numeric policy: what passes, what does not, and that the check can tell the two apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.proof import comparison
from graphkiln_backend.proof.comparison import compare, prove
from graphkiln_backend.proof.policy import BF16, EXPORT, FP16, INT8, OTHER_ENGINE, Limits

REFERENCE = {"y": np.random.default_rng(1).normal(size=(8, 10)).astype(np.float32), "class": np.arange(8)}


def perturbed(scale: float) -> dict[str, np.ndarray]:
    return {**REFERENCE, "y": (REFERENCE["y"].astype(np.float64) * (1 + scale)).astype(np.float32)}


def test_equal_answers_pass_and_the_figures_are_recorded() -> None:
    verification = prove(REFERENCE, REFERENCE, EXPORT, batch_sizes=(1, 3))
    assert verification.relative_l2 == 0
    assert verification.samples == 8
    assert verification.batch_sizes == (1, 3)
    assert verification.relative_l2_limit == EXPORT.relative_l2
    assert verification.verdict.endswith("PASS")


@pytest.mark.parametrize("limits", [EXPORT, OTHER_ENGINE, FP16, BF16, INT8])
def test_an_error_inside_the_limit_passes_and_one_outside_fails(limits: Limits) -> None:
    prove(REFERENCE, perturbed(limits.relative_l2 * 0.5), limits, batch_sizes=(1,))
    with pytest.raises(VerificationError, match="FAIL"):
        prove(REFERENCE, perturbed(limits.relative_l2 * 1.5), limits, batch_sizes=(1,))


@given(scale=st.floats(1e-6, 1.0))
def test_relative_l2_is_the_share_of_the_signal(scale: float) -> None:
    error = compare(REFERENCE, perturbed(scale))[0]
    assert error.relative_l2 == pytest.approx(scale, rel=0.1, abs=1e-7)


def test_one_wrong_element_among_many_fails_by_the_worst_element() -> None:
    reference = {"y": np.ones((1000, 1000), np.float32)}
    wrong = {"y": reference["y"].copy()}
    wrong["y"][3, 5] += 0.005
    assert compare(reference, wrong)[0].relative_l2 < EXPORT.relative_l2
    with pytest.raises(VerificationError):
        prove(reference, wrong, EXPORT, batch_sizes=(1,))


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"class": REFERENCE["class"]}, "y: is missing"),
        ({**REFERENCE, "z": np.ones(1)}, "z: is not in the reference"),
        ({**REFERENCE, "y": REFERENCE["y"][:, :9]}, "y: is float32"),
        ({**REFERENCE, "y": REFERENCE["y"].astype(np.float64)}, "y: is float64"),
        ({**REFERENCE, "y": np.full_like(REFERENCE["y"], np.nan)}, "y: has NaN or Inf"),
        ({**REFERENCE, "y": np.full_like(REFERENCE["y"], np.inf)}, "y: has NaN or Inf"),
        ({**REFERENCE, "class": REFERENCE["class"] + 1}, "class: 100.00% of the elements differ"),
        ({**REFERENCE, "y": np.roll(REFERENCE["y"], 1, axis=0)}, "y: relative L2"),
    ],
)
def test_every_kind_of_change_is_refused(outputs: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(VerificationError) as caught:
        prove(REFERENCE, outputs, INT8, batch_sizes=(1,))
    assert words in str(caught.value)


def test_decisions_may_differ_only_as_often_as_the_policy_says() -> None:
    reference = {"class": np.arange(1000)}
    flipped = {"class": np.where(np.arange(1000) < 15, -1, reference["class"])}
    assert compare(reference, flipped)[0].within(INT8)
    assert not compare(reference, flipped)[0].within(BF16)


def test_a_reference_of_zeros_accepts_only_zeros() -> None:
    zeros = {"y": np.zeros((2, 2), np.float32)}
    prove(zeros, zeros, EXPORT, batch_sizes=(1,))
    with pytest.raises(VerificationError):
        prove(zeros, {"y": np.full((2, 2), 1e-30, np.float32)}, EXPORT, batch_sizes=(1,))


def test_a_broken_comparison_is_caught_by_the_negative_control(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(reference: dict[str, np.ndarray], _: object) -> tuple[comparison.OutputError, ...]:
        return tuple(comparison.OutputError(name=name, relative_l2=0.0, worst_element=0.0) for name in reference)

    monkeypatch.setattr(comparison, "compare", blind)
    with pytest.raises(VerificationError, match="negative control passed on y"):
        prove(REFERENCE, REFERENCE, EXPORT, batch_sizes=(1,))
