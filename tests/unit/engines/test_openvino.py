"""The OpenVINO engine, and graphs where it deviates from ONNX: corrected, limited or refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
import zoo
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from graphkiln_backend.engines import openvino_numbers
from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.openvino import OpenVinoEngine, OpenVinoSession, _options
from graphkiln_backend.engines.openvino_integers import find_limits
from graphkiln_backend.engines.openvino_numbers import Checks
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import LoweringError, SignatureError
from graphkiln_backend.graph.precision import Precision

CONFIG = SessionConfig(engine="openvino", device=CPU, threads=1, spin=False, reason="test")


@pytest.mark.parametrize("streams", [1, 2])
def test_output_that_is_an_input_is_not_shared(tmp_path: Path, streams: int) -> None:
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
            answer[:] = -1  # the output is not memory of the request's input
            assert (sent == 1000 + turn).all()


def test_other_device_is_refused(digits: Path) -> None:
    config = dataclasses.replace(CONFIG, options={"device_type": "GPU"})
    with pytest.raises(LoweringError, match="device_type must be CPU, got 'GPU'"):
        OpenVinoEngine().build(digits / "1" / "model.onnx", config)


def build_with(tmp_path: Path, model: onnx.ModelProto, **changes: object) -> OpenVinoSession:
    config = dataclasses.replace(CONFIG, **changes)
    return OpenVinoEngine().build(zoo.add(tmp_path, "m", model) / "model.onnx", config)


class TestIdentity:
    def test_identity_is_stable(self) -> None:
        config = dataclasses.replace(CONFIG, threads=3, streams=2, options={"device_type": "CPU"})
        assert OpenVinoEngine().identity(config) == {
            "openvino": openvino.__version__,
            "options": "[('ENABLE_CPU_PINNING', False), ('INFERENCE_NUM_THREADS', 3), "
            "('INFERENCE_PRECISION_HINT', 'f32'), ('NUM_STREAMS', '2')]",
            "numbers": openvino_numbers.table_digest(),
        }


class TestOptions:
    def test_properties_are_set(self, digits: Path) -> None:
        config = dataclasses.replace(CONFIG, threads=2, streams=2)
        with OpenVinoEngine().build(digits / "1" / "model.onnx", config) as session:
            found = {name: session._compiled.get_property(name) for name in _options(config)}
        assert found == {
            "INFERENCE_PRECISION_HINT": openvino.Type.f32,
            "INFERENCE_NUM_THREADS": 2,
            "NUM_STREAMS": 2,
            "ENABLE_CPU_PINNING": False,
        }

    def test_fp32_graph_is_computed_in_fp32(self, tmp_path: Path) -> None:
        """bf16 is OpenVINO's default on processors with AVX512-BF16 or AMX."""
        nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])]
        values = np.full((64, 64), 1 + 2**-12, np.float32)
        model = zoo.model(nodes, [zoo.value("x", ("n", 64))], [zoo.value("y", ("n", 64))], {"w": values})
        with build_with(tmp_path, model) as session:
            found = session.run({"x": np.eye(64, dtype=np.float32)})["y"]
            assert session.placement({"x": np.eye(64, dtype=np.float32)}).products == {Precision.FP32: 1}
        np.testing.assert_array_equal(found, values)


class TestStreams:
    @pytest.mark.parametrize("rows", [0, 1, 2, 5])
    @pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.INT64])
    def test_streams_keep_the_order_of_rows(self, tmp_path: Path, rows: int, dtype: DType) -> None:
        array = np.arange(rows * 3).reshape(rows, 3).astype(dtype.numpy)
        with build_with(tmp_path, zoo.identity(("batch", 3), zoo.DTYPES[dtype]), streams=4) as session:
            found = session.run({"x": array})["y"]
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)

    def test_session_serves_after_a_failed_part(self, tmp_path: Path) -> None:
        with build_with(tmp_path, zoo.scale(("batch", 3)), streams=2) as session:
            with pytest.raises(SignatureError):
                session.run({"x": np.ones((4, 5), np.float32)})
            found = session.run({"x": np.ones((4, 3), np.float32)})["y"]
        np.testing.assert_array_equal(found, np.full((4, 3), 2.0))


