"""Candidates and fallbacks: which session serves, and what is remembered of the choice."""

from __future__ import annotations

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
from graphkiln_backend.engines.base import Placement, SessionConfig
from graphkiln_backend.engines.openvino import OpenVinoSession
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.deployment import select_session
from graphkiln_backend.lowering.plan import LoweringPlan, plan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.settings import Choice, Settings
from graphkiln_backend.repository.version import ModelVersion


def placed(**facts: object) -> object:
    def placement(_: object, __: Mapping[str, AnyArray]) -> Placement:
        return Placement(nodes={"CPU": 9}, precision=Precision.FP32, **facts)  # type: ignore[arg-type]

    return placement


class TestFallback:
    def test_the_first_one_that_works_serves_and_what_failed_is_kept(
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


def test_a_third_party_adds_an_engine_by_entry_point(
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
    """With engines that do what the test says."""

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

    def test_a_failed_candidate_is_retried_at_the_next_start(
        self, add_engine: Any, select: Any, cache: ArtifactCache
    ) -> None:
        engines = [add_engine("a"), add_engine("b", build_error=LoweringError("no memory", attempts=()))]
        assert select(*engines).failures == ("b on cpu: no memory",)
        assert not choices(cache)
        engines[1].build_error = None
        select(*engines)
        assert choices(cache)

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=["interrupted", "memory"])
    def test_what_is_built_is_closed_when_the_next_build_ends_everything(
        self, add_engine: Any, select: Any, error: BaseException
    ) -> None:
        first, second = add_engine("a"), add_engine("b", build_error=error)
        with pytest.raises(type(error)):
            select(first, second)
        assert [session.closed for session in first.sessions] == [1]

    def test_a_candidate_that_computes_something_else_is_closed_and_named(self, add_engine: Any, select: Any) -> None:
        wrong, right = add_engine("wrong", factor=2.1, run_s=0.1), add_engine("right")
        proven = select(wrong, right)
        assert proven.config.engine == "right"
        assert "the outputs changed" in proven.failures[0]
        assert [session.closed for session in wrong.sessions] == [1]

    @pytest.mark.parametrize("gone", ["a", "b"])
    def test_the_others_follow_in_the_plans_order_where_the_choice_is_gone(
        self, add_engine: Any, select: Any, gone: str
    ) -> None:
        engines = {name: add_engine(name, run_s=seconds) for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 2.0))}
        select(*engines.values())
        engines["b"].build_error = LoweringError("gone", attempts=())
        engines[gone].build_error = LoweringError("gone", attempts=())
        proven = select(*engines.values())
        assert proven.config.engine == ("c" if gone == "a" else "a")
        assert proven.failures[0] == "b on cpu: gone"

    @pytest.mark.parametrize("changed", ["batch", "self-test", "engine", "candidates", "threads", "nothing"])
    def test_what_a_choice_depends_on(self, add_engine: Any, select: Any, cache: ArtifactCache, changed: str) -> None:
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
    def test_all_instances_choose_alike(self, version: ModelVersion, add_engine: Any, tmp_path: Path) -> None:
        """The one that comes first measures, the others wait for what it finds: their own noise has no say."""
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

    def test_a_cache_that_cannot_be_written_costs_a_measurement_at_each_start(
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
