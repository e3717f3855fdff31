"""Compares the predictions of a variant with those of eager PyTorch, by the numeric policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graphkiln.story.workloads.base import Predictions
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.proof.comparison import compare, prove
from graphkiln_backend.proof.decision import decide
from graphkiln_backend.proof.policy import EXPORT, Limits, gradient_limits
from graphkiln_backend.proof.ranks import scatter_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgment:
    """The result of a comparison.

    Attributes:
        passed: Whether the policy allows the variant.
        verdict: Why, in one line.
        error: Relative L2 error of the scores.
        limit: Largest error that the policy allows.
        difference: Largest difference of a score.
        samples: Number of images compared.
        same: Images whose top-1 class stayed.
        interval: 95% confidence interval of that share.
        undecided: Why agreement means nothing here, or empty.
        right: Top-1 accuracy, or None where the right classes are not known.
        gradient_error: Relative L2 error of the gradient, or None where there is none.
    """

    passed: bool
    verdict: str
    error: float
    limit: float
    difference: float
    samples: int
    same: int
    interval: tuple[float, float]
    undecided: str = ""
    right: float | None = None
    gradient_error: float | None = None


def judge(
    reference: Predictions, found: Predictions, limits: Limits, *, noise: float, targets: npt.NDArray[np.int64] | None
) -> Judgment:
    """Judges the predictions for the same images.

    Args:
        reference: Of eager PyTorch, all scores `[images, classes]`.
        found: Of the variant; where these are its top k only, they are compared with the same classes' scores.
        limits: Row of the policy.
        noise: Largest difference of a score that fp32 itself makes; 0 for a variant in fp32, whose own it then is.
        targets: The right classes, int64 `[images]`, where they are known.
    """
    expected, scores = _comparable(reference.scores, found)
    difference = float(np.abs(np.subtract(scores, expected)).max())
    everything = (
        found.scores if found.indices is None else scatter_scores(scores, found.indices, reference.scores.shape[1])
    )
    decision = decide(reference.scores, everything, limits, noise=noise or difference, targets=targets)
    failures = [] if decision.within(limits) else [str(decision)]
    verdicts = [_compare(expected, scores, limits, failures)]
    gradient_error = None
    if found.gradients is not None and reference.gradients is not None:
        row = gradient_limits(limits, reference.noise)
        verdicts.append(_compare(reference.gradients, found.gradients, row, failures))
        gradient_error = _relative_l2(reference.gradients, found.gradients)
    return Judgment(
        passed=not failures,
        verdict="; ".join((*verdicts, str(decision))),
        error=_relative_l2(expected, scores),
        limit=limits.relative_l2,
        difference=difference,
        samples=decision.samples,
        same=decision.agreeing,
        interval=decision.interval,
        undecided=decision.inconclusive,
        right=decision.accuracy[1] if decision.accuracy else None,
        gradient_error=gradient_error,
    )


def judge_parameter_gradients(judgment: Judgment, reference: AnyArray, found: AnyArray, noise: float) -> Judgment:
    """Adds the gradients with respect to the parameters to the judgment of a variant in fp32.

    Args:
        judgment: Of the scores.
        reference: Gradients of eager PyTorch in one row, `[values]`.
        found: Gradients of the variant, `[values]`.
        noise: Relative change of the gradients that fp32 itself makes.
    """
    limits = gradient_limits(replace(EXPORT, name="static", worst_element=None), noise)
    failures: list[str] = []
    rows = reference[np.newaxis], found[np.newaxis]
    verdict = _compare(*rows, limits, failures)
    return replace(
        judgment,
        passed=judgment.passed and not failures,
        verdict=f"{judgment.verdict}; {verdict}",
        gradient_error=_relative_l2(*rows),
    )


def _compare(expected: AnyArray, found: AnyArray, limits: Limits, failures: list[str]) -> str:
    """The verdict; a failure is noted as well."""
    try:
        return prove({"answers": expected}, {"answers": found}, limits, batch_sizes=(len(expected),)).verdict
    except VerificationError as error:
        failures.append(error.report)
        return error.report


def _relative_l2(expected: AnyArray, found: AnyArray) -> float:
    (error,) = compare({"answers": expected}, {"answers": found})
    return error.relative_l2


def _comparable(reference: AnyArray, found: Predictions) -> tuple[AnyArray, AnyArray]:
    if found.indices is None:
        return reference, found.scores
    return np.take_along_axis(reference, found.indices.astype(np.int64), axis=1), found.scores
