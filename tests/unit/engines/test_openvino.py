"""The OpenVINO engine on the committed example, against ONNX Runtime."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import openvino
import pytest
import zoo
from onnx import TensorProto, helper

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.openvino import OpenVinoEngine, OpenVinoSession, _options
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import LoweringError, SignatureError
from graphkiln_backend.graph.precision import Precision

CONFIG = SessionConfig(engine="openvino", device=CPU, threads=1, spin=False, reason="test")


@pytest.mark.parametrize("streams", [1, 2])
def test_an_output_that_is_an_input_is_of_this_request(tmp_path: Path, streams: int) -> None:
    """OpenVINO drops a Cast to the same type: with shared inputs its output is memory of the caller."""
    nodes = [helper.make_node("Relu", ["X"], ["R"]), helper.make_node("Cast", ["Z"], ["Y"], to=TensorProto.INT32)]
    graph = helper.make_graph(
        nodes,
        "passes_on",
        [
            helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", 8]),
            helper.make_tensor_value_info("Z", TensorProto.INT32, ["n", 2]),
        ],
        [
            helper.make_tensor_value_info("R", TensorProto.FLOAT, ["n", 8]),
            helper.make_tensor_value_info("Y", TensorProto.INT32, ["n", 2]),
        ],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with OpenVinoEngine().build(path, dataclasses.replace(CONFIG, streams=streams)) as session:
        for turn, rows in enumerate((4, 1, 1, 2, 4, 1, 3, 1)):
            sent = np.full((rows, 2), 1000 + turn, np.int32)
            answer = session.run({"X": np.ones((rows, 8), np.float32), "Z": sent})["Y"]
            np.testing.assert_array_equal(answer, sent)
            answer[:] = -1  # an answer is the caller's own: it is no memory of the request's input
            assert (sent == 1000 + turn).all()


def test_refuses_a_device_that_it_does_not_offer(digits: Path) -> None:
    config = dataclasses.replace(CONFIG, options={"device_type": "GPU"})
    with pytest.raises(LoweringError, match="device_type must be CPU, got 'GPU'"):
        OpenVinoEngine().build(digits / "1" / "model.onnx", config)


def build(tmp_path: Path, model: onnx.ModelProto, **changes: object) -> OpenVinoSession:
    config = dataclasses.replace(CONFIG, **changes)
    return OpenVinoEngine().build(zoo.add(tmp_path, "m", model) / "model.onnx", config)


class TestIdentity:
    def test_is_what_the_keys_of_caches_hold(self) -> None:
        config = dataclasses.replace(CONFIG, threads=3, streams=2, options={"device_type": "CPU"})
        assert OpenVinoEngine().identity(config) == {
            "openvino": openvino.__version__,
            "options": "[('ENABLE_CPU_PINNING', False), ('INFERENCE_NUM_THREADS', 3), "
            "('INFERENCE_PRECISION_HINT', 'f32'), ('NUM_STREAMS', '2')]",
        }


class TestOptions:
    def test_every_property_is_read_back(self, digits: Path) -> None:
        config = dataclasses.replace(CONFIG, threads=2, streams=2)
        with OpenVinoEngine().build(digits / "1" / "model.onnx", config) as session:
            found = {name: session._compiled.get_property(name) for name in _options(config)}
        assert found == {
            "INFERENCE_PRECISION_HINT": openvino.Type.f32,
            "INFERENCE_NUM_THREADS": 2,
            "NUM_STREAMS": 2,
            "ENABLE_CPU_PINNING": False,
        }

    def test_bf16_is_never_computed_in_where_the_graph_is_fp32(self, tmp_path: Path) -> None:
        """The default of processors with AVX512-BF16 or AMX: a sum that bf16 would round away is kept."""
        nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])]
        values = np.full((64, 64), 1 + 2**-12, np.float32)
        model = zoo.model(nodes, [zoo.value("x", ("n", 64))], [zoo.value("y", ("n", 64))], {"w": values})
        with build(tmp_path, model) as session:
            found = session.run({"x": np.eye(64, dtype=np.float32)})["y"]
            assert session.placement({"x": np.eye(64, dtype=np.float32)}).products == {Precision.FP32: 1}
        np.testing.assert_array_equal(found, values)


class TestStreams:
    @pytest.mark.parametrize("rows", [0, 1, 2, 5])
    @pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.INT64])
    def test_rows_come_back_in_their_order(self, tmp_path: Path, rows: int, dtype: DType) -> None:
        array = np.arange(rows * 3).reshape(rows, 3).astype(dtype.numpy)
        with build(tmp_path, zoo.identity(("batch", 3), zoo.DTYPES[dtype]), streams=4) as session:
            found = session.run({"x": array})["y"]
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)

    def test_a_part_that_fails_waits_for_the_others_and_the_session_goes_on(self, tmp_path: Path) -> None:
        with build(tmp_path, zoo.scale(("batch", 3)), streams=2) as session:
            with pytest.raises(SignatureError):
                session.run({"x": np.ones((4, 5), np.float32)})
            found = session.run({"x": np.ones((4, 3), np.float32)})["y"]
        np.testing.assert_array_equal(found, np.full((4, 3), 2.0))


def test_a_build_prints_nothing(digits: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from graphkiln_backend.engines.base import SessionConfig\n"
        "from graphkiln_backend.engines.openvino import OpenVinoEngine\n"
        "from graphkiln_backend.graph.device import CPU\n"
        "config = SessionConfig(engine='openvino', device=CPU, threads=1, spin=False, reason='test')\n"
        "OpenVinoEngine().build(pathlib.Path(sys.argv[1]), config).close()\n"
    )
    command = [sys.executable, "-c", program, str(digits / "1" / "model.onnx")]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    assert (finished.stdout, finished.stderr) == ("", "")


def test_a_process_takes_signals_when_sessions_have_ended(digits: Path) -> None:
    """In whatever order they ended: see `_open_core`."""
    program = (
        "import gc, os, pathlib, signal, sys\n"
        "from graphkiln_backend.engines.base import SessionConfig\n"
        "from graphkiln_backend.engines.openvino import OpenVinoEngine\n"
        "from graphkiln_backend.graph.device import CPU\n"
        "config = SessionConfig(engine='openvino', device=CPU, threads=1, spin=False, reason='test')\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('taken'))\n"
        "first, second = (OpenVinoEngine().build(pathlib.Path(sys.argv[1]), config) for _ in range(2))\n"
        "first.close(), gc.collect(), second.close(), gc.collect()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    command = [sys.executable, "-c", program, str(digits / "1" / "model.onnx")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout) == (0, "taken\n"), finished.stderr


class TestNames:
    def build(self, tmp_path: Path, proto: onnx.ModelProto) -> OpenVinoSession:
        path = tmp_path / "model.onnx"
        path.write_bytes(proto.SerializeToString())
        return OpenVinoEngine().build(path, CONFIG)

    def test_a_tensor_that_has_several_has_the_graphs(self, tmp_path: Path) -> None:
        """OpenVINO drops the Identity, and gives its input the names of both tensors."""
        nodes = [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("Identity", ["a"], ["y"])]
        with self.build(tmp_path, zoo.model(nodes, [zoo.value("x", (2,))], [zoo.value("y", (2,))])) as session:
            assert [spec.name for spec in (*session.signature.inputs, *session.signature.outputs)] == ["x", "y"]
            np.testing.assert_array_equal(session.run({"x": np.ones(2, np.float32)})["y"], [1, 1])

    def test_an_input_that_it_drops_stays_one(self, tmp_path: Path) -> None:
        nodes = [helper.make_node("CastLike", ["x", "like"], ["y"])]
        inputs = [zoo.value("x", (2,)), zoo.value("like", (0,), TensorProto.INT32)]
        with self.build(tmp_path, zoo.model(nodes, inputs, [zoo.value("y", (2,), TensorProto.INT32)])) as session:
            assert [spec.name for spec in session.signature.inputs] == ["x", "like"]
            outputs = session.run({"x": np.ones(2, np.float32), "like": np.empty(0, np.int32)})
        assert outputs["y"].tolist() == [1, 1]
