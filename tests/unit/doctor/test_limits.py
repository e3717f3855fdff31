"""Limits of the kernel."""

from __future__ import annotations

import resource

import pytest

from graphkiln.doctor.finding import Level, Request
from graphkiln.doctor.machine import LIMITS, check_limits, find_limit


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.subject)
def test_one_that_is_too_low_says_how_to_raise_it(limit: object) -> None:
    found = {each.subject: each for each in LIMITS}[getattr(limit, "subject", "")]
    assert find_limit(found, resource.RLIM_INFINITY).level is Level.OK
    assert find_limit(found, found.least).level is Level.OK
    low = find_limit(found, found.least - 1)
    assert low.level is Level.WARNING
    assert f"ulimit {found.flag}" in low.hint


def test_sizes_are_for_people() -> None:
    (size,) = [limit for limit in LIMITS if limit.resource == resource.RLIMIT_FSIZE]
    assert find_limit(size, 8 << 30).message == "at most 8.0 GB"
    assert find_limit(size, -1).facts == {"limit": None}


def test_all_are_looked_at() -> None:
    assert len(list(check_limits(Request()))) == len(LIMITS)
