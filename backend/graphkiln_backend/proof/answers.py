"""Comparison of two answers to one request, for rollouts and replays: by what they decide, and by the numbers.

A decision is the top-1 class, the objects, the class map or the direction of a vector. Another version may compute
other numbers and still decide alike, so that numbers decide only about outputs without a known meaning. Objects, class
maps and vectors decide alike within the limits for int8, which allow what users do not notice; an object counts if its
score is not below the threshold of the task, and its partner may have any score near that. A decision that is a tie in
the first answer, within the numeric limits, is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.arrays import as_text, is_text
from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, is_classification
from graphkiln_backend.proof.comparison import compare, score_indices
from graphkiln_backend.proof.decision import scatter_scores
from graphkiln_backend.proof.detections import Found, can_match, found_on, match
from graphkiln_backend.proof.policy import BY_PRECISION, INT8, OTHER_ENGINE, Limits
from graphkiln_backend.proof.tasks import class_map, cosines, judge

Arrays = Mapping[str, AnyArray]

_OBJECTS = replace(INT8.tasks, score=1e9)  # any score
_NEAR = 0.1  # below the threshold of scores
_VISIBLE = 0.001  # share of an image's pixels
_MOST_CHARACTERS = 120
_MOST_ITEMS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerDecision:
    """Comparison of two answers by what they decide.

    Attributes:
        outcome: `undecided` if the first answer is a tie within the numeric limits.
        first: Decision of the first answer in a few words; empty if they agree.
        second: Decision of the second answer.
        share: Share of rows, or of results of the task, with another decision, 0..1.
    """

    outcome: Literal["agreed", "disagreed", "undecided"]
    first: str = ""
    second: str = ""
    share: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerDifference:
    """Difference of an answer from the one that a user got.

    Attributes:
        same: Whether both are proven to decide the same.
        equal: Whether all bits are equal.
        within: Whether the numbers, and the results of a task, are within the limits.
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


def limits_between(precisions: Sequence[Precision]) -> Limits:
    """Return the policy row for answers of two versions: that of the lower precision."""
    rows = [OTHER_ENGINE if each is Precision.FP32 else BY_PRECISION.get(each, OTHER_ENGINE) for each in precisions]
    return max(rows, key=lambda row: row.relative_l2, default=OTHER_ENGINE)


