"""ONNX Runtime's sessions on the committed example."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import onnxruntime
import pytest
import zoo
from onnxruntime.capi.onnxruntime_pybind11_state import EPFail

from graphkiln_backend.engines.base import SessionConfig, SessionTuning
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine, OnnxRuntimeSession
from graphkiln_backend.engines.onnxruntime.loading import CPU as CPU_PROVIDER
from graphkiln_backend.engines.onnxruntime.loading import session_options
from graphkiln_backend.engines.onnxruntime.session import CudaGraphRunner
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError, LoweringError, SignatureError
from graphkiln_backend.system.closing import Closeable

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")


def build(tmp_path: Path, model: Any, config: SessionConfig = CONFIG) -> OnnxRuntimeSession:
    return OnnxRuntimeEngine().build(zoo.add(tmp_path, "m", model) / "model.onnx", config)


class TestOptions:
    def test_a_tuning_reaches_the_runtime(self) -> None:
        tuning = SessionTuning(
            graph_level="basic",
            parallel=True,
            inter_threads=3,
            memory_arena=False,
            memory_pattern=True,
            config_entries={"session.set_denormal_as_zero": "1"},
        )
        options = session_options(replace(CONFIG, threads=5, spin=True, tuning=tuning))
        assert options.intra_op_num_threads == 5
        assert options.inter_op_num_threads == 3
        assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
        assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        assert not options.enable_cpu_mem_arena
        assert options.enable_mem_pattern
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"
        assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"

    def test_an_arena_that_does_not_exist_is_an_error_of_ours(self, tmp_path: Path) -> None:
        config = replace(CONFIG, tuning=SessionTuning(arena_shrinkage="gpu:7"))
        with (
            build(tmp_path, zoo.scale(("batch", 3)), config) as session,
            pytest.raises((ExecutionError, SignatureError)),
        ):
            session.run({"x": np.ones((1, 3), np.float32)})


class TestRun:
    def test_text_that_is_none_is_a_signature_error(self, tmp_path: Path) -> None:
        with (
            build(tmp_path, zoo.identity(("batch", "n"), zoo.DTYPES["BYTES"])) as session,
            pytest.raises(SignatureError, match="cannot be read"),
        ):
            session.run({"x": np.array([[b"\xff"]], object)})

    def test_an_optional_input_has_the_graphs_default(self, tmp_path: Path) -> None:
        x = np.zeros(3, np.float32)
        with build(tmp_path, zoo.with_optional_bias()) as session:
            assert [spec.name for spec in session.signature.inputs] == ["x"]
            assert [spec.name for spec in session.signature.optional_inputs] == ["bias"]
            assert session.run({"x": x})["y"].tolist() == [100, 100, 100]
            assert session.run({"x": x, "bias": np.array([7], np.float32)})["y"].tolist() == [7, 7, 7]

    def test_a_failure_inside_the_graph_is_an_execution_error_and_the_session_goes_on(self, tmp_path: Path) -> None:
        with build(tmp_path, zoo.good_and_fragile()) as session:
            with pytest.raises((ExecutionError, SignatureError), match="out of"):
                session.run({"x": np.array([[0, 99]])})
            assert session.run({"x": np.array([[0, 2]])})["fragile"].tolist() == [[0, 2]]

    def test_missing_weights_are_a_lowering_error(self, tmp_path: Path) -> None:
        folder = zoo.add_external(tmp_path, "m")
        (folder / "weights.bin").unlink()
        with pytest.raises(LoweringError, match=r"weights\.bin"):
            OnnxRuntimeEngine().build(folder / "model.onnx", CONFIG)

    def test_a_provider_that_fails_on_a_request_is_not_replaced(self, tmp_path: Path) -> None:
        """ONNX Runtime by itself goes on with the CPU, for good: a silent fallback."""
        with build(tmp_path, zoo.scale(("batch", 3))) as session:
            failing = session._session._sess = MagicMock(wraps=session._session._sess)
            failing.run.side_effect = EPFail("the device is lost")
            with pytest.raises(ExecutionError, match="the device is lost"):
                session.run({"x": np.zeros((1, 3), np.float32)})
            assert failing.run.call_count == 1


class TestPlacement:
    FEEDS = {"x": np.ones((1, 3), np.float32)}  # noqa: RUF012

    @pytest.mark.parametrize("fault", [OSError("full"), ValueError("cut off")])
    def test_on_a_full_disk_it_is_read_from_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
    ) -> None:
        profile, places = OnnxRuntimeSession._profile, []

        def fail_once(session: OnnxRuntimeSession, feeds: Any, place: Path | None, runs: int) -> Any:
            places.append(place)
            if place is None:
                raise fault
            return profile(session, feeds, place, runs)

        with build(tmp_path, zoo.scale(("batch", 3))) as session:
            usual = session.placement(self.FEEDS)
            monkeypatch.setattr(OnnxRuntimeSession, "_profile", fail_once)
            assert session.placement(self.FEEDS) == usual
        assert places == [None, Path("/dev/shm")]

    def test_where_no_profile_can_be_written_that_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise ValueError("Unterminated string")

        monkeypatch.setattr(OnnxRuntimeSession, "_profile", fail)
        with build(tmp_path, zoo.scale(("batch", 3))) as session, pytest.raises(LoweringError, match="make room"):
            session.placement(self.FEEDS)

    def test_the_session_itself_is_not_profiled(self, tmp_path: Path) -> None:
        with build(tmp_path, zoo.scale(("batch", 3))) as session:
            first = session.placement(self.FEEDS)
            assert session.run(self.FEEDS)["y"].tolist() == [[2, 2, 2]]
            assert session.placement(self.FEEDS) == first
            assert not session._session.get_session_options().enable_profiling


class Owned(Closeable):
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class TestOwned:
    """What a session owns is closed once: with it, or when there will be none."""

    @pytest.mark.parametrize("model", [None, zoo.with_sequence_output()], ids=["refused", "not tensors"])
    def test_is_closed_when_the_graph_is_refused(self, tmp_path: Path, model: Any) -> None:
        owned, graph = Owned(), tmp_path / "none.onnx"
        if model:
            graph = zoo.add(tmp_path, "m", model) / "model.onnx"
        with pytest.raises(LoweringError):
            OnnxRuntimeSession(graph, session_options(CONFIG), [(CPU_PROVIDER, {})], owned=owned)
        assert owned.closed == 1


class TestCudaGraphs:
    """Which runs are captured, seen on the buffers of the CPU."""

    @pytest.fixture
    def captured(self, monkeypatch: pytest.MonkeyPatch) -> list[object]:
        runs: list[object] = []
        run = CudaGraphRunner.run

        def on_cpu(self: CudaGraphRunner, *arguments: Any) -> Any:
            self._device = "cpu"
            runs.append(self._device_id)
            return run(self, *arguments)

        monkeypatch.setattr(CudaGraphRunner, "run", on_cpu)
        return runs

    def session(self, tmp_path: Path, model: Any) -> OnnxRuntimeSession:
        graph = zoo.add(tmp_path, "m", model) / "model.onnx"

        class Options(dict[str, str]):
            """The CPU's provider takes no options: the number is for the runner alone."""

        provider = (CPU_PROVIDER, Options(device_id="3"))
        return OnnxRuntimeSession(graph, session_options(CONFIG), [provider], cuda_graphs=True)

    @pytest.mark.parametrize("dtype", ["BF16", "BYTES"])
    def test_what_has_no_fixed_buffers_runs_plainly(self, tmp_path: Path, captured: list[object], dtype: str) -> None:
        array = np.array([["1"]], object) if dtype == "BYTES" else np.ones((1, 1), DType.BF16.numpy)
        with self.session(tmp_path, zoo.identity(("batch", "n"), zoo.DTYPES[dtype])) as session:
            assert session.run({"x": array})["y"] == array
        assert captured == []