def test_quiet_builds_and_signals_after_close(digits: Path) -> None:
    """In any order: see `open_core`."""
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
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "taken\n", "")


class TestNames:
    def build(self, tmp_path: Path, proto: onnx.ModelProto) -> OpenVinoSession:
        path = tmp_path / "model.onnx"
        path.write_bytes(proto.SerializeToString())
        return OpenVinoEngine().build(path, CONFIG)

    def test_names_of_merged_tensors(self, tmp_path: Path) -> None:
        """OpenVINO drops the Identity, and gives its input the names of both tensors."""
        nodes = [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("Identity", ["a"], ["y"])]
        with self.build(tmp_path, zoo.model(nodes, [zoo.value("x", (2,))], [zoo.value("y", (2,))])) as session:
            assert [spec.name for spec in (*session.signature.inputs, *session.signature.outputs)] == ["x", "y"]
            np.testing.assert_array_equal(session.run({"x": np.ones(2, np.float32)})["y"], [1, 1])

    def test_dropped_input_stays_in_the_signature(self, tmp_path: Path) -> None:
        nodes = [helper.make_node("CastLike", ["x", "like"], ["y"])]
        inputs = [zoo.value("x", (2,)), zoo.value("like", (0,), TensorProto.INT32)]
        with self.build(tmp_path, zoo.model(nodes, inputs, [zoo.value("y", (2,), TensorProto.INT32)])) as session:
            assert [spec.name for spec in session.signature.inputs] == ["x", "like"]
            outputs = session.run({"x": np.ones(2, np.float32), "like": np.empty(0, np.int32)})
        assert outputs["y"].tolist() == [1, 1]


# The second one overlaps half of the first, the last one all of it, the third none.
BOXES = np.array([[[0, 0, 1, 1], [0, 0, 1, 0.5], [5, 5, 6, 6], [0, 0, 1, 1]]], np.float32)
SCORES = np.array([[[0.9, 0.8, 0.7, 0.85]]], np.float32)


def build(folder: Path, model: onnx.ModelProto, compiled: Path | None = None) -> Session:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return OpenVinoEngine().build(path, CONFIG, compiled)


def suppression(limit: float | None = None) -> onnx.ModelProto:
    constants: dict[str, Any] = {"most": np.array([4]), "least": np.array([0.0], np.float32)}
    inputs = [zoo.value("boxes", (1, 4, 4)), zoo.value("scores", (1, 1, 4))]
    if limit is None:
        inputs.append(zoo.value("limit", (1,)))
    else:
        constants["limit"] = np.array([limit], np.float32)
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "limit", "least"], ["kept"])
    return zoo.model([node], inputs, [zoo.value("kept", ("n", 3), TensorProto.INT64)], constants)


LIMITS = {
    0.0: [0, 2],
    0.499: [0, 2],
    0.5: [0, 1, 2],
    0.501: [0, 1, 2],
    1.0: [0, 3, 1, 2],
}  # limit -> boxes that ONNX keeps


class TestSuppression:
    def test_overlap_limit_of_suppression(self, tmp_path: Path) -> None:
        with build(tmp_path, suppression()) as session:
            for limit, kept in LIMITS.items():
                feeds = {"boxes": BOXES, "scores": SCORES, "limit": np.array([limit], np.float32)}
                assert session.run(feeds)["kept"][:, 2].tolist() == kept, limit


@pytest.mark.parametrize(("inner", "outer"), [("FLOAT", "DOUBLE"), ("DOUBLE", "FLOAT")])
def test_fp64_is_refused(tmp_path: Path, inner: str, outer: str) -> None:
    ends = TensorProto.DataType.Value(inner), TensorProto.DataType.Value(outer)
    node = helper.make_node("Cast", ["x"], ["y"], to=ends[1])
    model = zoo.model([node], [zoo.value("x", (2,), ends[0])], [zoo.value("y", (2,), ends[1])])
    with pytest.raises(LoweringError, match="OpenVINO computes FP64 in FP32"):
        build(tmp_path, model)


