"""Holds what a way answers to what eager PyTorch answers, by the numeric policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graphkiln.graph.dtypes import AnyArray
from graphkiln.graph.errors import VerificationError
from graphkiln.proof.comparison import compare, prove
from graphkiln.proof.decision import Decision, decide
from graphkiln.proof.policy import Limits, gradient_limits
from graphkiln.story.work import Answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a proof showed.

    Attributes:
        passed: Whether the policy allows the way.
        verdict: Why, in one line.
        error: Relative L2 error of the scores.
        limit: Most that the policy allows.
        samples: Pictures that were compared.
        same: Pictures whose best class stayed.
        interval: 95% confidence interval of that share.
        undecided: Why agreement means nothing here, or empty.
        right: Share of right answers, or None where the right ones are not known.
        gradient_error: Relative L2 error of the gradient, or None where there is none.
    """

    passed: bool
    verdict: str
    error: float
    limit: float
    samples: int
    same: int
    interval: tuple[float, float]
    undecided: str = ""
    right: float | None = None
    gradient_error: float | None = None


def judge(
    reference: Answers, found: Answers, limits: Limits, *, noise: float, targets: npt.NDArray[np.int64] | None
) -> Judgement:
    """Judges the answers to the same pictures.

    Args:
        reference: Of eager PyTorch, all scores.
        found: Of the way; where it answers the best few only, these are compared with the same classes' scores.
        limits: Row of the policy.
        noise: Largest difference of a score that fp32 itself makes; 0 for a way in fp32, whose own it then is.
        targets: The right classes, where they are known.
    """
    expected, scores = _comparable(reference.scores, found)
    (error,) = compare({"scores": expected}, {"scores": scores})
    noise = noise or float(np.abs(np.subtract(scores, expected)).max())
    decision = decide(reference.scores, _spread(found, reference.scores), limits, noise=noise, targets=targets)
    failures = [] if decision.within(limits) else [str(decision)]
    verdicts = [_proven({"scores": expected}, {"scores": scores}, limits, failures)]
    gradient_error = None
    if found.gradients is not None and reference.gradients is not None:
        row = gradient_limits(limits, reference.noise)
        by_picture = {"gradient": reference.gradients}
        gradient_error = compare(by_picture, {"gradient": found.gradients})[0].relative_l2
        verdicts.append(_proven(by_picture, {"gradient": found.gradients}, row, failures))
    return _judgement(
        decision, verdicts, failures, error.relative_l2, limit=limits.relative_l2, gradient=gradient_error
    )


def judge_parameter_gradients(judged: Judgement, reference: AnyArray, found: AnyArray, noise: float) -> Judgement:
    """Adds the gradients by the parameters to what was judged of a way in fp32."""
    limits = gradient_limits(Limits(step="static", relative_l2=1e-5, worst_element=None, top1_agreement=1.0), noise)
    failures: list[str] = []
    arrays = {"gradients": reference[np.newaxis]}, {"gradients": found[np.newaxis]}
    verdict = _proven(*arrays, replace(limits, worst_element=None), failures)
    return replace(
        judged,
        passed=judged.passed and not failures,
        verdict=f"{judged.verdict}; {verdict}",
        gradient_error=compare(*arrays)[0].relative_l2,
    )


def _proven(expected: dict[str, AnyArray], found: dict[str, AnyArray], limits: Limits, failures: list[str]) -> str:
    """The verdict; what fails is noted."""
    try:
        return prove(expected, found, limits, batch_sizes=(len(next(iter(expected.values()))),)).verdict
    except VerificationError as error:
        failures.append(error.report)
        return error.report


def _judgement(
    decision: Decision, verdicts: list[str], failures: list[str], error: float, *, limit: float, gradient: float | None
) -> Judgement:
    return Judgement(
        passed=not failures,
        verdict="; ".join((*verdicts, str(decision))),
        error=error,
        limit=limit,
        samples=decision.samples,
        same=decision.same,
        interval=decision.interval,
        undecided=decision.undecided,
        right=decision.right[1] if decision.right else None,
        gradient_error=gradient,
    )


def _comparable(reference: AnyArray, found: Answers) -> tuple[AnyArray, AnyArray]:
    if found.indices is None:
        return reference, found.scores
    return np.take_along_axis(reference, found.indices.astype(np.int64), axis=1), found.scores


def _spread(found: Answers, like: AnyArray) -> AnyArray:
    """All classes' scores: those that were not answered are below all others."""
    if found.indices is None:
        return found.scores
    scores = np.full_like(like, -np.inf)
    np.put_along_axis(scores, found.indices.astype(np.int64), found.scores, axis=1)
    return scores
