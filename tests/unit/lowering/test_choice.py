"""What is said of a choice: what a lower precision brought here, and what that was found out from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import Placement
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.deployment import select_session
from graphkiln_backend.lowering.plan import LoweringPlan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.repository.version import ModelVersion

BF16 = Placement(nodes={"fake": 1}, precision=Precision.BF16, products={Precision.BF16: 1})
NAME = "half on cpu in bf16"

Compare = Callable[..., ProvenSession]


@pytest.fixture
def compare(
    add_engine: Any, version: ModelVersion, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ProvenSession]:
    """Chooses between fp32 of two engines, the second takes a second a run, and bf16 of a third."""
    monkeypatch.setattr(Artifacts, "_lower", lambda _, __, target: target.write_bytes(b"lowered"))

    def compare(*, fp32_s: float = 2.0, saved: Any = version, batch: int = 1, **half: Any) -> ProvenSession:
        slow, full = add_engine("slow", run_s=fp32_s), add_engine("full", run_s=1.0)
        lower = add_engine("half", **{"placement": BF16, **half})
        plan = LoweringPlan(
            candidates=(dataclasses.replace(lower.config, precision=Precision.BF16),),
            baselines=tuple(dataclasses.replace(engine.config, precision=Precision.FP32) for engine in (slow, full)),
        )
        return select_session(Artifacts(saved, Precision.FP32, cache), plan, Requirements(batch_sizes=(batch,)))

    return compare


class TestPrecision:
    def test_one_that_is_slower_than_fp32_is_not_taken_and_that_is_said(
        self, compare: Compare, logged: list[str]
    ) -> None:
        proven = compare(run_s=1.25, batch=4)
        assert str(proven.config) == "full on cpu in fp32"
        line = f"{NAME}: bf16 was measured 0.8x of fp32 on this machine: not taken, 3.2/s at batch 4 beside 4.0/s"
        assert line in proven.slower
        assert logged[-1] == line  # whoever requested bf16 reads it in the log, too

    def test_one_that_is_faster_is_taken_and_says_how_much(self, compare: Compare, logged: list[str]) -> None:
        proven = compare(run_s=0.25)
        assert str(proven.config) == NAME
        assert proven.config.reason == (
            "test; the fastest here, 4.0/s at batch 1; bf16 was measured 4x of fp32 on this machine"
        )
        assert proven.slower == (
            "slow on cpu in fp32: not clearly faster, 0.5/s at batch 1 beside 4.0/s",
            "full on cpu in fp32: not clearly faster, 1.0/s at batch 1 beside 4.0/s",
        )
        assert not any("bf16 was" in line for line in logged)

    def test_a_graph_that_cannot_be_timed_is_served_as_requested(
        self, compare: Compare, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> float:
            raise ExecutionError("no such index")

        monkeypatch.setattr("graphkiln_backend.engines.timing._turn_s", fail)
        proven = compare()
        assert str(proven.config) == NAME
        assert proven.basis
        assert proven.basis.rates == {}


class TestBasis:
    def test_it_is_what_was_measured_where_and_when(self, compare: Compare) -> None:
        basis = compare(run_s=0.5, batch=4).basis
        assert basis
        assert basis.rates == {"slow on cpu in fp32": 2.0, "full on cpu in fp32": 4.0, NAME: 8.0}
        assert (basis.chosen, basis.batch, basis.remembered) == (NAME, 4, False)
        assert basis.machine == hardware.identity(CPU)
        assert basis.measured_at.endswith("+00:00")
