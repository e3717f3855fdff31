"""Selection of the session that serves: candidates, fallbacks, measurements, and the cached choice."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lowered import cpu, lower_version

from graphkiln_backend.cache.store import ArtifactCache, StoredEntry
from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import Placement, SessionConfig
from graphkiln_backend.engines.openvino import OpenVinoSession
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError, LoweringError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts, Measurement
from graphkiln_backend.lowering.deployment import measure, select_session
from graphkiln_backend.lowering.plan import LoweringPlan, plan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.settings import Choice, Settings
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.repository.version import ModelVersion


def placed(**facts: object) -> object:
    def placement(_: object, __: Mapping[str, AnyArray]) -> Placement:
        return Placement(nodes={"CPU": 9}, precision=Precision.FP32, **facts)  # type: ignore[arg-type]

    return placement


class TestFallback:
    def test_first_working_fallback_serves_and_failures_are_reported(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OpenVinoSession, "placement", placed(products={"fp32": 5}))
        order = (Choice(engine="openvino", precision=Precision.BF16), Choice(engine="onnxruntime"))
        settings = Settings(engine="nonesuch", fallback=order, origins={"fallback": "--set"})
        lowered = lower_version(digits / "1", plan(settings, cpu()), cache)
        lowered.session.close()
        assert lowered.config.engine == "onnxruntime"
        first, second = lowered.failures
        assert "unknown engine 'nonesuch'" in first
        assert "no product ran in bf16" in second


TOY = """
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine

class ToyEngine(OnnxRuntimeEngine):
    def identity(self, config):
        return {}