class TestValues:
    @pytest.mark.parametrize("kind", [np.int64, np.uint64])
    def test_wide_values_are_refused(self, tmp_path: Path, kind: Any) -> None:
        dtype = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        shape = (2,)
        model = zoo.model(
            [helper.make_node("Add", ["x", "x"], ["y"])], [zoo.value("x", shape, dtype)], [zoo.value("y", shape, dtype)]
        )
        with build(tmp_path, model) as session:
            assert session.run({"x": np.array([1, 1 << 23], kind) - kind(1)})["y"].tolist() == [0, (1 << 24) - 2]
            with pytest.raises(SignatureError, match="'x' does not fit: OpenVINO computes integers in 32 bits"):
                session.run({"x": np.array([1, 1 << 40], kind)})

    def test_bounds_of_values(self) -> None:
        for beyond in (1 << 31, -(1 << 31) - 1):
            with pytest.raises(SignatureError, match=f"got {beyond} to {beyond}"):
                Checks().check("x", np.array([beyond]))


def with_constant(op_type: str, *constant: int) -> onnx.ModelProto:
    """An INT64 operator of the input and a constant."""
    names = ["c", "x"] if op_type == "Gather" else ["x", "c"]
    values = [zoo.value(name, ("n",), TensorProto.INT64) for name in "xy"]
    node = helper.make_node(op_type, names, ["y"])
    return zoo.model([node], values[:1], values[1:], {"c": np.array(constant)})


class TestConstants:
    @pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Div", "Mod", "Gather"])
    def test_wide_constants_are_refused(self, tmp_path: Path, op_type: str) -> None:
        with pytest.raises(LoweringError, match=r"computes integers in 32 bits.*a constant that takes more"):
            build(tmp_path, with_constant(op_type, 2**40))

    @pytest.mark.parametrize(
        ("op_type", "constants", "expected"),
        [("Add", (7, 100_000), [7, 100_001]), ("Mul", (7, 8), [0, 8]), ("Gather", (7, 2**31 - 2), [7, 2**31 - 2])],
    )
    def test_constants_of_32_bits(
        self, tmp_path: Path, op_type: str, constants: tuple[int, ...], expected: list[int]
    ) -> None:
        with build(tmp_path, with_constant(op_type, *constants)) as session:
            assert session.run({"x": np.array([0, 1])})["y"].tolist() == expected

    def test_wide_end_of_a_slice(self, tmp_path: Path) -> None:
        """As exporters write "to the end"."""
        constants = {"from": np.array([1]), "to": np.array([2**63 - 1])}
        values = [zoo.value(name, ("n",), TensorProto.INT64) for name in "xy"]
        model = zoo.model([helper.make_node("Slice", ["x", "from", "to"], ["y"])], values[:1], values[1:], constants)
        with build(tmp_path, model) as session:
            assert session.run({"x": np.array([5, 6, 7])})["y"].tolist() == [6, 7]


