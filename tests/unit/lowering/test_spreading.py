"""Spread models: plan with all settings, refusals, proof, planted faults and replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import split_graphs
import zoo
from graphs import draw
from lowered import cpu

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.registry import open_reference
from graphkiln_backend.graph.device import CPU, Parallelism, Place
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError, VerificationError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.graph_costs import NODE_TIMES_FILE, NodeTimes
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Replay, Requirements
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.deployment import Deployment, select_session
from graphkiln_backend.lowering.parallel import spreading
from graphkiln_backend.lowering.parallel.building import HostTransport, PipelineSession
from graphkiln_backend.lowering.parallel.parts import count_costs
from graphkiln_backend.lowering.parallel.speed import graph_digest
from graphkiln_backend.lowering.parallel.spreading import Spread, spread_model
from graphkiln_backend.lowering.plan import Resources, plan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.repository.model_config import InstanceGroup, ModelConfig
from graphkiln_backend.repository.version import ModelVersion, read_version

BATCH = 6
GRAPHS: dict[str, tuple[Callable[[], onnx_ir.Model], tuple[int, ...]]] = {
    "convolutions": (split_graphs.convolutions, (3, 16, 16)),
    "attention": (split_graphs.attention, (5, 24)),
}


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an existing core four times."""
    core = spreading.usable_core_numbers()[0]
    monkeypatch.setattr(spreading, "usable_core_numbers", lambda: (core,) * 4)


def version_of(folder: Path, name: str, *, golden: bool = True) -> ModelVersion:
    """A version whose golden samples are what the reference computes."""
    make, shape = GRAPHS[name]
    path = split_graphs.save(make(), folder / "store" / name / "1")
    found = read_version(path.parent)
    if not golden:
        return found
    x = draw(3, *shape, seed=5)
    with open_reference(path) as reference:
        y = np.concatenate([reference.run({"x": x[row : row + 1]})["y"] for row in range(3)])
    return replace(found, golden=GoldenSamples(inputs={"x": x}, source_outputs={"y": y}, graph_outputs={"y": y}))


def spread(settings: Settings, version: ModelVersion, resources: Resources | None = None) -> Spread:
    assert settings.parallel
    return spread_model(
        settings.parallel, settings, version, resources or cpu(4), saved=Precision.FP32, largest_batch=BATCH
    )


def build(version: ModelVersion, numbers: Parallelism, cache: ArtifactCache) -> ProvenSession:
    settings, resources = spread(Settings(parallel=numbers), version).apply(Settings(parallel=numbers), cpu(4))
    artifacts = Artifacts(version, Precision.FP32, cache)
    return select_session(
        artifacts, plan(settings, resources, largest_batch=BATCH), Requirements(batch_sizes=(1, BATCH))
    )


class TestReading:
    def test_whole_graphs_on_separate_cores(self, tmp_path: Path) -> None:
        version = replace(version_of(tmp_path, "attention"), graph_path=tmp_path / "nowhere")
        settings = Settings(parallel=Parallelism(data=2))
        found = spread(settings, version, replace(cpu(4, instances=2), instance=1))
        assert len(found.places) == 1
        assert len(found.places[0].cores) == 2
        assert found.explain().startswith("parallel: data=2, pipeline=1, tensor=1: the whole graph on core")
        applied, resources = found.apply(settings, cpu(4, instances=2))
        (config,) = plan(applied, resources).configs
        assert (config.threads, config.spin, config.splits) == (2, True, False)

    def test_plan_with_stages(self, tmp_path: Path) -> None:
        version_of(tmp_path, "attention")
        config = ModelConfig(name="attention", max_batch_size=8, parameters={"parallel": "pipeline=2, tensor=2"})
        deployment = Deployment.read(tmp_path / "store" / "attention" / "1", config, cpu(4))
        (chosen,) = deployment.plan.configs
        assert chosen.splits
        assert str(chosen) == "onnxruntime on cpu with pipeline=2, tensor=2, micro_batches=1"
        assert (len(chosen.places), len(chosen.cuts), chosen.threads) == (4, 1, 1)
        assert "stage 1 on core" in deployment.plan.explain()
        assert deployment.places == chosen.places

    def test_instances_that_share_stages(self, tmp_path: Path) -> None:
        version_of(tmp_path, "attention")
        config = ModelConfig(
            name="attention",
            max_batch_size=8,
            parameters={"parallel": "data=1, pipeline=2"},
            instance_groups=(InstanceGroup(count=2, device=CPU),),
        )
        folder, both = tmp_path / "store" / "attention" / "1", []
        for instance in range(2):
            resources = replace(cpu(4), instance=instance, shared_folder=tmp_path)
            both.append(Deployment.read(folder, config, resources).plan.configs[0])
        assert [config.spin for config in both] == [False, False]
        assert both[0].places == both[1].places
        assert both[0].shared_folder is not None
        assert "2 instances share these devices" in Deployment.read(folder, config, cpu(4)).plan.explain()

    def test_samples_give_dynamic_sizes(self, tmp_path: Path) -> None:
        path = split_graphs.save(split_graphs.decoder(), tmp_path / "1")
        version = ModelVersion(graph_path=path, manifest=None, golden=None)
        settings = Settings(parallel=Parallelism(pipeline=2))
        unknown = spread(settings, version)
        assert "dynamic sizes (tokens) count as 1" in unknown.explain()
        x = draw(3, 64, 24)
        golden = GoldenSamples(inputs={"x": x}, source_outputs={"y": x}, graph_outputs={"y": x})
        known = spread(settings, replace(version, golden=golden))
        assert "sizes that vary" not in known.explain()
        assert known.stages[0].activation_bytes > 30 * unknown.stages[0].activation_bytes

    @pytest.mark.parametrize("own", [True, False])
    def test_warning_about_a_cpu_quota(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, own: bool) -> None:
        monkeypatch.setattr(spreading, "has_own_cores", lambda: own)
        for numbers in (Parallelism(), Parallelism(pipeline=2)):
            found = spread(Settings(parallel=numbers), version_of(tmp_path / str(numbers), "attention"))
            assert ("limited by a CPU quota" in found.explain().splitlines()[-1]) != own

    @pytest.mark.parametrize(("pipeline", "warned"), [(2, False), (3, True), (4, False)])
    def test_warning_about_unequal_groups(self, tmp_path: Path, pipeline: int, *, warned: bool) -> None:
        found = spread(Settings(parallel=Parallelism(pipeline=pipeline)), version_of(tmp_path, "attention"))
        assert ("groups of 1 and of 2 cores were planned as equal" in found.explain()) == warned

    def test_weights_are_shared_within_a_numa_node(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spreading, "numa_nodes", lambda: {0: 0, 1: 0, 2: 1, 3: 1})
        resources = replace(cpu(4, instances=2), shared_folder=tmp_path)
        for cores, folder in (((0, 1), "node0"), ((2, 3), "node1"), ((1, 2), "")):
            found = Spread(numbers=Parallelism(data=2), places=(Place(CPU, cores),))
            assert found.apply(Settings(), resources)[1].shared_folder == tmp_path / folder
            assert (tmp_path / folder).is_dir()