"""


def test_engine_of_a_third_party(
    digits: Path, tmp_path: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = tmp_path / "toy-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[graphkiln.engines]\ntoy = toy_engine:ToyEngine\n")
    (tmp_path / "toy_engine.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    lowered = lower_version(digits / "1", plan(Settings(engine="toy"), cpu()), cache)
    lowered.session.close()
    assert lowered.config.engine == "toy"
    assert lowered.self_test


def choices(cache: ArtifactCache) -> list[StoredEntry]:
    return [stored for stored in cache.entries() if stored.entry.kind == "choice"]


class TestChoosing:
    @pytest.fixture
    def select(self, version: ModelVersion, cache: ArtifactCache) -> Callable[..., ProvenSession]:
        def select(*engines: Any, fallback: Sequence[Any] = (), **requirements: Any) -> ProvenSession:
            chosen = LoweringPlan(
                candidates=tuple(engine.config for engine in engines),
                fallback=tuple(engine.config for engine in fallback),
            )
            artifacts = Artifacts(version, Precision.FP32, cache)
            return select_session(artifacts, chosen, Requirements(**requirements))

        return select

    def test_only_the_chosen_session_stays_open(self, add_engine: Any, select: Any) -> None:
        engines = [add_engine(name, run_s=seconds) for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
        proven = select(*engines)
        assert proven.config.engine == "b"
        assert [[session.closed for session in engine.sessions] for engine in engines] == [[1], [0], [1]]
        assert proven.session is engines[1].sessions[0]

    def test_failed_candidate_is_retried_at_the_next_start(
        self, add_engine: Any, select: Any, cache: ArtifactCache
    ) -> None:
        engines = [add_engine("a"), add_engine("b", build_error=LoweringError("no memory", attempts=()))]
        assert select(*engines).failures == ("b on cpu: no memory",)
        assert not choices(cache)
        engines[1].build_error = None
        select(*engines)
        assert choices(cache)

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=["interrupted", "memory"])
    def test_sessions_are_closed_when_a_later_build_aborts(
        self, add_engine: Any, select: Any, error: BaseException
    ) -> None:
        first, second = add_engine("a"), add_engine("b", build_error=error)
        with pytest.raises(type(error)):
            select(first, second)
        assert [session.closed for session in first.sessions] == [1]

    def test_candidate_with_wrong_outputs_is_closed_and_reported(self, add_engine: Any, select: Any) -> None:
        wrong, right = add_engine("wrong", factor=2.1, run_s=0.1), add_engine("right")
        proven = select(wrong, right)
        assert proven.config.engine == "right"
        assert "the outputs changed" in proven.failures[0]
        assert [session.closed for session in wrong.sessions] == [1]

    @pytest.mark.parametrize("gone", ["a", "b"])
    def test_other_candidates_replace_a_failed_choice_in_order(self, add_engine: Any, select: Any, gone: str) -> None:
        engines = {name: add_engine(name, run_s=seconds) for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 2.0))}
        select(*engines.values())
        engines["b"].build_error = LoweringError("gone", attempts=())
        engines[gone].build_error = LoweringError("gone", attempts=())
        proven = select(*engines.values())
        assert proven.config.engine == ("c" if gone == "a" else "a")
        assert proven.failures[0] == "b on cpu: gone"

    @pytest.mark.parametrize("changed", ["batch", "self-test", "engine", "candidates", "threads", "nothing"])
    def test_choice_depends_on_its_conditions(
        self, add_engine: Any, select: Any, cache: ArtifactCache, changed: str
    ) -> None:
        engines = [add_engine("a", facts={"release": "1"}), add_engine("b", facts={"threads": "2"})]
        select(*engines, batch_sizes=(1, 2), self_test=True)
        options: dict[str, Any] = {"batch_sizes": (1, 2), "self_test": True}
        match changed:
            case "batch":
                options["batch_sizes"] = (1, 4)
            case "self-test":
                options["self_test"] = False
            case "engine":
                engines[0].facts["release"] = "2"
            case "threads":
                engines[1].facts["threads"] = "4"
            case "candidates":
                engines.append(add_engine("c"))
        select(*engines, **options)
        assert len(choices(cache)) == (1 if changed == "nothing" else 2)

    @pytest.mark.timeout(60)
    def test_one_instance_measures_for_all(self, version: ModelVersion, add_engine: Any, tmp_path: Path) -> None:
        engines = [add_engine("a", run_s=1.0), add_engine("b", run_s=0.5)]
        chosen: list[str] = []

        def run_instance() -> None:
            with ArtifactCache(tmp_path / "shared") as cache:
                compared = LoweringPlan(candidates=tuple(engine.config for engine in engines))
                proven = select_session(Artifacts(version, Precision.FP32, cache), compared, Requirements())
                chosen.append(proven.config.engine)

        def slow_build(graph: Path, config: SessionConfig, compiled: Path | None = None) -> Any:
            time.sleep(0.1)
            return type(engines[0]).build(engines[0], graph, config, compiled)

        engines[0].build = slow_build
        threads = [threading.Thread(target=run_instance) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert chosen == ["b"] * 4
        assert [len(engine.sessions) for engine in engines] == [1, 4]

    def test_unwritable_cache_costs_a_measurement_at_each_start(
        self, add_engine: Any, select: Any, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        def read_only(*_: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(ArtifactCache, "_make_folders", read_only)
        engines = [add_engine("a"), add_engine("b", run_s=0.5)]
        for _ in range(2):
            assert select(*engines).config.engine == "b"
        assert [len(engine.sessions) for engine in engines] == [2, 2]
        assert [line.partition(":")[0] for line in logged] == [
            "cannot cache the choice of an engine",
            "measuring a on cpu, b on cpu at batch 1",
        ] * 2


RAN_BF16 = Placement(nodes={"fake": 1}, precision=Precision.BF16, products={Precision.BF16: 1})
NAME = "half on cpu in bf16"

Compare = Callable[..., ProvenSession]


@pytest.fixture
def compare(
    add_engine: Any, version: ModelVersion, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ProvenSession]:
    """Choose between fp32 of two engines (the second takes 1 s a run) and bf16 of a third."""
    monkeypatch.setattr(Artifacts, "_lower", lambda _, __, target: target.write_bytes(b"lowered"))

    def compare(*, fp32_s: float = 2.0, saved: Any = version, batch: int = 1, **half: Any) -> ProvenSession:
        slow, full = add_engine("slow", run_s=fp32_s), add_engine("full", run_s=1.0)
        lower = add_engine("half", **{"placement": RAN_BF16, **half})
        plan = LoweringPlan(
            candidates=(dataclasses.replace(lower.config, precision=Precision.BF16),),
            baselines=tuple(dataclasses.replace(engine.config, precision=Precision.FP32) for engine in (slow, full)),
        )
        return select_session(Artifacts(saved, Precision.FP32, cache), plan, Requirements(batch_sizes=(batch,)))

    return compare


class TestBaselines:
    def test_slower_precision_is_not_chosen_and_logged(self, compare: Compare, logged: list[str]) -> None:
        proven = compare(run_s=1.25, batch=4)
        assert str(proven.config) == "full on cpu in fp32"
        line = f"{NAME}: bf16 was measured 0.8x of fp32 on this machine: not taken, 3.2/s at batch 4 beside 4.0/s"
        assert line in proven.slower
        assert logged[-1] == line

    def test_faster_precision_is_chosen_with_its_gain(self, compare: Compare, logged: list[str]) -> None:
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

    def test_graph_that_cannot_be_timed_is_served_as_requested(
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
    def test_basis_records_rates_machine_and_time(self, compare: Compare) -> None:
        basis = compare(run_s=0.5, batch=4).basis
        assert basis
        assert basis.rates == {"slow on cpu in fp32": 2.0, "full on cpu in fp32": 4.0, NAME: 8.0}
        assert (basis.chosen, basis.batch, basis.remembered) == (NAME, 4, False)
        assert basis.machine == hardware.identity(CPU)
        assert basis.measured_at.endswith("+00:00")


Build = Callable[..., dict[str, Any]]


@pytest.fixture
def build(add_engine: Any) -> Build:
    """Build sessions by name that take the given seconds for a run."""

    def build(**run_s: float) -> dict[str, Any]:
        engines = [add_engine(name, run_s=seconds) for name, seconds in run_s.items()]
        return {engine.name: engine.build(Path("graph"), engine.config) for engine in engines}

    return build


class TestMeasure:
    def test_fastest_is_chosen_by_samples_per_second(self, build: Build, golden: GoldenSamples) -> None:
        found = measure(build(a=0.5, b=0.25, c=1.0), golden, 8)
        assert found == Measurement(chosen="b", rates={"a": 16.0, "b": 32.0, "c": 8.0})

    @pytest.mark.parametrize(("seconds", "chosen"), [(1.0, "a"), (1.02, "a"), (1.03, "b"), (0.5, "a")])
    def test_small_gain_does_not_change_engines(
        self, build: Build, golden: GoldenSamples, seconds: float, chosen: str
    ) -> None:
        assert measure(build(a=seconds, b=1.0), golden, 1).chosen == chosen

    @pytest.mark.parametrize(
        "error",
        [ExecutionError("no such index"), SignatureError("refused", expected="3", got="0")],
        ids=["run", "feed"],
    )
    def test_graph_that_fails_has_no_rates(self, build: Build, error: Exception) -> None:
        sessions = build(a=1.0, b=0.5)
        sessions["b"].engine.run_error = error
        assert measure(sessions, SyntheticInputs(), 1) == Measurement(chosen="a", rates={})
