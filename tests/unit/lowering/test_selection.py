"""Precision at load, execution proof, self-test and fallback, on real sessions of the committed example."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import zoo
from lowered import cpu, lower_version
from onnx import helper

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Placement, SessionConfig, SessionTuning
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine, OnnxRuntimeSession
from graphkiln_backend.engines.openvino import OpenVinoEngine, OpenVinoSession
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.plan import LoweringPlan, plan
from graphkiln_backend.lowering.settings import Choice, Settings
from graphkiln_backend.repository.onnx_file import read_precision

ORT = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")
OV = replace(ORT, engine="openvino")
BF16 = replace(OV, precision=Precision.BF16)


def has_bf16() -> bool:
    facts = Path("/proc/cpuinfo").read_text()
    return "avx512_bf16" in facts or "amx_bf16" in facts


bf16_only = pytest.mark.skipif(not has_bf16(), reason="this CPU does not compute in bf16")


def placed(**facts: object) -> object:
    def placement(_: object, __: Mapping[str, AnyArray]) -> Placement:
        return Placement(nodes={"CPU": 9}, precision=Precision.FP32, **facts)  # type: ignore[arg-type]

    return placement


def unrunnable(store: Path) -> Path:
    """A version whose graph does not run on one zero."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    inputs, outputs = [zoo.value("x", ("n",))], [zoo.value("y", (3, "m"))]
    return zoo.add(store, "unrunnable", zoo.model(nodes, inputs, outputs, {"shape": np.array([3, -1], np.int64)}))


