"""Model class that Triton loads, with a fake Triton and a fake session."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fake_triton
import numpy as np
import pytest
import zoo
from fake_session import FakeSession, spec
from fake_triton import InferenceRequest, Logger, TritonError, TritonModelException, metric
from recorded import rows
from statuses import instance_status, read_counters, read_statuses
from waiting import wait_until

from graphkiln_backend.engines.base import Placement, SessionConfig
from graphkiln_backend.graph.device import CPU, Device, Place
from graphkiln_backend.graph.errors import ExecutionError, LoweringError, RepositoryError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.acceptance import Replay
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.settings import parse_override
from graphkiln_backend.proof.policy import REPLAY
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_backend.triton import instance as module
from graphkiln_backend.triton import metrics, replayer
from graphkiln_backend.triton.environment import (
    OVERRIDES_VARIABLE,
    RECORD_VARIABLE,
    REPLAY_INTERVAL_VARIABLE,
    RUN_FOLDER_VARIABLE,
    instances_folder,
)
from graphkiln_backend.triton.executor import Executor
from graphkiln_backend.triton.instance import TritonPythonModel, instance_number
from graphkiln_backend.triton.instance_status import StatusFile
from graphkiln_backend.triton.metrics import read_metrics
from graphkiln_backend.triton.ragged import RaggedExecutor
from graphkiln_backend.triton.sequences import SequenceExecutor
from graphkiln_backend.triton.snapshot import read_snapshot

ARGS = {
    "model_config": json.dumps({"name": "m", "backend": "graphkiln", "max_batch_size": 8}),
    "model_name": "m",
    "model_version": "3",
    "model_repository": "/nowhere/m",
    "model_instance_name": "m_0",
    "model_instance_kind": "CPU",
    "model_instance_device_id": "0",
}


GOLDEN = GoldenSamples(
    inputs={"x": np.ones((2, 2), np.float32)},
    source_outputs={},
    graph_outputs={"y": np.full((2, 2), 2, np.float32)},
)


class FakeDeployment:
    """Build a session that multiplies by `factor`, or raise `error`."""

    def __init__(self) -> None:
        self.factor = 2
        signature = Signature(inputs=(spec("x", "batch", 2),), outputs=(spec("y", "batch", 2),))
        self.session = FakeSession(signature, lambda feeds: {"y": feeds["x"] * np.float32(self.factor)})
        self.error: Exception | None = None
        self.read_with: tuple[Any, ...] = ()
        self.placement: Placement | None = Placement(
            nodes={"CPUExecutionProvider": 4}, precision=Precision.FP32, products={Precision.FP32: 2}
        )
        self.version = ModelVersion(graph_path=Path(__file__), manifest=None, golden=None)  # any file
        self.places: tuple[Place, ...] = ()
        self.settings = SimpleNamespace(seat="auto")
        self.plan = SimpleNamespace(explain=lambda: "candidates:\n  onnxruntime on cpu")

    def read(self, *arguments: Any) -> FakeDeployment:
        self.read_with = arguments
        return self

    def build(self, _: object) -> ProvenSession:
        if self.error:
            raise self.error
        return ProvenSession(
            session=self.session,
            config=SessionConfig(engine="onnxruntime", device=CPU, threads=2, spin=False, reason="only one"),
            placement=self.placement,
            self_test=None,
            failures=("openvino failed",),
            phases={"session": 0.5, "warm-up": 0.25},
            notes=("warming up stopped early",),
            replay=Replay.of_golden(self.session, GOLDEN, REPLAY[Precision.FP32]),
        )


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = logging.getLogger("graphkiln")
    level, handlers = logger.level, logger.handlers
    yield
    logger.setLevel(level)
    logger.handlers = handlers


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDeployment:
    """A fake deployment, under a supervisor."""
    fake = FakeDeployment()
    monkeypatch.setattr(module, "Deployment", fake)
    monkeypatch.setattr(module, "convert_if_needed", lambda version, _: version)
    monkeypatch.setenv("GRAPHKILN_CACHE_FOLDER", str(tmp_path / "cache"))
    (tmp_path / "instances").mkdir()
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path / "instances"))
    return fake


@pytest.fixture
def model(deployment: FakeDeployment) -> Iterator[TritonPythonModel]:
    model = TritonPythonModel()
    model.initialize(ARGS)
    yield model
    if not deployment.session.closed:
        model.finalize()


def has_metrics() -> bool:
    """True once this process's instance has written its metrics."""
    folder = instances_folder()
    return folder is not None and bool(list(read_metrics(folder)))


