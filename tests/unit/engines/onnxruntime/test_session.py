"""Sessions of ONNX Runtime: options, runs, placement, profiles, signatures, text and bf16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import zoo
from onnxruntime.capi.onnxruntime_pybind11_state import EPFail

from graphkiln_backend.engines.base import SessionConfig, SessionTuning
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine, OnnxRuntimeSession
from graphkiln_backend.engines.onnxruntime.loading import CPU as CPU_PROVIDER
from graphkiln_backend.engines.onnxruntime.loading import CUDA, session_options
from graphkiln_backend.engines.onnxruntime.session import (
    CudaGraphRunner,
    decode_text,
    run_ort_values,
    seconds_of_nodes,
    signature_of,
    summarize_profile,
)
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError, LoweringError, SignatureError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.system.closing import Closeable

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")


def build(tmp_path: Path, model: Any, config: SessionConfig = CONFIG) -> OnnxRuntimeSession:
    return OnnxRuntimeEngine().build(zoo.add(tmp_path, "m", model) / "model.onnx", config)


class TestOptions:
    def test_session_options(self) -> None:
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

    def test_unknown_arena(self, tmp_path: Path) -> None:
        config = replace(CONFIG, tuning=SessionTuning(arena_shrinkage="gpu:7"))
        with (
            build(tmp_path, zoo.scale(("batch", 3)), config) as session,
            pytest.raises((ExecutionError, SignatureError)),
        ):
            session.run({"x": np.ones((1, 3), np.float32)})


class TestRun:
    def test_invalid_text(self, tmp_path: Path) -> None:
        with (
            build(tmp_path, zoo.identity(("batch", "n"), zoo.DTYPES["BYTES"])) as session,
            pytest.raises(SignatureError, match="cannot be read"),
        ):
            session.run({"x": np.array([[b"\xff"]], object)})

    def test_optional_input(self, tmp_path: Path) -> None:
        x = np.zeros(3, np.float32)
        with build(tmp_path, zoo.with_optional_bias()) as session:
            assert [spec.name for spec in session.signature.inputs] == ["x"]
            assert [spec.name for spec in session.signature.optional_inputs] == ["bias"]
            assert session.run({"x": x})["y"].tolist() == [100, 100, 100]
            assert session.run({"x": x, "bias": np.array([7], np.float32)})["y"].tolist() == [7, 7, 7]

    def test_session_serves_after_a_failure(self, tmp_path: Path) -> None:
        with build(tmp_path, zoo.good_and_fragile()) as session:
            with pytest.raises((ExecutionError, SignatureError), match="out of"):
                session.run({"x": np.array([[0, 99]])})
            assert session.run({"x": np.array([[0, 2]])})["fragile"].tolist() == [[0, 2]]

    def test_missing_weights(self, tmp_path: Path) -> None:
        folder = zoo.add_external(tmp_path, "m")
        (folder / "weights.bin").unlink()
        with pytest.raises(LoweringError, match=r"weights\.bin"):
            OnnxRuntimeEngine().build(folder / "model.onnx", CONFIG)

    def test_failing_provider_is_not_replaced(self, tmp_path: Path) -> None:
        """ONNX Runtime itself would silently fall back to the CPU for good."""
        with build(tmp_path, zoo.scale(("batch", 3))) as session:
            failing = session._session._sess = MagicMock(wraps=session._session._sess)
            failing.run.side_effect = EPFail("the device is lost")
            with pytest.raises(ExecutionError, match="the device is lost"):
                session.run({"x": np.zeros((1, 3), np.float32)})
            assert failing.run.call_count == 1


class TestPlacement:
    FEEDS = {"x": np.ones((1, 3), np.float32)}  # noqa: RUF012

    @pytest.mark.parametrize("fault", [OSError("full"), ValueError("cut off")])
    def test_profile_in_memory_if_the_disk_is_full(
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

    def test_unwritable_profile(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise ValueError("Unterminated string")

        monkeypatch.setattr(OnnxRuntimeSession, "_profile", fail)
        with build(tmp_path, zoo.scale(("batch", 3))) as session, pytest.raises(LoweringError, match="make room"):
            session.placement(self.FEEDS)


class Owned(Closeable):
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class TestOwned:
    @pytest.mark.parametrize("model", [None, zoo.with_sequence_output()], ids=["refused", "not tensors"])
    def test_owned_object_is_closed_when_the_graph_is_refused(self, tmp_path: Path, model: Any) -> None:
        owned, graph = Owned(), tmp_path / "none.onnx"
        if model:
            graph = zoo.add(tmp_path, "m", model) / "model.onnx"
        with pytest.raises(LoweringError):
            OnnxRuntimeSession(graph, session_options(CONFIG), [(CPU_PROVIDER, {})], owned=owned)
        assert owned.closed == 1


class TestCudaGraphsOfASession:
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
    def test_types_without_fixed_buffers(self, tmp_path: Path, captured: list[object], dtype: str) -> None:
        array = np.array([["1"]], object) if dtype == "BYTES" else np.ones((1, 1), DType.BF16.numpy)
        with self.session(tmp_path, zoo.identity(("batch", "n"), zoo.DTYPES[dtype])) as session:
            assert session.run({"x": array})["y"] == array
        assert captured == []


def kernel(
    name: str, operator: str, provider: str, types: tuple[str, ...] = ("float",), microseconds: int = 1
) -> dict[str, object]:
    arguments = {"op_name": operator, "provider": provider, "input_type_shape": [{name: [1]} for name in types]}
    return {"cat": "Node", "name": f"{name}_kernel_time", "dur": microseconds, "args": arguments}


def test_products_of_fused_kernels() -> None:
    kernels = [kernel("TRTKernel_graph_0", "TRTKernel_graph_0", "TensorrtExecutionProvider"), kernel("a", "Conv", CUDA)]
    found = summarize_profile(kernels, "TensorrtExecutionProvider", {"fp32": 5})
    assert found.products == {"fp32": 4}
    assert found.elsewhere == ("a",)
    nothing = summarize_profile(kernels[1:], "TensorrtExecutionProvider", {"fp16": 5})
    assert nothing.products == {"fp32": 1}


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (("float", "float"), Precision.FP32),
        (("float16", "float"), Precision.FP16),
        (("bfloat16", "float"), Precision.BF16),
        (("float", "uint8", "int8", "float"), Precision.INT8),
        (("double",), "fp64"),
        (("double", "float"), Precision.FP32),
        (("bool", "string"), "integer"),
    ],
)
def test_precision_of_a_kernel(types: tuple[str, ...], expected: object) -> None:
    found = summarize_profile([kernel("fc", "MatMul", CPU_PROVIDER, types)], CPU_PROVIDER, {})
    assert found.products == {expected: 1}
    assert found.precision == expected


def test_products_decide_the_precision() -> None:
    kernels = [kernel("a", "Gather", CPU_PROVIDER, ("int64",), 500), kernel("b", "MatMul", CPU_PROVIDER, ("float",), 5)]
    assert summarize_profile(kernels, CPU_PROVIDER, {}).precision is Precision.FP32
    assert summarize_profile(kernels[:1], CPU_PROVIDER, {}).precision == "integer"


def test_precision_by_time() -> None:
    kernels = [
        kernel("a", "Relu", CPU_PROVIDER, ("float",), 5),
        kernel("b", "Relu", CPU_PROVIDER, ("float",), 5),
        kernel("c", "MatMul", CPU_PROVIDER, ("float16",), 500),
    ]
    assert summarize_profile(kernels, CPU_PROVIDER, {}).precision is Precision.FP16


def test_median_time_of_a_node() -> None:
    """The first run is a cold one; what is no kernel counts for nothing."""
    runs = [kernel("a", "Conv", CPU_PROVIDER, microseconds=taken) for taken in (900, 10, 12)]
    other = [kernel("b", "Relu", CPU_PROVIDER, microseconds=0), {"cat": "Session", "name": "model_run", "dur": 999}]
    assert seconds_of_nodes([*runs, *other]) == {"a": pytest.approx(12e-6), "b": 0.0}


def read_signature_of(folder: Path) -> Signature:
    path = folder / "model.onnx"
    return signature_of(onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]), path)


def test_signature_with_a_repeated_output(tmp_path: Path) -> None:
    found = read_signature_of(zoo.add(tmp_path, "m", zoo.listed_twice()))
    assert len(found.outputs) == 1
    assert found.inputs[0].batchable


def test_signature_without_outputs_that_are_no_tensors(tmp_path: Path) -> None:
    assert [
        spec.name for spec in read_signature_of(zoo.add(tmp_path, "m", zoo.with_tensor_and_sequence())).outputs
    ] == ["y"]
    with pytest.raises(LoweringError, match="no output is a tensor that Triton carries"):
        read_signature_of(zoo.add(tmp_path, "n", zoo.with_sequence_output()))


BF16 = np.dtype(ml_dtypes.bfloat16)


class TestText:
    @pytest.mark.parametrize(
        "array",
        [
            np.array([b"a", "gr\u00f6\u00dfe".encode()], object),
            np.array(["a", "gr\u00f6\u00dfe"], object),
            np.array([b"a", "gr\u00f6\u00dfe"], object),
            np.array([b"a", "gr\u00f6\u00dfe".encode()], "S"),
            np.array(["a", "gr\u00f6\u00dfe"]),
        ],
        ids=["bytes", "text", "both", "fixed", "numpy's own"],
    )
    def test_decode_text(self, array: np.ndarray) -> None:
        found = decode_text("x", array)
        assert found.dtype == np.object_
        assert found.tolist() == ["a", "gr\u00f6\u00dfe"]

    def test_invalid_utf8(self) -> None:
        with pytest.raises(SignatureError, match="input 'words' holds text that cannot be read: expected UTF-8"):
            decode_text("words", np.array([b"fine", b"\xff\xfe"], object))


class TestBf16:
    @pytest.fixture
    def session(self) -> onnxruntime.InferenceSession:
        model = zoo.identity(("batch", "n"), onnx.TensorProto.BFLOAT16)
        return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(self, session: onnxruntime.InferenceSession, array: np.ndarray) -> np.ndarray:
        (found,) = run_ort_values(session, ["y"], {"x": array}, onnxruntime.RunOptions())
        return found

    def test_every_bf16_bit_pattern(self, session: onnxruntime.InferenceSession) -> None:
        """Subnormals, both zeros, infinities and every NaN."""
        patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
        found = self.run(session, patterns.view(BF16))
        assert found.dtype == BF16
        np.testing.assert_array_equal(found.view(np.uint16), patterns)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_text_and_bf16(shape: tuple[int, ...]) -> None:
    nodes = [onnx.helper.make_node("Identity", [name], [name * 2]) for name in "xt"]
    values = {
        name: zoo.value(name, dims, dtype)
        for name, dims, dtype in (
            ("x", ("n",), onnx.TensorProto.BFLOAT16),
            ("t", shape, onnx.TensorProto.STRING),
            ("xx", ("n",), onnx.TensorProto.BFLOAT16),
            ("tt", shape, onnx.TensorProto.STRING),
        )
    }
    model = zoo.model(nodes, [values["x"], values["t"]], [values["xx"], values["tt"]])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    text = np.full(shape, "gr\u00f6\u00dfe, longer than a short string", object)
    feeds = {"x": np.ones(3, BF16), "t": text}
    numbers, found = run_ort_values(session, ["xx", "tt"], feeds, onnxruntime.RunOptions())
    assert numbers.dtype == BF16
    assert (found.shape, found.tolist()) == (shape, text.tolist())


@pytest.mark.parametrize("shared", [True, False])
def test_input_of_unknown_rank(tmp_path: Path, shared: bool) -> None:
    """The graph does not say how many dimensions it has; ONNX Runtime gives it none, and requests were refused."""
    model = zoo.scale(("batch", 3))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "model.onnx")
    folder = tmp_path / "shared" if shared else None
    config = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test", shared_folder=folder)
    with OnnxRuntimeEngine().build(tmp_path / "model.onnx", config) as session:
        session.signature.check({"x": np.ones((2, 3), np.float32)})
        assert not session.signature.inputs[0].has_rank