class TestPrecisionAtLoad:
    @bf16_only
    def test_bf16_is_computed_in_bf16_and_proven(self, digits: Path, cache: ArtifactCache) -> None:
        lowered = lower_version(digits / "1", BF16, cache, warm_sizes=(1, 8))
        with lowered.session:
            assert lowered.placement
            assert lowered.placement.products == {"bf16": 5}
            assert lowered.self_test
            assert lowered.self_test.batch_sizes == (1, 8)
            assert 1e-5 < lowered.self_test.relative_l2 < lowered.self_test.relative_l2_limit == 0.1

    @pytest.mark.skipif(has_bf16(), reason="this CPU computes in bf16")
    def test_a_cpu_without_bf16_is_a_load_error(self, digits: Path, cache: ArtifactCache) -> None:
        with pytest.raises(LoweringError, match="no product ran in bf16"):
            lower_version(digits / "1", BF16, cache)

    def test_the_lowered_graph_is_made_once_and_keeps_its_signature(
        self, digits: Path, cache: ArtifactCache, logged: list[str]
    ) -> None:
        for _ in range(2):
            try:
                lower_version(digits / "1", BF16, cache).session.close()
            except LoweringError:
                assert not has_bf16()
        assert sorted(logged) == ["compiling for openvino on cpu in bf16", "lowering the graph to bf16"]
        (graph,) = (cache.folder / "entries").glob("graph-*/bf16-model.onnx")
        assert read_precision(graph) == "bf16"
        inputs = onnx.load(graph).graph.input
        assert [value.type.tensor_type.elem_type for value in inputs] == [onnx.TensorProto.FLOAT]

    def test_a_graph_that_the_passes_cannot_lower_says_so(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise ConversionError("the pass 'lower-precision' failed")

        monkeypatch.setattr("graphkiln_backend.passes.base.run_passes", fail)
        with pytest.raises(LoweringError, match="the pass 'lower-precision' failed"):
            lower_version(digits / "1", BF16, cache)


class TestExecutionProof:
    """Sessions that say they ran something else than was asked for must not serve."""

    def test_no_product_in_the_precision(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OpenVinoSession, "placement", placed(products={"fp32": 5}))
        with pytest.raises(LoweringError, match="no product ran in bf16; 9 nodes on CPU; products: 5 in fp32"):
            lower_version(digits / "1", BF16, cache)

    def test_fp16_on_a_cpu_recommends_bf16(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OpenVinoSession, "placement", placed(products={"fp32": 5}))
        with pytest.raises(LoweringError, match="a CPU computes fp16 in fp32; bf16 is the precision that pays"):
            lower_version(digits / "1", replace(OV, precision=Precision.FP16), cache)

    def test_products_that_fell_back_to_another_device(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(OnnxRuntimeSession, "placement", placed(products={"fp32": 5}, elsewhere=("conv1",)))
        with pytest.raises(LoweringError, match=r"1 products ran elsewhere.*the first: conv1"):
            lower_version(digits / "1", ORT, cache)

    def test_what_cannot_be_read_back_is_not_believed(self, tmp_path: Path, cache: ArtifactCache) -> None:
        folder = unrunnable(tmp_path)
        assert lower_version(folder, ORT, cache).placement is None
        with pytest.raises(LoweringError, match=r"cannot be read back.*graphkiln convert"):
            lower_version(folder, replace(ORT, precision=Precision.FP32), cache)

    def test_counts_are_read_from_both_runtimes(self, digits: Path, cache: ArtifactCache) -> None:
        for step in (ORT, OV):
            lowered = lower_version(digits / "1", replace(step, precision=Precision.FP32), cache)
            lowered.session.close()
            assert lowered.placement
            assert lowered.placement.products == {"fp32": 5}
            assert not lowered.placement.elsewhere


class TestSelfTest:
    def test_a_session_that_fails_in_large_batches_only_is_caught(
        self, digits: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = OnnxRuntimeSession.run

        def wrong(self: OnnxRuntimeSession, feeds: Mapping[str, AnyArray], outputs: None = None) -> dict[str, AnyArray]:
            answers = run(self, feeds, outputs)
            return {name: array * (1.01 if len(array) == 8 else 1) for name, array in answers.items()}

        monkeypatch.setattr(OnnxRuntimeSession, "run", wrong)
        lower_version(digits / "1", ORT, cache, warm_sizes=(1, 4)).session.close()
        with pytest.raises(LoweringError, match="the outputs changed"):
            lower_version(digits / "1", ORT, cache, warm_sizes=(1, 8))
        lowered = lower_version(digits / "1", ORT, cache, warm_sizes=(1, 8), self_test=False)
        lowered.session.close()
        assert lowered.self_test is None
        assert lowered.notes == ("self_test: off: the golden samples were not replayed",)


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
        lowered = lower_version(unrunnable(tmp_path), LoweringPlan(candidates=(ORT, OV)), cache)
        lowered.session.close()
        assert (lowered.config, lowered.slower) == (ORT, ())
        assert not [each for each in cache.entries() if each.entry.kind == "choice"]

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
        assert not [each for each in cache.entries() if each.entry.kind == "choice"]
        lower_version(digits / "1", both, cache).session.close()
        assert [each for each in cache.entries() if each.entry.kind == "choice"]

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


class TestCompiled:
    @pytest.mark.parametrize("step", [ORT, OV], ids=["onnxruntime", "openvino"])
    def test_the_second_load_builds_nothing_and_answers_alike(
        self, digits: Path, cache: ArtifactCache, step: SessionConfig, logged: list[str]
    ) -> None:
        feeds = {"INPUT_0": np.random.default_rng(1).normal(size=(3, 1, 32, 32)).astype(np.float32)}
        answers = []
        for _ in range(2):
            lowered = lower_version(digits / "1", step, cache)
            with lowered.session as session:
                answers.append(session.run(feeds)["OUTPUT_0"])
        assert logged == [f"compiling for {step}"]
        np.testing.assert_array_equal(answers[0], answers[1])

    def test_weights_in_a_folder_below_are_part_of_the_key(self, tmp_path: Path, cache: ArtifactCache) -> None:
        weights = {"w": np.ones((4, 4), np.float32)}
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
        graph = zoo.model(nodes, [zoo.value("x", ("n", 4))], [zoo.value("y", ("n", 4))], weights)
        folder = zoo.add(tmp_path, "m", graph)
        (folder / "below").mkdir()
        onnx.save(graph, folder / "model.onnx", save_as_external_data=True, location="below/w.bin", size_threshold=0)
        for factor in (1, 2):
            (folder / "below" / "w.bin").write_bytes((weights["w"] * factor).tobytes())
            with lower_version(folder, ORT, cache).session as session:
                assert session.run({"x": np.ones((1, 4), np.float32)})["y"][0, 0] == 4 * factor

    def test_a_file_that_is_replaced_while_it_is_compiled_is_not_kept(
        self, digits: Path, tmp_path: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "1"
        folder.mkdir()
        graph = Path(shutil.copy(digits / "1" / "model.onnx", folder))
        compile_ = OnnxRuntimeEngine.compile

        def slow(self: OnnxRuntimeEngine, path: Path, step: SessionConfig, target: Path) -> None:
            compile_(self, path, step, target)
            graph.write_bytes(graph.read_bytes() + b"")

        monkeypatch.setattr(OnnxRuntimeEngine, "compile", slow)
        with pytest.raises(LoweringError, match="was replaced while it was lowered"):
            lower_version(folder, ORT, cache)
        assert not cache.entries()

    def test_session_entries_are_part_of_the_key(self, digits: Path, cache: ArtifactCache, logged: list[str]) -> None:
        for entries in ({}, {"session.disable_quant_qdq": "1"}):
            step = replace(ORT, tuning=SessionTuning(config_entries=entries))
            lower_version(digits / "1", step, cache).session.close()
        assert len(logged) == 2

    @pytest.mark.parametrize(
        ("fact", "value"),
        [
            ("graphkiln_backend.engines.hardware.identity", lambda _: "another processor"),
            ("openvino.__version__", "1.0"),
        ],
        ids=["device", "version"],
    )
    def test_another_device_or_version_has_other_artifacts(
        self,
        digits: Path,
        cache: ArtifactCache,
        monkeypatch: pytest.MonkeyPatch,
        *,
        fact: str,
        value: object,
        logged: list[str],
    ) -> None:
        lower_version(digits / "1", OV, cache).session.close()
        monkeypatch.setattr(fact, value)
        lower_version(digits / "1", OV, cache).session.close()
        assert len(logged) == 2

    def test_other_options_are_other_artifacts(self, digits: Path, cache: ArtifactCache, logged: list[str]) -> None:
        for step in (OV, replace(OV, threads=2), replace(OV, streams=2)):
            lower_version(digits / "1", step, cache).session.close()
        assert len(logged) == 3

    def test_a_cache_that_vanishes_keeps_nothing_compiled(
        self, digits: Path, tmp_path: Path, logged: list[str]
    ) -> None:
        with ArtifactCache(tmp_path / "c", lasting=False) as cache:
            lower_version(digits / "1", OV, cache).session.close()
        assert logged == []


TOY = """
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine

class ToyEngine(OnnxRuntimeEngine):
    def identity(self, step):
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
