"""What travels to a worker."""

from __future__ import annotations

import pickle

from graphkiln_backend.scoring.outcomes import Attempt, Span
from graphkiln_backend.scoring.units import Unit

UNIT = Unit(id="a" * 32, path="/images", part="[]", rows=10)


def test_an_attempt_travels_whole() -> None:
    attempt = Attempt(unit=UNIT, quarantined={3: "ended its worker"}, probe=Span(start=2, stop=7))
    assert pickle.loads(pickle.dumps(attempt)) == attempt  # noqa: S301 - what was written a line before


def test_a_span_is_as_long_as_its_rows() -> None:
    assert [len(Span(start=0, stop=10)), len(Span(start=4, stop=5))] == [10, 1]