def keep(version: ModelVersion, seconds: dict[str, float], graph: str = "") -> None:
    times = NodeTimes(
        graph=graph or graph_digest(version), runtime="onnxruntime 1", machine="a core", batches={"1": seconds}
    )
    (version.graph_path.parent / NODE_TIMES_FILE).write_text(times.text())


class TestMeasuredTimes:
    def test_measured_times_decide_the_cut(self, tmp_path: Path) -> None:
        version, settings = version_of(tmp_path, "attention"), Settings(parallel=Parallelism(pipeline=2))
        counted = spread(settings, version)
        nodes = count_costs(version.graph_path, 1).nodes
        first, second = [number for number, node in enumerate(nodes) if node.op_type == "MatMul"][:2]
        keep(version, {node.name: 1.0 if number in {first, second} else 1e-6 for number, node in enumerate(nodes)})
        measured = spread(settings, version)
        assert "costs: measured by onnxruntime 1 on a core for batches of 1" in measured.explain()
        assert first < measured.cuts[0] <= second < counted.cuts[0]

    @pytest.mark.parametrize("auto", [True, False])
    def test_times_of_another_graph_are_refused(self, tmp_path: Path, *, auto: bool) -> None:
        version = version_of(tmp_path, "attention")
        keep(version, {"n": 1.0}, graph="another")
        numbers = Parallelism(auto=True, memory_bytes=1 << 30) if auto else Parallelism(pipeline=2)
        with pytest.raises(LoweringError, match="it was measured of another graph"):
            spread(Settings(parallel=numbers), version)


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"streams": 2}, "streams=2"),
            ({"precision": Precision.BF16}, "saved in fp32, and a split graph runs as saved, not in bf16"),
            (
                {"tuning": replace(Settings().tuning, config_entries={"session.intra_op_thread_affinities": "1"})},
                "pins the same threads",
            ),
            ({"parallel": Parallelism(tensor=3)}, "no product"),
        ],
    )
    def test_contradictions(self, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
        version = version_of(tmp_path, "convolutions")
        with pytest.raises(LoweringError, match=words):
            spread(Settings(**{"parallel": Parallelism(pipeline=2), **settings}), version)

    def test_bf16_graph_on_cpu(self, tmp_path: Path) -> None:
        version, numbers = version_of(tmp_path, "attention"), Parallelism(pipeline=2)
        settings = Settings(parallel=numbers)
        with pytest.raises(LoweringError, match=r"saved in bf16, which only OpenVINO.*leave `parallel` out"):
            spread_model(numbers, settings, version, cpu(4), saved=Precision.BF16, largest_batch=BATCH)

    @pytest.mark.parametrize("engine", ["openvino", "tensorrt"])
    def test_unsuitable_engines(self, tmp_path: Path, engine: str) -> None:
        settings = Settings(engine=engine, parallel=Parallelism(pipeline=2))
        applied, resources = spread(settings, version_of(tmp_path, "attention")).apply(settings, cpu(4))
        with pytest.raises(LoweringError, match=r"parallel: .* engine: onnxruntime"):
            plan(applied, resources)

    def test_outputs_that_are_no_tensors(self, tmp_path: Path) -> None:
        folder = zoo.add(tmp_path, "zipped", zoo.zipped())
        with pytest.raises(LoweringError, match="the graph cannot be split"):
            spread(Settings(parallel=Parallelism(pipeline=2, micro_batches=1)), read_version(folder))


SPLITS = [
    ("convolutions", Parallelism(pipeline=2, micro_batches=3)),
    ("attention", Parallelism(tensor=2)),
    ("attention", Parallelism(pipeline=2, tensor=2, micro_batches=2)),
    ("attention", Parallelism(auto=True, memory_bytes=20_000)),
]


class TestProof:
    @pytest.mark.parametrize(("name", "numbers"), SPLITS)
    def test_split_model_serves(self, tmp_path: Path, cache: ArtifactCache, name: str, numbers: Parallelism) -> None:
        version = version_of(tmp_path, name)
        proven = build(version, numbers, cache)
        assert version.golden
        with proven.session as session:
            assert proven.self_test
            assert proven.self_test.verdict.endswith("PASS")
            assert proven.self_test.relative_l2 < 1e-5
            found = session.run(version.golden.inputs)["y"]
        np.testing.assert_allclose(found, version.golden.graph_outputs["y"], rtol=1e-4, atol=1e-5)

    def test_without_golden_samples_the_whole_graph_is_the_reference(
        self, tmp_path: Path, cache: ArtifactCache
    ) -> None:
        proven = build(version_of(tmp_path, "attention", golden=False), Parallelism(pipeline=2), cache)
        proven.session.close()
        assert proven.synthetic is not None


def swap(session: PipelineSession) -> None:
    """Micro-batches come out in another order."""
    cut = session._cut
    session._cut = lambda feeds: list(reversed(cut(feeds)))  # type: ignore[method-assign]


def keep_stale(session: PipelineSession) -> None:
    """The second stage reads what the first one computed for the micro-batch before."""
    compute, kept = session._compute, dict[str, AnyArray]()

    def stale(number: int, tensors: Any) -> dict[str, AnyArray]:
        if number == 1:
            found = compute(number, {**tensors, **{n: a for n, a in kept.items() if a.shape == tensors[n].shape}})
            kept.update(tensors)
            return found
        return compute(number, tensors)

    session._compute = stale  # type: ignore[method-assign]


def drop_last(_: object, partials: Sequence[AnyArray]) -> list[AnyArray]:
    return [partials[0].copy()] * len(partials)


def count_twice(_: object, partials: Sequence[AnyArray]) -> list[AnyArray]:
    return [partials[0] + partials[-1] + partials[-1]] * len(partials)


class TestPlantedFaults:
    @pytest.mark.parametrize("fault", [swap, keep_stale])
    def test_faults_of_a_pipeline(
        self, tmp_path: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], None]
    ) -> None:
        original = PipelineSession.__init__

        def broken(self: PipelineSession, *arguments: Any) -> None:
            original(self, *arguments)
            fault(self)

        monkeypatch.setattr(PipelineSession, "__init__", broken)
        with pytest.raises(LoweringError, match="the outputs changed"):
            build(version_of(tmp_path, "convolutions"), Parallelism(pipeline=2, micro_batches=2), cache)

    @pytest.mark.parametrize("fault", [drop_last, count_twice])
    def test_faults_of_shards(
        self, tmp_path: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., AnyArray]
    ) -> None:
        monkeypatch.setattr(HostTransport, "add", fault)
        with pytest.raises(LoweringError, match="the outputs changed"):
            build(version_of(tmp_path, "attention"), Parallelism(tensor=2), cache)


