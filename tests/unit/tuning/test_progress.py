"""One measurement in one line."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tuned import measured

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.report import line_of
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.trials import Bare, ClosedLoop, Failed, OpenLoop
from graphkiln.tuning.tuner import Progress

DEFAULT = Candidate.of({"threads": 2, "engine": "a"})
ENDLESS = replace(measured(90, 0.02), latency=replace(measured(90, 0.02).latency, p99=Interval.exact(math.inf)))


@pytest.mark.parametrize(
    ("load", "outcome", "line"),
    [
        (None, Bare(batch_s={1: 0.002}), "threads=1, its session alone: 2 ms"),
        (None, Bare(batch_s={1: 0.002}, accuracy="other"), "threads=1, its session alone: wrong: other"),
        (OpenLoop(100.0), measured(90, 0.02), "threads=1, 100/s: 90/s, p99 20 ms"),
        (OpenLoop(100.0), ENDLESS, "threads=1, 100/s: 90/s, more than 1 in 100 requests failed"),
        (ClosedLoop(4), measured(90, 0.02, warning="busy"), "threads=1, 4 callers: 90/s, p99 20 ms (busy)"),
        (OpenLoop(100.0), Failed(reason="x" * 200), f"threads=1, 100/s: failed: {'x' * 100}..."),
    ],
)
def test_it_says_what_was_measured_and_what_it_did(load: Any, outcome: Any, line: str) -> None:
    progress = Progress(
        number=1, spent_s=12.3, candidate=DEFAULT.with_values({"threads": 1}), load=load, outcome=outcome
    )
    assert line_of(progress, DEFAULT, 60) == f"12 of 60 s: {line}"
