"""Outcomes come back from JSON as they were, endless latencies included."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from graphkiln.tuning.journal import load_as_json, outcome_as_json, outcome_from_json
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.trials import Bare, ClosedLoop, Failed, Measured, OpenLoop

ENDLESS = np.append(np.full(50, 0.01), [math.inf] * 10)
OUTCOMES = [
    Failed(reason="it hung"),
    Bare(batch_s={1: 0.01, 8: 0.06}, accuracy="", accuracy_lost=None),
    Bare(batch_s={1: 0.01}, accuracy="differs", accuracy_lost=0.01),
    Measured(latency=Latency.of(ENDLESS), throughput=Interval(5.0, 4.0, 6.0), seconds=3.0),
    Measured(
        latency=Latency.of(np.full(5, math.inf)),
        throughput=Interval.exact(0.0),
        seconds=3.0,
        errors={"ServerError": 5},
        server_cores=1.5,
        memory_bytes=1 << 30,
        energy_j=3.5,
        warning="busy",
    ),
]


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_comes_back(outcome: Bare | Measured | Failed) -> None:
    text = json.dumps(outcome_as_json(outcome), allow_nan=False)
    assert outcome_from_json(json.loads(text)) == outcome


def test_loads_are_told_apart() -> None:
    assert [load_as_json(load) for load in (OpenLoop(2.5), ClosedLoop(4))] == [{"rate": 2.5}, {"callers": 4}]


def test_another_kind_is_refused() -> None:
    with pytest.raises(KeyError):
        outcome_from_json({"kind": "other"})
    with pytest.raises(TypeError):
        outcome_from_json({"kind": "failed", "cause": "x"})
