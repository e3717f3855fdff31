"""OpenVINO's table: what it refuses and corrects, what it leaves, and which inputs are checked for NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import zoo
from onnx import TensorProto, helper

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.openvino import OpenVinoEngine, OpenVinoSession
from graphkiln_backend.engines.openvino_numbers import Checks, has_nan
from graphkiln_backend.engines.registry import open_reference
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import LoweringError, SignatureError

CONFIG = SessionConfig(engine="openvino", device=CPU, threads=1, spin=False, reason="test")
FLOAT, HALF, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BOOL
I8, U8, I16, U16 = TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16
I32, U32, I64 = TensorProto.INT32, TensorProto.UINT32, TensorProto.INT64
Node = tuple[str, str, str] | tuple[str, str, str, dict[str, Any]]


def graph(*nodes: Node, x: int, y: int, shape: tuple[int | str, ...] = ("n", 8), **constants: Any) -> onnx.ModelProto:
    """A graph of nodes (`Add`, `x k`, `y`) from `x` and `z`, of eight columns, to `y`."""
    made = [
        helper.make_node(kind, ins.split(), outs.split(), **(more[0] if more else {}))
        for kind, ins, outs, *more in nodes
    ]
    read = {name for node in made for name in node.input}
    inputs = [zoo.value(name, ("n", 8), x) for name in "xz" if name in read]
    arrays = {name: np.asarray(value) for name, value in constants.items()}
    model = zoo.model(made, inputs, [zoo.value("y", shape, y)], arrays)
    model.opset_import[0].version, model.ir_version = 21, 10
    return model


def cast(name: str, to: int, source: str = "x") -> Node:
    return ("Cast", source, name, {"to": to})


def build(folder: Path, model: onnx.ModelProto) -> OpenVinoSession:
    onnx.save(model, folder / "model.onnx")
    return OpenVinoEngine().build(folder / "model.onnx", CONFIG)


TWO = {dtype: np.array(2, helper.tensor_dtype_to_np_dtype(dtype)) for dtype in (I8, U8, I16, U16)}
SHORT = [
    pytest.param(graph((kind, "x k", "y", more), x=dtype, y=dtype, k=TWO[dtype]), id=f"{kind} {TWO[dtype].dtype}")
    for kind, more in (("Add", {}), ("Sub", {}), ("Mul", {}), ("Div", {}), ("Pow", {}), ("Mod", {}))
    for dtype in TWO
]
REFUSED = {
    "the negative of int8": graph(("Neg", "x", "y"), x=I8, y=I8),
    "the magnitude of int8": graph(("Abs", "x", "y"), x=I8, y=I8),
    "a shift of uint8": graph(("BitShift", "x k", "y", {"direction": "LEFT"}), x=U8, y=U8, k=TWO[U8]),
    "a sum inside": graph(cast("b", U8), ("Add", "b b", "s"), cast("y", FLOAT, "s"), x=I32, y=FLOAT),
    "int32 to int16": graph(cast("c", I16), cast("y", FLOAT, "c"), x=I32, y=FLOAT),
    "int8 to uint16": graph(cast("c", U16), cast("y", FLOAT, "c"), x=I8, y=FLOAT),
    "int32 to uint32": graph(cast("c", U32), cast("y", FLOAT, "c"), x=I32, y=FLOAT),
    "floats of 8 bits": graph(cast("c", TensorProto.FLOAT8E4M3FN), cast("y", FLOAT, "c"), x=FLOAT, y=FLOAT),
    "other floats of 8 bits": graph(cast("c", TensorProto.FLOAT8E5M2), cast("y", FLOAT, "c"), x=HALF, y=FLOAT),
    "four bits": graph(cast("c", TensorProto.INT4), cast("y", FLOAT, "c"), x=FLOAT, y=FLOAT),
    "four bits without a sign": graph(cast("c", TensorProto.UINT4), cast("y", FLOAT, "c"), x=I32, y=FLOAT),
    "a range of floats": graph(
        ("ReduceMax", "x", "m", {"keepdims": 0}),
        ("Range", "a m k", "y"),
        x=FLOAT,
        y=FLOAT,
        shape=("m",),
        a=np.float32(0),
        k=np.float32(0.1),
    ),
}


@pytest.mark.parametrize("model", [*SHORT, *(pytest.param(model, id=name) for name, model in REFUSED.items())])
def test_refused(model: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=r"OpenVINO (?:saturates|keeps 32|does not|leaves|makes)") as raised:
        build(tmp_path, model)
    assert raised.value.hint == "set engine: onnxruntime"


def test_graphs_that_openvino_cannot_read_name_the_other_engine(tmp_path: Path) -> None:
    wrapped = graph(("Pad", "x k", "y", {"mode": "wrap"}), x=FLOAT, y=FLOAT, shape=("n", 9), k=np.array([0, 1, 0, 0]))
    with pytest.raises(LoweringError, match="cannot load") as raised:
        build(tmp_path, wrapped)
    assert raised.value.hint == "set engine: onnxruntime"


def in_branch() -> onnx.ModelProto:
    """Adds bytes in a branch."""
    branches = {
        name: helper.make_graph([helper.make_node(kind, ins, [name])], name, [], [zoo.value(name, ("n", 8), U8)])
        for name, kind, ins in (("then_branch", "Add", ["x", "x"]), ("else_branch", "Identity", ["x"]))
    }
    return graph(("Size", "x", "s"), ("Greater", "s k", "c"), ("If", "c", "y", branches), x=U8, y=U8, k=np.int64(3))


def test_subgraphs_are_examined(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="saturates"):
        build(tmp_path, in_branch())


EXTREMES = {
    U8: [0, 1, 127, 128, 200, 254, 255, 3],
    I8: [-128, -127, -1, 0, 1, 100, 126, 127],
    I32: [-7, 7, -1, 0, 70000, -70000, 300, 5],
    FLOAT: [1, 3, 3, -0.0, 3, 1, np.inf, -np.inf],
    BOOL: [0, 1, 0, 1, 0, 0, 1, 1],
}
SAME = {
    "bytes of an image": graph(cast("f", FLOAT), ("Div", "f k", "y"), x=U8, y=FLOAT, k=np.float32(255)),
    "the larger byte": graph(("Max", "x z", "y"), x=U8, y=U8),
    "bytes between limits": graph(("Clip", "x a b", "y"), x=I8, y=I8, a=np.int8(-5), b=np.int8(5)),
    "int32 to int8": graph(cast("c", I8), cast("y", FLOAT, "c"), x=I32, y=FLOAT),
    "int32 to uint8": graph(cast("c", U8), cast("y", FLOAT, "c"), x=I32, y=FLOAT),
    "uint8 to int8": graph(cast("c", I8), cast("y", FLOAT, "c"), x=U8, y=FLOAT),
    "uint8 to int16": graph(cast("c", I16), cast("y", FLOAT, "c"), x=U8, y=FLOAT),
    "marks that are counted": graph(cast("b", U8), ("Add", "b b", "y"), x=BOOL, y=U8),
    "constants that are computed": graph(
        ("Add", "k k", "s"), cast("f", FLOAT, "s"), ("Mul", "x f", "y"), x=FLOAT, y=FLOAT, k=np.uint8(200)
    ),
    "sizes that are computed": graph(
        ("Shape", "x", "s"), cast("c", I16, "s"), ("Mul", "c c", "p"), cast("y", I64, "p"), x=FLOAT, y=I64, shape=(2,)
    ),
    "a range up to a size": graph(
        ("Size", "x", "s"),
        cast("f", FLOAT, "s"),
        ("Range", "a f k", "y"),
        x=FLOAT,
        y=FLOAT,
        shape=("m",),
        a=np.float32(0),
        k=np.float32(1),
    ),
    "a constant range": graph(
        ("Range", "a b k", "r"),
        ("Add", "x r", "y"),
        x=FLOAT,
        y=FLOAT,
        a=np.float32(1.3),
        b=np.float32(6.4),
        k=np.float32(0.65),
    ),
    "a range from its end": graph(
        ("ReduceMax", "x", "m", {"keepdims": 0}),
        ("Range", "m a k", "y"),
        x=I32,
        y=I32,
        shape=("m",),
        a=np.int32(69990),
        k=np.int32(1),
    ),
    "a range in steps below zero": graph(
        ("ReduceMin", "x", "m", {"keepdims": 0}),
        ("Range", "a b m", "y"),
        x=I32,
        y=I32,
        shape=("m",),
        a=np.int32(0),
        b=np.int32(80000),
    ),
    "equal values": graph(("TopK", "x k", "v y"), x=FLOAT, y=I64, shape=("n", 6), k=np.array([6])),
    "equal values in many columns": graph(
        ("Concat", "x x x x x x x x x x", "c", {"axis": 1}),
        ("TopK", "c k", "v y"),
        x=FLOAT,
        y=I64,
        shape=("n", 60),
        k=np.array([60]),
    ),
    "the last of the largest": graph(
        ("ArgMax", "x", "y", {"axis": 1, "select_last_index": 1}), x=FLOAT, y=I64, shape=("n", 1)
    ),
}


@pytest.mark.parametrize("model", SAME.values(), ids=list(SAME))
def test_the_same_as_onnxruntime(model: onnx.ModelProto, tmp_path: Path) -> None:
    dtype = model.graph.input[0].type.tensor_type.elem_type
    array = np.array([EXTREMES[dtype], EXTREMES[dtype][::-1]], helper.tensor_dtype_to_np_dtype(dtype))
    feeds = {"x": array, "z": np.roll(array, 3)} if len(model.graph.input) > 1 else {"x": array}
    with build(tmp_path, model) as session, open_reference(tmp_path / "model.onnx") as expected:
        found, wanted = session.run(feeds)["y"], expected.run(feeds)["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert found.dtype == wanted.dtype


HIDES = {
    "Relu": graph(("Relu", "x", "y"), x=FLOAT, y=FLOAT),
    "Max": graph(("Max", "x z", "y"), x=FLOAT, y=FLOAT),
    "Clip": graph(("Clip", "x a", "y"), x=HALF, y=HALF, a=np.float16(0)),
    "Exp": graph(("Exp", "x", "y"), x=FLOAT, y=FLOAT),
    "Softmax": graph(("Softmax", "x", "y"), x=FLOAT, y=FLOAT),
    "Greater": graph(("Greater", "x z", "y"), x=FLOAT, y=BOOL),
    "a cast to bool": graph(cast("y", BOOL), x=FLOAT, y=BOOL),
    "behind a product": graph(
        ("MatMul", "x w", "p"), ("Relu", "p", "y"), x=FLOAT, y=FLOAT, w=np.ones((8, 8), np.float32)
    ),
}
CARRIES = {
    "arithmetic": graph(("Mul", "x x", "m"), ("Add", "m k", "y"), x=FLOAT, y=FLOAT, k=np.float32(1)),
    "missing values that are replaced": graph(
        ("IsNaN", "x", "m"), ("Where", "m k x", "f"), ("Relu", "f", "y"), x=FLOAT, y=FLOAT, k=np.float32(7)
    ),
    "its shape": graph(("Shape", "x", "s"), cast("f", FLOAT, "s"), ("Relu", "f", "y"), x=FLOAT, y=FLOAT, shape=(2,)),
}


@pytest.mark.parametrize("model", HIDES.values(), ids=list(HIDES))
def test_hidden_nan_is_refused_in_a_request(model: onnx.ModelProto, tmp_path: Path) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    names = [value.name for value in model.graph.input]
    good = {name: np.full((2, 8), np.inf, dtype) for name in names}
    with build(tmp_path, model) as session:
        session.run(good)
        bad = good[names[-1]].copy()
        bad[1, 3] = np.nan
        with pytest.raises(SignatureError, match=rf"input '{names[-1]}' holds NaN"):
            session.run({**good, names[-1]: bad})
        session.run(good)


@pytest.mark.parametrize("model", CARRIES.values(), ids=list(CARRIES))
def test_nan_that_is_carried_is_computed(model: onnx.ModelProto, tmp_path: Path) -> None:
    feeds = {"x": np.array([[np.nan, *range(7)]], np.float32)}
    with build(tmp_path, model) as session, open_reference(tmp_path / "model.onnx") as expected:
        np.testing.assert_array_equal(session.run(feeds)["y"], expected.run(feeds)["y"])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nan_is_found(dtype: Any) -> None:
    array = np.array([[1, -np.inf, np.inf, -0.0]] * 3, dtype)
    assert not has_nan(array)
    assert not has_nan(array[:0])
    for value in (np.nan, -np.nan):
        array[1, 2] = value
        assert has_nan(array)
        assert has_nan(array[:, 1:3])


def test_checks_are_stored_with_the_compiled_graph(tmp_path: Path) -> None:
    checks = Checks({"x": 5}, frozenset("z"))
    checks.write(tmp_path)
    assert Checks.read(tmp_path) == checks
