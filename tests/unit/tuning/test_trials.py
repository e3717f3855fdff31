"""What a measurement says of itself."""

from __future__ import annotations

import numpy as np

from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.trials import ClosedLoop, Measured, OpenLoop


def test_requests_are_those_with_a_latency() -> None:
    measured = Measured(latency=Latency.of(np.ones(7)), throughput=Interval.exact(7.0), seconds=1.0)
    assert measured.requests == 7


def test_loads_differ_by_kind() -> None:
    assert len({OpenLoop(2), ClosedLoop(2), OpenLoop(2.0)}) == 2