@contextmanager
def started(**arguments: str) -> Iterator[TritonPythonModel]:
    model = TritonPythonModel()
    model.initialize({**ARGS, **arguments})
    yield model
    model.finalize()


def request(*rows: float) -> InferenceRequest:
    return InferenceRequest({"x": np.repeat(np.array(rows, np.float32)[:, None], 2, axis=1)})


class TestInitialize:
    def test_version_is_read_for_the_device_of_the_instance(self, deployment: FakeDeployment, model: object) -> None:
        folder, config, resources, overrides = deployment.read_with
        assert model
        assert folder == Path("/nowhere/m/3")
        assert config.max_batch_size == 8
        assert resources.device == CPU
        assert overrides == []

    def test_instance_is_pinned_to_its_cores(self, deployment: FakeDeployment, monkeypatch: pytest.MonkeyPatch) -> None:
        kept: list[Any] = []
        monkeypatch.setattr(module, "stay_on", lambda cores: kept.append(tuple(cores)))
        deployment.places = (Place(CPU, (1, 3)),)
        with started(model_instance_name="m_0_1"):
            assert kept == [(1, 3)]
        assert deployment.read_with[2].instance == 1

    def test_gpu_instance_uses_its_gpu(self, deployment: FakeDeployment) -> None:
        with started(model_instance_kind="GPU", model_instance_device_id="2"):
            assert deployment.read_with[2].device == Device.gpu(2)

    def test_settings_of_the_command_line_are_applied(
        self, deployment: FakeDeployment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        override = parse_override("precision=bf16")
        monkeypatch.setenv(OVERRIDES_VARIABLE, json.dumps({"m": [list(override)], "other": [list(override)] * 2}))
        with started():
            assert deployment.read_with[3] == [override]

    def test_failed_load_raises_with_the_cause(self, deployment: FakeDeployment, tmp_path: Path) -> None:
        deployment.error = LoweringError("no session works", attempts=("onnxruntime: no",), hint="try another")
        with pytest.raises(TritonModelException, match=r"^m: no session works; onnxruntime: no \(try another\)$"):
            TritonPythonModel().initialize(ARGS)
        assert list((tmp_path / "instances").iterdir()) == []

    def test_invalid_configuration_raises(self, deployment: FakeDeployment) -> None:
        config = json.dumps({"name": "m", "max_batch_size": "many"})
        with pytest.raises(TritonModelException, match=r"^m: "):
            TritonPythonModel().initialize({**ARGS, "model_config": config})
        assert not deployment.read_with

    def test_status_of_a_ready_instance(self, model: object, tmp_path: Path) -> None:
        assert model
        (status,) = read_statuses(tmp_path / "instances")
        assert (status.model, status.version, status.engine, status.device) == ("m", 3, "onnxruntime", "cpu")
        assert (status.precision, status.nodes, status.products) == ("fp32", {"CPUExecutionProvider": 4}, {"fp32": 2})
        assert (status.threads, status.warmup_ms, status.fallbacks) == (2, 250.0, 1)
        assert list(status.phases_ms) == ["stub start", "read", "session", "warm-up"]
        assert (status.phases_ms["session"], status.phases_ms["stub start"] > 0) == (500.0, True)
        assert (status.self_test, status.self_test_error) == ("", -1.0)
        wait_until(has_metrics)
        assert metric("graphkiln_instance_info", engine="onnxruntime", instance="m_0") == 1

    def test_unreadable_placement_is_unknown(self, deployment: FakeDeployment, tmp_path: Path) -> None:
        deployment.placement = None
        with started():
            (status,) = read_statuses(tmp_path / "instances")
        assert (status.precision, status.nodes, status.products) == ("unknown", {}, {})

    @pytest.mark.usefixtures("model")
    def test_plan_and_fallbacks_are_logged(self) -> None:
        lines = [line for level, line in Logger.lines if level == "info"]
        assert "graphkiln: m: candidates:" in lines
        assert any("runs: onnxruntime on cpu: 4 nodes on CPUExecutionProvider" in line for line in lines)
        warnings = [line for level, line in Logger.lines if level == "warning"]
        assert warnings == ["graphkiln: m: openvino failed", "graphkiln: m: warming up stopped early"]

    def test_without_supervisor_no_status_is_published(
        self, deployment: FakeDeployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.delenv(RUN_FOLDER_VARIABLE)
        with started() as model:
            (response,) = model.execute([request(1)])
            np.testing.assert_array_equal(response.outputs["y"], [[2, 2]])
            assert list((tmp_path / "instances").iterdir()) == []
        assert deployment.session.closed

    def test_loading_is_published_until_ready(self, deployment: FakeDeployment, tmp_path: Path) -> None:
        seen: list[tuple[str, int]] = []
        build = deployment.build

        def watched(cache: object) -> ProvenSession:
            seen.extend(
                (loading.model, loading.version) for loading in read_snapshot(tmp_path / "instances").loading.values()
            )
            return build(cache)

        deployment.build = watched
        with started():
            assert seen == [("m", 3)]
            assert read_snapshot(tmp_path / "instances").loading == {}


@pytest.mark.usefixtures("deployment")
class TestExecutors:
    """The configuration decides the kind of executor."""

    SEQUENCE: ClassVar = {"state": [{"input_name": "x", "output_name": "y", "data_type": "TYPE_FP32", "dims": ["2"]}]}
    RAGGED: ClassVar = [{"name": "x", "dims": ["-1"], "allow_ragged_batch": True}]

    def served(self, **fields: object) -> TritonPythonModel:
        with started(model_config=json.dumps({**json.loads(ARGS["model_config"]), **fields})) as model:
            return model

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [({}, Executor), ({"sequence_batching": SEQUENCE}, SequenceExecutor), ({"input": RAGGED}, Executor)],
    )
    def test_executor_of_rows_and_sequences(self, fields: dict[str, object], expected: type) -> None:
        assert type(self.served(**fields)._executor) is expected

    def test_executor_of_ragged_batches(self, deployment: FakeDeployment) -> None:
        flat = spec("x", "total")
        deployment.session.signature = Signature(inputs=(flat,), outputs=(flat,))
        assert type(self.served(input=self.RAGGED)._executor) is RaggedExecutor

    def test_invalid_sequence_batching_raises(self) -> None:
        with pytest.raises(TritonModelException, match="state 'x' has no data_type"):
            self.served(sequence_batching={"state": [{"input_name": "x"}]})


class TestRecord:
    """`serve --record`."""

    @pytest.fixture(autouse=True)
    def _record(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, deployment: FakeDeployment) -> None:
        graph = tmp_path / "model.onnx"
        graph.write_bytes(b"graph")
        deployment.version = ModelVersion(graph_path=graph, manifest=None, golden=None)
        settings = {"folder": str(tmp_path / "record"), "share": 1.0}
        (tmp_path / "record").mkdir()
        monkeypatch.setenv(RECORD_VARIABLE, json.dumps(settings))

    def test_requests_are_recorded_until_the_end(self, tmp_path: Path) -> None:
        with started() as model:
            wait_until(has_metrics)
            assert metric("graphkiln_recorded_requests_total") == 0
            model.execute([request(1)])
            model.execute([request(2), request(3)])
        found = rows(tmp_path / "record", "m")
        assert [row.outputs["y"][0, 0] for row in found] == [2, 4, 6]
        assert {(row.model, row.version, row.engine, row.precision) for row in found} == {
            ("m", 3, "onnxruntime", "fp32")
        }
        assert found[0].graph_sha256 == hashlib.sha256(b"graph").hexdigest()

    def test_warm_up_of_triton_is_not_recorded(self, tmp_path: Path) -> None:
        warm_ups = [{"name": "a", "count": 2}, {"name": "b"}]
        with started(model_config=json.dumps({**json.loads(ARGS["model_config"]), "model_warmup": warm_ups})) as model:
            for number in range(4):
                model.execute([request(number)])
        assert [row.outputs["y"][0, 0] for row in rows(tmp_path / "record", "m")] == [6]

    def test_sequences_are_not_recorded(self, tmp_path: Path) -> None:
        TestExecutors().served(sequence_batching=TestExecutors.SEQUENCE)
        assert any("requests are not recorded" in line for _, line in Logger.lines)
        assert list((tmp_path / "record").iterdir()) == []


class TestExecute:
    def test_one_response_per_request_in_order(self, model: TritonPythonModel) -> None:
        bad = InferenceRequest({"x": np.zeros((1, 2), np.int8)})
        first, second, third = model.execute([request(1), bad, request(3)])
        np.testing.assert_array_equal(first.outputs["y"], [[2, 2]])
        assert second.error.code == TritonError.INVALID_ARG
        assert "wrong dtype of input 'x'" in second.error.message
        np.testing.assert_array_equal(third.outputs["y"], [[6, 6]])

    def test_batches_are_counted_during_execution(
        self, model: TritonPythonModel, deployment: FakeDeployment, tmp_path: Path
    ) -> None:
        seen: list[dict[str, tuple[int, int]]] = []
        run = deployment.session.run
        deployment.session.run = lambda *arguments: (
            seen.append(read_counters(tmp_path / "instances")),
            run(*arguments),
        )[1]
        model.execute([request(1)])
        model.execute([request(1), request(2)])
        assert [list(counters.values()) for counters in seen] == [[(1, 0)], [(2, 1)]]
        assert list(read_counters(tmp_path / "instances").values()) == [(2, 2)]

    def test_batch_sizes_are_published_until_the_end(
        self, model: TritonPythonModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metrics, "_WRITE_EVERY_S", 0.01)
        model.execute([request(1, 2)])
        model.execute([request(1), request(2, 3)])
        wait_until(lambda: has_metrics() and metric("graphkiln_batch_size_count") == 2)
        assert metric("graphkiln_batch_size_sum") == 5
        model.finalize()
        assert list(read_metrics(tmp_path / "instances")) == []


class TestReplay:
    @pytest.fixture(autouse=True)
    def _often(self, monkeypatch: pytest.MonkeyPatch, deployment: object) -> None:
        assert deployment
        monkeypatch.setenv(REPLAY_INTERVAL_VARIABLE, "0.01")
        monkeypatch.setattr(replayer, "_IDLE_S", 0.001)
        monkeypatch.setattr(metrics, "_WRITE_EVERY_S", 0.01)

    def test_passed_replays_are_counted(self, model: TritonPythonModel, tmp_path: Path) -> None:
        wait_until(lambda: has_metrics() and metric("graphkiln_self_test_replays_total") > 1)
        assert metric("graphkiln_self_test_failures_total") == 0
        assert metric("graphkiln_self_test_timestamp_seconds") > 1.7e9
        assert read_snapshot(tmp_path / "instances").faults == {}
        (response,) = model.execute([request(1)])
        np.testing.assert_array_equal(response.outputs["y"], [[2, 2]])

    def test_wrong_outputs_make_the_instance_refuse_requests(
        self, model: TritonPythonModel, deployment: FakeDeployment, tmp_path: Path
    ) -> None:
        deployment.factor = 3
        wait_until(lambda: has_metrics() and metric("graphkiln_self_test_failures_total") > 0)
        assert metric("graphkiln_self_test_failures_total") == 1
        (response,) = model.execute([request(1)])
        assert response.error.code == TritonError.UNAVAILABLE
        assert "y: relative L2" in response.error.message
        assert [answer.error.code for answer in model.execute([request(1), request(2)])] == [response.error.code] * 2
        (fault,) = read_snapshot(tmp_path / "instances").faults.values()
        assert "y: relative L2" in fault
        assert any("refuses all requests" in line and fault in line for _, line in Logger.lines)

    def test_lost_device_is_a_fault(
        self, model: TritonPythonModel, deployment: FakeDeployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replayer, "_RETRY_S", 0.001)

        def fail(*_: object) -> dict[str, np.ndarray]:
            raise ExecutionError("the device is lost")

        deployment.session.run = fail  # type: ignore[method-assign]
        (response,) = model.execute([request(1)])
        assert response.error.code in {TritonError.INTERNAL, TritonError.UNAVAILABLE}
        wait_until(lambda: bool(read_snapshot(tmp_path / "instances").faults))
        (fault,) = read_snapshot(tmp_path / "instances").faults.values()
        assert "the device is lost" in fault

    def test_instance_exits_if_a_fault_cannot_be_reported(
        self, model: TritonPythonModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError("no space left on device")

        codes: list[int] = []
        monkeypatch.setattr(module.StatusFile, "report_fault", fail)
        monkeypatch.setattr(module.os, "_exit", codes.append)
        model._refuse("the outputs changed")
        assert codes == [1]

    def test_without_supervisor_wrong_outputs_are_refused(
        self, deployment: FakeDeployment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(RUN_FOLDER_VARIABLE)
        deployment.factor = 3
        with started() as model:
            wait_until(lambda: model.execute([request(1)])[0].error is not None)
            (response,) = model.execute([request(1)])
        assert response.error.code == TritonError.UNAVAILABLE


def test_finalize_frees_everything(model: TritonPythonModel, deployment: FakeDeployment, tmp_path: Path) -> None:
    wait_until(has_metrics)
    assert {each.suffix for each in (tmp_path / "instances").iterdir()} >= {".json", ".counters", ".metrics"}
    model.finalize()
    assert deployment.session.closed
    assert list((tmp_path / "instances").iterdir()) == []


def test_records_are_written_before_a_rollout_ends(model: TritonPythonModel) -> None:
    closed: list[str] = []
    for part in ("_rollout", "_recorder"):
        setattr(model, part, SimpleNamespace(close=partial(closed.append, part)))
    model.finalize()
    assert closed == ["_recorder", "_rollout"]


class TestAutoComplete:
    class Config:
        """The part of Triton's configuration that is used."""

        def __init__(self, **document: Any) -> None:
            self.document = document

        def as_dict(self) -> dict[str, Any]:
            return self.document

    @pytest.fixture(autouse=True)
    def _of_digits(self, monkeypatch: pytest.MonkeyPatch, digits: Path, tmp_path: Path) -> None:
        monkeypatch.setattr(fake_triton, "model_dir", str(digits / "1"))
        monkeypatch.setenv("GRAPHKILN_CACHE_FOLDER", str(tmp_path / "cache"))

    def test_inputs_and_outputs_are_completed_from_the_graph(self) -> None:
        config = self.Config(name="digits", max_batch_size=8, input=[], output=[])
        assert TritonPythonModel.auto_complete_config(config) is config
        assert [tensor["name"] for tensor in config.document["input"]] == ["INPUT_0"]
        assert [int(dim) for dim in config.document["input"][0]["dims"]] == [1, 32, 32]

    def test_contradiction_with_the_graph_raises(self) -> None:
        wrong = [{"name": "nothing", "data_type": "TYPE_FP32", "dims": [1]}]
        config = self.Config(name="digits", max_batch_size=8, input=wrong, output=[])
        with pytest.raises(TritonModelException, match=r"^digits: .*nothing"):
            TritonPythonModel.auto_complete_config(config)

    def test_signature_unlike_a_serving_version_raises(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for version, columns in ((1, 3), (2, 4)):
            zoo.add(tmp_path, "m", zoo.scale(("batch", columns)), version=version)
        monkeypatch.setattr(fake_triton, "model_dir", str(tmp_path / "m" / "2"))
        monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path / "instances"))
        (tmp_path / "instances").mkdir()

        def complete(**policy: object) -> object:
            return TritonPythonModel.auto_complete_config(self.Config(name="m", version_policy=policy))

        assert complete(all={})
        with StatusFile(tmp_path / "instances", "m_0", instance_status(model="m", version=1)):
            assert complete(latest={"num_versions": 1})
            with pytest.raises(TritonModelException, match=r"^m: incompatible signature"):
                complete(all={})

    def test_missing_graph_raises(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "m" / "1").mkdir(parents=True)
        monkeypatch.setattr(fake_triton, "model_dir", str(tmp_path / "m" / "1"))
        with pytest.raises(TritonModelException, match=r"^m: ") as raised:
            TritonPythonModel.auto_complete_config(self.Config(name="m", max_batch_size=0, input=[], output=[]))
        assert isinstance(raised.value.__cause__, RepositoryError)


# Numbering of instances across groups.


@pytest.mark.parametrize(
    ("name", "groups", "number"),
    [
        ("digits_0_0", [("", 2)], 0),
        ("digits_0_1", [("", 2)], 1),
        ("digits_1_0", [("", 2), ("", 1)], 2),
        ("digits_1_0", [("digits_0", 2), ("digits_1", 1)], 2),
        ("own name_1", [("own name", 2)], 1),
        ("fast_0", [("slow", 3), ("fast", 2)], 3),
        ("fast_1", [("slow", 3), ("fast", 2)], 4),
        ("slow_2", [("slow", 3), ("fast", 2)], 2),
        ("digits_1_0", [("digits_1", 2), ("digits_0", 1)], 0),
        ("digits", [("", 1)], 0),
    ],
)
def test_instance_number(name: str, groups: list[tuple[str, int]], number: int) -> None:
    assert instance_number(name, "digits", groups) == number
