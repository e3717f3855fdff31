"""Comparison of two answers to one request: by the decision that a user sees, and by the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graphkiln_backend.graph.arrays import as_text, is_text
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.task import Ranking, Reading, is_classification
from graphkiln_backend.proof.comparison import compare, score_indices
from graphkiln_backend.proof.decision import are_scores, decide_outputs
from graphkiln_backend.proof.policy import Limits
from graphkiln_backend.proof.tasks import judge

Arrays = Mapping[str, AnyArray]

_SHOWN = 3  # samples of a request whose classes are named
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerDifference:
    """Difference of an answer from the one that a user got.

    Attributes:
        same: Whether both decide the same: top-1 classes, boxes, class maps, vectors by their cosine, values that are
            no floating-point numbers; other outputs by their numbers.
        equal: Whether all bits are equal.
        within: Whether the numbers are within the limits.
        relative_l2: Largest relative L2 error of an output.
        share: Share of differing decisions, 0 to 1.
        text: Description of a difference in the decision, else in the numbers; empty for equal answers.
    """

    same: bool
    equal: bool = False
    within: bool = True
    relative_l2: float = 0.0
    share: float = 0.0
    text: str = ""

    @property
    def severity(self) -> tuple[bool, float, float]:
        """Sort key: larger is worse."""
        return not self.same, self.share, self.relative_l2


def compare_answers(
    reference: Arrays, answer: Arrays, limits: Limits, reading: Reading | None, labels: Sequence[str] = ()
) -> AnswerDifference:
    """Compare the outputs of one request.

    Args:
        reference: Outputs that the user got, by name.
        answer: Outputs to judge; those that the reference lacks are ignored.
        limits: Policy row.
        reading: Interpretation of the outputs by users, or None.
        labels: Names of the classes, for the description.
    """
    answer = {name: array for name, array in answer.items() if name in reference}
    if answer.keys() == reference.keys() and all(
        _have_equal_bits(array, answer[name]) for name, array in reference.items()
    ):
        return AnswerDifference(same=True, equal=True)
    ranking = reading if isinstance(reading, Ranking) else None
    if ranking and not {ranking.scores, ranking.indices} <= reference.keys() & answer.keys():
        ranking = None
    task = None if isinstance(reading, Ranking) else reading
    judgment = judge(task, reference, answer, limits)
    trusted, judged = score_indices(reference, judgment.outputs, ranking) if ranking else (reference, judgment.outputs)
    errors = compare(trusted, judged)
    if faults := [str(error) for error in errors if error.fault]:
        return AnswerDifference(same=False, within=False, relative_l2=math.inf, share=1.0, text="; ".join(faults))
    shares = [1 - each.agreeing / each.total for each in judgment.decisions if each.total]
    agree = all(each.agreeing >= each.least * each.total - _ROUNDING for each in judgment.decisions)
    changes = [f"{each.what}: {each.agreeing} of {each.total}" for each in judgment.decisions]
    within = all(error.within(limits) for error in errors)
    if is_classification(task):
        tops = decide_outputs(reference, answer, limits, noise=0.0, targets=None, ranking=ranking)
        exact = [error for error in errors if error.disagreement]
        shares += [1 - each.agreeing / each.samples for each in tops] + [error.disagreement for error in exact]
        agree = not any(shares) if tops or exact else within
        changes = [*_class_changes(reference, answer, ranking, labels), *map(str, exact)]
    elif not judgment.decisions:
        agree = within
    return AnswerDifference(
        same=agree,
        within=within,
        relative_l2=max((error.relative_l2 for error in errors), default=0.0),
        share=max(shares, default=0.0),
        text="; ".join(changes if changes and not agree else map(str, errors)),
    )


def _have_equal_bits(first: AnyArray, second: AnyArray) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if is_text(first):
        return bool(np.array_equal(as_text(first), as_text(second)))
    return first.tobytes() == second.tobytes()


def _class_changes(reference: Arrays, answer: Arrays, ranking: Ranking | None, labels: Sequence[str]) -> Iterator[str]:
    """Describe the changed top-1 classes of the first output of scores."""
    if ranking:
        before, after = (arrays[ranking.indices][:, 0] for arrays in (reference, answer))
    else:
        name = next((name for name, array in reference.items() if are_scores(array)), None)
        if name is None:
            return
        before, after = (arrays[name].astype(np.float64).argmax(axis=1) for arrays in (reference, answer))
    changed = np.flatnonzero(before != after)
    for row in changed[:_SHOWN]:
        yield " -> ".join(_named(int(found[row]), labels) for found in (before, after))
    if len(changed) > _SHOWN:
        yield f"{len(changed)} of {len(before)} classes in all"


def _named(index: int, labels: Sequence[str]) -> str:
    return labels[index] if 0 <= index < len(labels) else f"class {index}"
