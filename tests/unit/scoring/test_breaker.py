"""When a run ends because going on makes no sense."""

from __future__ import annotations

import pytest

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.events import UnitFailed
from graphkiln_backend.scoring.schedule import MOST_FAILED_UNITS, MOST_STORE_FAILURES, Breaker

FAILED = UnitFailed(unit_id="a", path="/images", reason="it cannot be read")


def test_a_store_may_fail_for_a_while() -> None:
    breaker = Breaker()
    for _ in range(20):
        for _ in range(MOST_STORE_FAILURES - 1):
            breaker.count_store_failure("busy")
        breaker.count_commit()


def test_units_that_fail_one_after_the_other_end_the_run() -> None:
    breaker = Breaker()
    for _ in range(MOST_FAILED_UNITS - 1):
        breaker.count_failed_unit(FAILED)
    with pytest.raises(ScoringError, match=r"5 units in a row failed.*/images.*it cannot be read.*same command"):
        breaker.count_failed_unit(FAILED)