class TestRefusals:
    def test_shifts_of_short_signed_integers(self, tmp_path: Path) -> None:
        """10 << 5 of eight bits is 64; OpenVINO computes 127."""
        inputs = [zoo.value(name, (3,), TensorProto.INT8) for name in ("x", "by")]
        node = helper.make_node("BitShift", ["x", "by"], ["y"], direction="LEFT")
        graph = helper.make_graph([node], "shift", inputs, [zoo.value("y", (3,), TensorProto.INT8)])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)], ir_version=10)
        with pytest.raises(LoweringError, match="integers of 8 and 16 bits"):
            build(tmp_path, model)

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("window", [{}, {"left_window_size": 2}, {"right_window_size": 1}])
    def test_attention_with_a_window(self, tmp_path: Path, window: dict[str, int], padded: bool) -> None:
        inputs = [zoo.value(name, (1, 2, 4, 8)) for name in ("q", "k", "v")]
        names = ["q", "k", "v"]
        if padded:  # OpenVINO has no single operation for it
            inputs.append(zoo.value("used", (1,), TensorProto.INT64))
            names += ["", "", "", "used"]
        node = helper.make_node("Attention", names, ["y"], is_causal=1, **window)
        graph = helper.make_graph([node], "attention", inputs, [zoo.value("y", (1, 2, 4, 8))])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=10)
        if not window:
            return build(tmp_path, model).close()
        with pytest.raises(LoweringError, match="leaves out the window"):
            build(tmp_path, model)
        return None

    @pytest.mark.parametrize("saturates", [False, True])
    def test_saturating_int8_products(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saturates: bool) -> None:
        monkeypatch.setattr(openvino_numbers, "saturates_products_of_bytes", lambda: saturates)
        model, _ = zoo.integer_product()
        if not saturates:
            return build(tmp_path, model).close()
        with pytest.raises(LoweringError, match="products of int8 overflow on this CPU"):
            build(tmp_path, model)
        return None

    def test_int8_products_are_right_or_refused(self, tmp_path: Path) -> None:
        model, feeds = zoo.integer_product()
        try:
            session = build(tmp_path, model)
        except LoweringError:
            return
        with session, OnnxRuntimeEngine().build_reference(tmp_path / "model.onnx") as reference:
            np.testing.assert_allclose(session.run(feeds)["y"], reference.run(feeds)["y"], rtol=1e-3)


FIRST_RUNS = """
import os, sys, threading
import numpy as np
import openvino
from openvino import opset13
import graphkiln_backend.engines.openvino

x = opset13.parameter([-1, 3, 64, 64], np.float32, name="x")
model = openvino.Core().compile_model(openvino.Model([opset13.relu(x)], [x]), "CPU", {"NUM_STREAMS": 2})
feeds = {"x": np.ones((1, 3, 64, 64), np.float32)}
requests = [model.create_infer_request() for _ in range(8)]
threads = [threading.Thread(target=request.infer, args=(feeds,), daemon=True) for request in requests]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os._exit(0)
"""


@pytest.mark.slow
def test_first_runs_in_several_threads_do_not_deadlock() -> None:
    """Without the array that is made at the import, four of ten such processes never ended."""
    for _ in range(4):
        finished = subprocess.run([sys.executable, "-c", FIRST_RUNS], timeout=120, check=False)
        assert finished.returncode == 0


TABLE = {"table": np.ones((100, 8), np.float32)}
INT64, INT32, UINT64 = TensorProto.INT64, TensorProto.INT32, TensorProto.UINT64
FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL


def integer_graph(
    *nodes: tuple[str, str, str] | tuple[str, str, str, dict[str, Any]],
    constants: Mapping[str, Any] | None = None,
    x: int = INT64,
    y: tuple[int, tuple[int | str, ...]] = (INT64, ("n", 4)),
) -> onnx.ModelProto:
    """A graph of nodes (`Add`, `x k`, `y`): from `x` and `z`, of four columns, to `y`."""
    arrays = {name: np.asarray(value) for name, value in (constants or {}).items()}
    made = [
        helper.make_node(kind, ins.split(), outs.split(), **(more[0] if more else {}))
        for kind, ins, outs, *more in nodes
    ]
    names = [name for name in "xz" if any(name in ins.split() for _, ins, *_ in nodes)]
    inputs = [zoo.value(name, ("n", 4), x) for name in names]
    return zoo.model(made, inputs, [zoo.value("y", y[1], y[0])], arrays)


def limits_of(model: onnx.ModelProto, folder: Path) -> dict[str, int]:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return find_limits(openvino.Core().read_model(str(path)))


