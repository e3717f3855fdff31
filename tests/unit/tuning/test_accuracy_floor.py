"""Accuracy floors: what they need, and what so many samples can tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from task_outputs import DETECTION

from graphkiln.tuning.questions import Questions, check_floor, samples_needed, samples_to_read, undecided
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.precision import Precision

PLAIN = Questions(origin="test", feeds=(), answers=(), saved=Precision.FP32, unlabelled="golden samples have none")


def labelled(count: int) -> Questions:
    return replace(PLAIN, targets=np.zeros(count, np.int64), unlabelled="")


@pytest.mark.parametrize(("floor", "count"), [(0.005, 598), (0.01, 299), (0.1, 29)])
def test_so_many_samples_rule_a_larger_loss_out(floor: float, count: int) -> None:
    """With a loss of that size, a sample less shows none of it in more than 1 of 20 cases."""
    assert samples_needed(floor) == count
    none_lost = [(1 - floor) ** number for number in (count - 1, count)]
    assert none_lost[0] > 0.05 >= none_lost[1]


def test_no_number_of_samples_shows_that_nothing_at_all_is_lost() -> None:
    assert samples_needed(0.0) is None
    assert "no number decides" in undecided(labelled(2000), 0.0)


def test_as_many_are_read_as_tell_of_it_within_bounds() -> None:
    assert samples_to_read(None) == 256
    assert samples_to_read(0.1) == 256
    assert samples_to_read(0.005) == 598
    assert samples_to_read(0.0001) == 2048
    assert samples_to_read(0.0) == 256


def test_too_few_samples_are_told_with_what_they_can_tell() -> None:
    told = undecided(labelled(50), 0.005)
    assert "an accuracy floor of 0.5% is not decided by 50 labelled samples" in told
    assert "a loss below 5.8% may still be there" in told
    assert "it takes 598" in told
    assert undecided(labelled(598), 0.005) == ""
    assert undecided(labelled(5), None) == ""
    assert undecided(PLAIN, 0.01) == ""


def test_a_floor_is_for_classes() -> None:
    with pytest.raises(InvalidInput, match="counts right classes"):
        check_floor(replace(labelled(3), reading=DETECTION), 0.01)
    check_floor(replace(PLAIN, reading=DETECTION), None)
    check_floor(labelled(3), 0.01)


def test_a_floor_needs_labels_and_says_what_has_none() -> None:
    with pytest.raises(InvalidInput, match="right classes are known: golden samples have none"):
        check_floor(PLAIN, 0.01)
    check_floor(PLAIN, None)
