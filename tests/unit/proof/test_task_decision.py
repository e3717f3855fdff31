"""What decides: the share that agrees, or the metric where labels may decide."""

from __future__ import annotations

from graphkiln_backend.proof.decision import Metric, TaskDecision
from graphkiln_backend.proof.policy import BF16, INT8


def decision(agreeing: int, *, before: float | None = None, after: float = 0.0, why: str = "") -> TaskDecision:
    metric = None if before is None else Metric(name="mAP", before=before, after=after)
    return TaskDecision(what="boxes", agreeing=agreeing, total=100, least=0.98, metric=metric, inconclusive=why)


def test_enough_must_agree() -> None:
    assert decision(98).within(INT8)
    assert not decision(97).within(INT8)


def test_a_metric_that_fell_by_more_than_a_point_is_refused_whatever_agrees() -> None:
    assert not decision(100, before=0.95, after=0.939).within(INT8)
    assert not decision(100, before=0.95, after=0.939).within(BF16)


def test_a_metric_that_held_decides_for_int8_and_not_for_bf16() -> None:
    assert decision(50, before=0.95, after=0.941).within(INT8)
    assert not decision(50, before=0.95, after=0.941).within(BF16)


def test_undecided_samples_are_not_judged_and_say_so() -> None:
    assert decision(50, why="nothing found").within(INT8)
    assert str(decision(50, why="nothing found")) == "boxes not judged: nothing found"


def test_a_metric_that_cannot_fall_decides_nothing() -> None:
    """Labels that fit nothing, a mAP of 0: any graph would have kept it."""
    assert not decision(50, before=0.0, after=0.0).within(INT8)
    assert not decision(50, before=0.01, after=0.0).within(INT8)
    assert decision(98, before=0.0, after=0.0).within(INT8)
    assert decision(50, before=0.02, after=0.01).within(INT8)