class AnswerComparison:
    """Compare the answers of two versions to one request.

    Args:
        contract: Contract of the version that gives the first answers.
        limits: Policy row of the numbers.
    """

    def __init__(self, contract: Contract, limits: Limits = OTHER_ENGINE) -> None:
        self._contract = contract
        self._limits = limits

    def compare(self, first: Arrays, second: Arrays) -> AnswerDifference:
        """Compare decisions and numbers; outputs that the first answer lacks are ignored."""
        second = {name: array for name, array in second.items() if name in first}
        if second.keys() == first.keys() and all(_have_equal_bits(each, second[name]) for name, each in first.items()):
            return AnswerDifference(same=True, equal=True)
        task, ranking = self._contract.task, self._contract.ranking
        judgment = judge(None if is_classification(task) else task, first, second, self._limits)
        trusted, judged = first, judgment.outputs  # objects in the order of the first answer
        if ranking and {ranking.scores, ranking.indices} <= first.keys() & second.keys():
            trusted, judged = score_indices(first, judged, ranking)
        errors = compare(trusted, judged)
        if faults := [str(error) for error in errors if error.fault]:
            return AnswerDifference(same=False, within=False, relative_l2=math.inf, share=1.0, text="; ".join(faults))
        within = all(error.within(self._limits) for error in errors)
        within = within and all(each.within(self._limits) for each in judgment.decisions)
        decision = self._compare_task(first, second)
        same = decision.outcome == "agreed" if decision else within
        numbers = "; ".join(map(str, (*errors, *judgment.decisions)))
        return AnswerDifference(
            same=same,
            within=within,
            relative_l2=max((error.relative_l2 for error in errors), default=0.0),
            share=decision.share if decision else float(not same),
            text=f"{decision.first} -> {decision.second}" if decision and not same else numbers,
        )

    def decide(self, first: Arrays, second: Arrays) -> AnswerDecision:
        """Compare what two answers decide; outputs that the request did not ask for are missing in both."""
        if unlike := _unlike(first, second):
            return AnswerDecision(outcome="disagreed", first=unlike[0], second=unlike[1], share=1.0)
        return self._compare_task(first, second) or self._compare_numbers(first, second)

    def _compare_task(self, first: Arrays, second: Arrays) -> AnswerDecision | None:
        """Compare by the task; None if the outputs are not those of a task."""
        task = self._contract.task
        if is_classification(task):
            pairs = [*self._scores(first, second)] if self._contract.is_specified else []
            return self._compare_classes(pairs) if pairs else None
        if isinstance(task, Detection) and can_match(task, first, second):
            return self._compare_objects(task, first, second)
        judgment = judge(task, first, second, INT8)
        if not judgment.decisions:
            return None
        agrees = all(decision.agreeing >= decision.least * decision.total for decision in judgment.decisions)
        if agrees and isinstance(task, Segmentation):
            agrees = _keeps_areas(class_map(task, first), class_map(task, judgment.outputs))
        share = max(1 - each.agreeing / each.total for each in judgment.decisions if each.total)
        return AnswerDecision(outcome="agreed") if agrees else self._disagreed(first, second, share)

    def _compare_numbers(self, first: Arrays, second: Arrays) -> AnswerDecision:
        errors = [error for error in compare(first, second) if not error.within(self._limits)]
        if not errors:
            return AnswerDecision(outcome="agreed")
        text = "; ".join(map(str, errors))[:_MOST_CHARACTERS]
        names = ", ".join(error.name for error in errors)
        return AnswerDecision(outcome="disagreed", first=names, second=text, share=1.0)

    def _compare_objects(self, task: Detection, first: Arrays, second: Arrays) -> AnswerDecision:
        total = lost = ties = 0
        for image in range(len(first[task.scores])):
            both = [found_on(task, arrays, image) for arrays in (first, second)]
            for own, others in (both, both[::-1]):
                seen = _select(own, own.scores >= task.score_threshold)
                partners = match(seen, _select(others, others.scores >= task.score_threshold - _NEAR), _OBJECTS)
                total, lost = total + len(seen.scores), lost + int(np.sum(partners < 0))
                ties += max(0, len(seen.scores) - int(np.sum(others.scores >= task.score_threshold)))
        if not (lost or ties):
            return AnswerDecision(outcome="agreed")
        decision = self._disagreed(first, second, (lost or ties) / total)
        return decision if lost else replace(decision, outcome="undecided")

    def _scores(self, first: Arrays, second: Arrays) -> Iterator[tuple[AnyArray, AnyArray]]:
        """Yield the scores of all classes of both answers, `[rows, classes]`."""
        ranking = self._contract.ranking
        if ranking:
            if {ranking.scores, ranking.indices} <= first.keys() and first[ranking.scores].ndim == 2:
                classes = 1 + max(int(arrays[ranking.indices].max(initial=0)) for arrays in (first, second))
                yield tuple(
                    scatter_scores(arrays[ranking.scores], arrays[ranking.indices], classes)
                    for arrays in (first, second)
                )  # type: ignore[misc]
            return
        names = [self._contract.output] if self._contract.output in first else [*first]
        for name in names:
            if (
                first[name].ndim in (1, 2)
                and first[name].shape[-1] > 1
                and DType.from_numpy(first[name].dtype).is_float
            ):
                yield np.atleast_2d(first[name]), np.atleast_2d(second[name])

    def _compare_classes(self, pairs: Sequence[tuple[AnyArray, AnyArray]]) -> AnswerDecision:
        found = AnswerDecision(outcome="agreed")
        for scores, others in pairs:
            expected, computed = scores.astype(np.float64), others.astype(np.float64)
            before, after = expected.argmax(axis=1), computed.argmax(axis=1)
            finite = np.isfinite(computed).all(axis=1) | ~np.isfinite(expected).all(axis=1)
            rows = np.arange(len(expected))
            noise = self._limits.relative_l2 * np.sqrt(np.mean(np.square(expected), axis=1))
            margin = expected[rows, before] - expected[rows, after]
            differ = (before != after) | ~finite
            if not differ.any():
                continue
            decided = differ & ~(finite & (margin <= noise))
            row = int(np.argmax(decided if decided.any() else differ))
            texts = [self._class_text(array[row]) for array in (expected, computed)]
            share = float(np.mean(differ))
            if decided.any():
                return AnswerDecision(outcome="disagreed", first=texts[0], second=texts[1], share=share)
            found = AnswerDecision(outcome="undecided", first=texts[0], second=texts[1], share=share)
        return found

    def _class_text(self, scores: AnyArray) -> str:
        best = int(scores.argmax())
        return f"{self._label(best)} {scores[best]:.4g}"

    def _label(self, index: int) -> str:
        labels = self._contract.labels or (self._contract.ranking.labels if self._contract.ranking else ())
        return labels[index][:40] if 0 <= index < len(labels) else f"class {index}"

    def _disagreed(self, first: Arrays, second: Arrays, share: float) -> AnswerDecision:
        task = self._contract.task
        texts = ["", ""]
        if isinstance(task, Detection):
            texts = [self._objects(task, arrays) for arrays in (first, second)]
        elif isinstance(task, Segmentation):
            texts = [self._classes(task, arrays) for arrays in (first, second)]
        elif isinstance(task, Embedding):
            texts = ["vector", f"cosine {cosines(first[task.vectors], second[task.vectors]).min():.4g}"]
        return AnswerDecision(outcome="disagreed", first=texts[0], second=texts[1], share=share)

    def _objects(self, task: Detection, outputs: Arrays) -> str:
        found = [found_on(task, outputs, image) for image in range(len(outputs[task.scores]))]
        seen = [
            f"{self._label(int(value))} {score:.2f}"
            for each in found
            for value, score in zip(each.classes, each.scores, strict=True)
            if score >= task.score_threshold
        ]
        return f"{len(seen)} objects: {', '.join(seen[:_MOST_ITEMS])}"[:_MOST_CHARACTERS]

    def _classes(self, task: Segmentation, outputs: Arrays) -> str:
        values, counts = np.unique(class_map(task, outputs), return_counts=True)
        order = np.argsort(-counts)[:_MOST_ITEMS]
        parts = [f"{self._label(int(values[index]))} {counts[index] / counts.sum():.1%}" for index in order]
        return ", ".join(parts)[:_MOST_CHARACTERS]


