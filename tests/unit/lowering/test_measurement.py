"""Comparing candidates: how they are timed, and which one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.graph.errors import ExecutionError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.lowering.artifacts import Measurement
from graphkiln_backend.lowering.deployment import measure
from graphkiln_backend.lowering.trial import SyntheticInputs

Build = Callable[..., dict[str, Any]]


@pytest.fixture
def build(add_engine: Any) -> Build:
    """Sessions by name, of engines that take the given seconds for a run."""

    def build(**run_s: float) -> dict[str, Any]:
        engines = [add_engine(name, run_s=seconds) for name, seconds in run_s.items()]
        return {engine.name: engine.build(Path("graph"), engine.config) for engine in engines}

    return build


class TestMeasure:
    def test_the_fastest_is_chosen_and_rates_are_samples_per_second(self, build: Build, golden: GoldenSamples) -> None:
        found = measure(build(a=0.5, b=0.25, c=1.0), golden, 8)
        assert found == Measurement(chosen="b", rates={"a": 16.0, "b": 32.0, "c": 8.0})

    @pytest.mark.parametrize(("seconds", "chosen"), [(1.0, "a"), (1.02, "a"), (1.03, "b"), (0.5, "a")])
    def test_what_is_hardly_faster_does_not_change_engines(
        self, build: Build, golden: GoldenSamples, seconds: float, chosen: str
    ) -> None:
        assert measure(build(a=seconds, b=1.0), golden, 1).chosen == chosen

    @pytest.mark.parametrize(
        "error",
        [ExecutionError("no such index"), SignatureError("refused", expected="3", got="0")],
        ids=["run", "feed"],
    )
    def test_a_graph_that_does_not_run_cannot_be_timed(self, build: Build, error: Exception) -> None:
        sessions = build(a=1.0, b=0.5)
        sessions["b"].engine.run_error = error
        assert measure(sessions, SyntheticInputs(), 1) == Measurement(chosen="a", rates={})
