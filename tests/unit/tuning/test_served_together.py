"""Several models in one server: loaded at the same time, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import tuned

from graphkiln.tuning import together as served_together
from graphkiln.tuning.candidate import THREADS, Candidate
from graphkiln.tuning.sharing import Plan, Response
from graphkiln.tuning.together import Outcomes, serve_together
from graphkiln.tuning.trials import Failed, LoadShape, Measured
from graphkiln_backend.graph.errors import MeasurementError

ONE = Response(candidate=Candidate.of({THREADS: 1}), rate=100.0, cores=1.0, memory_bytes=1)
PLAN = Plan(responses={"a": ONE, "b": ONE}, rate=100.0, cores=2.0, memory_bytes=2, limited_by="a")
RATES = {"a": 1.0, "b": 2.0}


class Served:
    """A model whose load generator takes a while until it can send, or cannot."""

    def __init__(self, name: str, events: list[str], when_ready: Callable[[], None], *, fault: str = "") -> None:
        self.name, self.events, self.when_ready, self.fault = name, events, when_ready, fault

    def measure(self, load: LoadShape, seconds: float, seed: int) -> Measured:
        del load, seconds, seed
        time.sleep(0.02 if self.name == "a" else 0.0)
        if self.fault:
            raise MeasurementError(self.fault)
        self.events.append("ready")
        self.when_ready()
        self.events.append("begun")
        return tuned.measured(10.0, 0.02)


def serve(monkeypatch: pytest.MonkeyPatch, faults: Mapping[str, str]) -> tuple[list[str], list[Outcomes]]:
    """Two measurements; what happened, and what came of it."""
    events: list[str] = []

    def start(_tunings: object, _plan: Plan, _stack: ExitStack, when_ready: Callable[[], None]) -> dict[str, Any]:
        return {name: Served(name, events, when_ready, fault=faults.get(name, "")) for name in RATES}

    monkeypatch.setattr(served_together, "_start", start)
    with serve_together({}, PLAN) as measure:
        return events, [measure(RATES, 5.0, seed) for seed in (0, 1)]


def test_no_load_begins_before_all_can(monkeypatch: pytest.MonkeyPatch) -> None:
    events, found = serve(monkeypatch, {})
    assert events == ["ready", "ready", "begun", "begun"] * 2
    assert all(isinstance(each, Measured) for outcomes in found for each in outcomes.values())


def test_one_that_cannot_begin_keeps_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    events, found = serve(monkeypatch, {"a": "no process"})
    assert events == ["ready", "begun"] * 2
    assert [outcomes["a"] for outcomes in found] == [Failed(reason="no process")] * 2


def test_models_that_do_not_load_together_are_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MeasurementError("b: no room")

    monkeypatch.setattr(served_together, "_start", refuse)
    with serve_together({}, PLAN) as measure:
        assert measure(RATES, 5.0, 0) == dict.fromkeys("ab", Failed(reason="b: no room"))
