"""Candidates and fallbacks: which session serves, and what is remembered of the choice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from lowered import ORT, OV, add_unrunnable, cpu, lower_version

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Placement, SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession
from graphkiln_backend.engines.openvino import OpenVinoEngine, OpenVinoSession
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.plan import LoweringPlan, plan
from graphkiln_backend.lowering.settings import Choice, Settings


def placed(**facts: object) -> object:
    def placement(_: object, __: Mapping[str, AnyArray]) -> Placement:
        return Placement(nodes={"CPU": 9}, precision=Precision.FP32, **facts)  # type: ignore[arg-type]

    return placement


class TestAttempts:
    def test_says_what_every_attempt_came_to(self, digits: Path, cache: ArtifactCache) -> None:
        steps = (
            SessionConfig(engine="nonesuch", device=CPU, threads=1, spin=False, reason="test"),
            SessionConfig(engine="onnxruntime", device=Device.gpu(7), threads=1, spin=False, reason="test"),
        )
        with pytest.raises(LoweringError) as caught:
            lower_version(digits / "1", LoweringPlan(candidates=steps[:1], fallback=steps[1:]), cache)
        first, second = caught.value.attempts
        assert "unknown engine 'nonesuch'" in first
        assert "gpu:7" in second


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
        first, second = lowered.fallbacks
        assert "unknown engine 'nonesuch'" in first
        assert "no product ran in bf16" in second

    def test_nothing_falls_back_by_itself(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OpenVinoSession, "placement", placed(products={"fp32": 5}))
        with pytest.raises(LoweringError, match="no product ran in bf16"):
            lower_version(digits / "1", plan(Settings(precision=Precision.BF16), cpu()), cache)


class TestAuto:
    @pytest.mark.parametrize(
        ("slow", "fast", "kind"), [(ORT, OV, OnnxRuntimeSession), (OV, ORT, OpenVinoSession)], ids=["ort", "openvino"]
    )
    def test_the_fastest_candidate_serves(  # noqa: PLR0917 - fixtures and parameters
        self,
        digits: Path,
        cache: ArtifactCache,
        monkeypatch: pytest.MonkeyPatch,
        slow: SessionConfig,
        fast: SessionConfig,
        kind: type,
    ) -> None:
        monkeypatch.setattr(
            "graphkiln_backend.lowering.measurement._time_s",
            lambda session, *_: 2.0 if isinstance(session, kind) else 1.0,
        )
        lowered = lower_version(digits / "1", LoweringPlan(candidates=(slow, fast)), cache)
        lowered.session.close()
        assert lowered.config.engine == fast.engine
        assert lowered.slower == (f"{slow}: not clearly faster, 0.5/s at batch 1 beside 1.0/s",)
        assert "the fastest here, 1.0/s" in lowered.config.reason

    def test_a_graph_that_cannot_be_timed_is_served_by_the_first(self, tmp_path: Path, cache: ArtifactCache) -> None:
        lowered = lower_version(add_unrunnable(tmp_path), LoweringPlan(candidates=(ORT, OV)), cache)
        lowered.session.close()
        assert (lowered.config, lowered.slower) == (ORT, ())
        assert not [stored for stored in cache.entries() if stored.entry.kind == "choice"]

    def test_a_failed_candidate_is_tried_again_at_the_next_start(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise LoweringError("no memory", attempts=())

        both = LoweringPlan(candidates=(ORT, OV))
        with monkeypatch.context() as patch:
            patch.setattr(OpenVinoEngine, "build", fail)
            lowered = lower_version(digits / "1", both, cache)
            lowered.session.close()
        assert lowered.fallbacks == ("openvino on cpu: no memory",)
        assert not [stored for stored in cache.entries() if stored.entry.kind == "choice"]
        lower_version(digits / "1", both, cache).session.close()
        assert [stored for stored in cache.entries() if stored.entry.kind == "choice"]

    def test_a_remembered_choice_that_no_longer_works_gives_way(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise LoweringError("gone", attempts=())

        both = LoweringPlan(candidates=(ORT, OV))
        first = lower_version(digits / "1", both, cache)
        first.session.close()
        engines = {"onnxruntime": OnnxRuntimeEngine, "openvino": OpenVinoEngine}
        monkeypatch.setattr(engines.pop(first.config.engine), "build", fail)
        second = lower_version(digits / "1", both, cache)
        second.session.close()
        assert [second.config.engine] == list(engines)
        assert second.fallbacks[0].endswith("gone")

    def test_it_is_measured_once_and_remembered(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        both = LoweringPlan(candidates=(ORT, OV))
        first = lower_version(digits / "1", both, cache)
        first.session.close()

        def unexpected(*_: object) -> float:
            raise AssertionError("measured again")

        monkeypatch.setattr("graphkiln_backend.lowering.measurement._time_s", unexpected)
        second = lower_version(digits / "1", both, cache)
        second.session.close()
        assert (second.config, second.slower) == (first.config, first.slower)

    def test_where_no_candidate_works_each_says_why(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise LoweringError("refused", attempts=())

        monkeypatch.setattr(OpenVinoEngine, "build", fail)
        monkeypatch.setattr(OnnxRuntimeEngine, "build", fail)
        with pytest.raises(LoweringError) as caught:
            lower_version(digits / "1", LoweringPlan(candidates=(OV, ORT)), cache)
        assert caught.value.attempts == ("openvino on cpu: refused", "onnxruntime on cpu: refused")

    def test_a_candidate_that_fails_is_no_candidate(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise LoweringError("refused", attempts=())

        monkeypatch.setattr(OpenVinoEngine, "build", fail)
        lowered = lower_version(digits / "1", LoweringPlan(candidates=(OV, ORT)), cache)
        lowered.session.close()
        assert lowered.config.engine == "onnxruntime"
        assert lowered.fallbacks == ("openvino on cpu: refused",)


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