def _keeps_areas(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> bool:
    """True if each class that covers a visible part of an image, in either map, overlaps by half.

    Most pixels of a map may be background, so that the share of equal pixels does not show an object that is lost.
    """
    for before, after in zip(first, second, strict=True):
        for value in np.union1d(before, after):
            own, other = before == value, after == value
            largest = max(np.count_nonzero(own), np.count_nonzero(other))
            if largest >= _VISIBLE * before.size and 2 * np.count_nonzero(own & other) < np.count_nonzero(own | other):
                return False
    return True


def _select(found: Found, rows: npt.NDArray[np.bool_]) -> Found:
    """Return some of the objects."""
    return Found(
        boxes=found.boxes[rows],
        scores=found.scores[rows],
        classes=found.classes[rows],
        masks=None if found.masks is None else found.masks[rows],
        keypoints=None if found.keypoints is None else found.keypoints[rows],
    )


def _unlike(first: Arrays, second: Arrays) -> tuple[str, str] | None:
    """Describe outputs of other names, types or shapes; None if there are none."""
    texts = [
        {name: f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items()}
        for arrays in (first, second)
    ]
    if texts[0] == texts[1]:
        return None
    names = [name for name in {**first, **second} if texts[0].get(name) != texts[1].get(name)]
    left, right = (", ".join(each.get(name, f"no {name}") for name in names)[:_MOST_CHARACTERS] for each in texts)
    return left, right


def _have_equal_bits(first: AnyArray, second: AnyArray) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if is_text(first):
        return bool(np.array_equal(as_text(first), as_text(second)))
    return first.tobytes() == second.tobytes()