def looping() -> onnx.ModelProto:
    """Multiplies `x` by one number after the other."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["again"]), helper.make_node("Mul", ["v", "i"], ["w"])],
        "body",
        [zoo.value("i", (), INT64), zoo.value("on", (), BOOL), zoo.value("v", ("n", 4), INT64)],
        [zoo.value("again", (), BOOL), zoo.value("w", ("n", 4), INT64)],
    )
    return integer_graph(("Loop", "times go x", "y", {"body": body}), constants={"times": 9, "go": True})


GATHERED = (FLOAT, ("n", 4, 8))
WHOLE = {
    "nothing is computed": integer_graph(("Identity", "x", "y")),
    "ids choose rows": integer_graph(("Gather", "table x", "y"), constants=TABLE, y=GATHERED),
    "a hash that only chooses": integer_graph(
        ("Mul", "x k", "h"), ("Gather", "table h", "y"), constants={**TABLE, "k": 99999}, y=GATHERED
    ),
    "positions by the sum of a mask": integer_graph(
        ("CumSum", "x one", "s"),
        ("Mul", "s x", "p"),
        ("Gather", "table p", "y"),
        constants={**TABLE, "one": 1},
        y=GATHERED,
    ),
    "the best of four": integer_graph(
        ("ArgMax", "x", "i", {"axis": 1}), ("Mul", "i k", "y"), constants={"k": 91}, x=FLOAT, y=(INT64, ("n", 1))
    ),
    "a number between limits": integer_graph(
        ("Clip", "x low high", "c"),
        ("Cast", "c", "y", {"to": INT64}),
        constants={"low": np.float32(0), "high": np.float32(5)},
        x=FLOAT,
    ),
    "a mask of floats": integer_graph(
        ("Cast", "x", "f", {"to": FLOAT}), ("Sub", "one f", "y"), constants={"one": np.float32(1)}, y=(FLOAT, ("n", 4))
    ),
    "the largest of a window": integer_graph(
        ("Unsqueeze", "x one", "u"),
        ("MaxPool", "u", "y", {"kernel_shape": [2]}),
        constants={"one": [1]},
        x=FLOAT,
        y=(FLOAT, ("n", 1, 3)),
    ),
    "one of several": integer_graph(
        ("OneHot", "x depth values", "y"),
        constants={"depth": 5, "values": [0, 7]},
        y=(INT64, ("n", 4, 5)),
    ),
    "sizes of tensors": integer_graph(
        ("Shape", "x", "s"), ("ReduceProd", "s", "p", {"keepdims": 0}), ("Expand", "p s", "y")
    ),
}
LIMITED = {
    "padding": (
        integer_graph(("Pad", "x k", "y"), constants={"k": [0, 1, 0, 1]}, x=INT32, y=(INT32, ("n", 6))),
        {"x": 2**24},
    ),
    "a triangle": (integer_graph(("Trilu", "x", "y")), {"x": 2**24}),
    "a cast to bool": (integer_graph(("Cast", "x", "y", {"to": BOOL}), y=(BOOL, ("n", 4))), {"x": 2**24}),
    "a sum": (integer_graph(("Add", "x z", "y")), {"x": 2**23, "z": 2**23}),
    "a sum of words": (integer_graph(("Add", "x z", "y"), x=INT32, y=(INT32, ("n", 4))), {"x": 2**23, "z": 2**23}),
    "a difference": (integer_graph(("Sub", "x k", "y"), constants={"k": 7}), {"x": 2**23}),
    "a product with a small number": (integer_graph(("Mul", "x k", "y"), constants={"k": 8}), {"x": 2**21}),
    "a remainder": (integer_graph(("Mod", "x k", "y"), constants={"k": 7}), {"x": 2**24}),
    "a comparison with padding": (
        integer_graph(("Equal", "x k", "y"), constants={"k": 1}, y=(BOOL, ("n", 4))),
        {"x": 2**24},
    ),
    "a product of indices between limits": (
        integer_graph(("Clip", "x low high", "c"), ("Mul", "c c", "y"), constants={"low": -1000, "high": 1000}),
        {"x": 2**24},
    ),
    "a sum of four": (
        integer_graph(("ReduceSum", "x one", "y"), constants={"one": [1]}, y=(INT64, ("n", 1))),
        {"x": 2**22},
    ),
    "a product of matrices": (integer_graph(("MatMul", "x w", "y"), constants={"w": np.full((4, 4), 3)}), {"x": 2**20}),
    "positions of what is no padding, which are an output, too": (
        integer_graph(
            ("Equal", "x one", "e"),
            ("Not", "e", "u"),
            ("Cast", "u", "m", {"to": INT64}),
            ("CumSum", "m one", "s"),
            ("Mul", "s m", "p"),
            ("Add", "p one", "y"),
            constants={"one": 1},
        ),
        {"x": 2**24},
    ),
}
REFUSED = {
    "Multiply": integer_graph(("Mul", "x z", "y")),
    "a hash": integer_graph(("Mul", "x k", "h"), ("Mod", "h m", "y"), constants={"k": 2654435, "m": 1000}),
    "a comparison": integer_graph(("Mul", "x z", "p"), ("Greater", "p k", "y"), constants={"k": 5}, y=(BOOL, ("n", 4))),
    "a float": integer_graph(("Mul", "x z", "p"), ("Cast", "p", "y", {"to": FLOAT}), y=(FLOAT, ("n", 4))),
    "MatMul": integer_graph(("Transpose", "z", "t"), ("MatMul", "x t", "y"), y=(INT64, ("n", "n"))),
    "Power": integer_graph(("Pow", "x k", "y"), constants={"k": 2}),
    "a shift": integer_graph(
        ("BitShift", "x k", "y", {"direction": "LEFT"}), constants={"k": np.uint64(9)}, x=UINT64, y=(UINT64, ("n", 4))
    ),
    "ReduceProd": integer_graph(("ReduceProd", "x one", "y"), constants={"one": [1]}, y=(INT64, ("n", 1))),
    "CumSum": integer_graph(("CumSum", "x zero", "y"), constants={"zero": 0}),
    "Convert": integer_graph(("Cast", "x", "y", {"to": INT64}), x=FLOAT),
    "an addition at places": integer_graph(
        ("ScatterND", "x at z", "y", {"reduction": "add"}), constants={"at": [[0]]}, y=(INT64, ("n", 4))
    ),
    "a large offset": integer_graph(("Add", "x k", "y"), constants={"k": 2**24}),
    "a loop": looping(),
}


@pytest.mark.parametrize("model", WHOLE.values(), ids=list(WHOLE))
def test_graphs_without_limits(model: onnx.ModelProto, tmp_path: Path) -> None:
    assert limits_of(model, tmp_path) == {}


@pytest.mark.parametrize(("model", "limits"), LIMITED.values(), ids=list(LIMITED))
def test_limits_of_inputs(model: onnx.ModelProto, limits: dict[str, int], tmp_path: Path) -> None:
    assert limits_of(model, tmp_path) == limits


@pytest.mark.parametrize("model", REFUSED.values(), ids=list(REFUSED))
def test_refused_graphs(model: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=r"computes integers in 32 bits or FP32; .* may need larger ones"):
        limits_of(model, tmp_path)


def test_limit_of_a_mask(tmp_path: Path) -> None:
    mask, y = zoo.value("attention_mask", ("n", 4), INT64), zoo.value("y", ("n", 4), INT64)
    square = helper.make_node("Mul", ["attention_mask", "attention_mask"], ["y"])
    assert limits_of(zoo.model([square], [mask], [y]), tmp_path) == {"attention_mask": 2**12}


def rows(*numbers: int) -> AnyArray:
    return np.array([numbers], np.int64)


def reference(model: onnx.ModelProto, feeds: Mapping[str, AnyArray]) -> Sequence[int]:
    found: list[list[int]] = np.asarray(ReferenceEvaluator(model).run(None, dict(feeds))[0]).tolist()
    return found[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_limits_are_checked_per_request(tmp_path: Path, compiled: bool) -> None:
    model, limits = LIMITED["a product of matrices"]
    onnx.save(model, tmp_path / "model.onnx")
    OpenVinoEngine().compile(tmp_path / "model.onnx", CONFIG, tmp_path)
    largest = limits["x"] - 1
    with build(tmp_path, model, tmp_path if compiled else None) as session:
        most = {"x": rows(*[largest] * 4)}
        assert session.run(most)["y"][0].tolist() == reference(model, most)
        with pytest.raises(SignatureError, match=rf"input 'x' does not fit.*expected -{largest} to {largest}"):
            session.run({"x": rows(0, 0, 0, largest + 1)})