def judged(replay: Replay) -> Verification:
    (outputs,) = replay.output_subsets
    return replay.judge([replay.run(number, outputs) for number in range(len(replay.samples))])


class TestReplays:
    @pytest.mark.parametrize("golden", [True, False])
    @pytest.mark.parametrize("fault", [swap, keep_stale])
    def test_faults_while_serving(
        self, tmp_path: Path, cache: ArtifactCache, fault: Callable[[Any], None], *, golden: bool
    ) -> None:
        version = version_of(tmp_path, "convolutions", golden=golden)
        proven = build(version, Parallelism(pipeline=2, micro_batches=2), cache)
        with proven.session as session:
            replay = proven.replay
            assert replay
            assert len(replay.samples[-1]["x"]) == BATCH
            assert judged(replay)
            fault(session)
            with pytest.raises(VerificationError, match="the outputs changed"):
                judged(replay)
            if version.golden and fault is swap:  # single samples do not show it
                alone = replace(replay, samples=replay.samples[:-1], reference=version.golden.graph_outputs)
                assert judged(alone)

    def test_no_batch_for_stages_that_take_turns(self, tmp_path: Path, cache: ArtifactCache) -> None:
        proven = build(version_of(tmp_path, "convolutions"), Parallelism(pipeline=2, micro_batches=1), cache)
        proven.session.close()
        assert proven.replay
        assert {len(feeds["x"]) for feeds in proven.replay.samples} == {1}
