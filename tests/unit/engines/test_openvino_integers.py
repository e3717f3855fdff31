"""Where OpenVINO would compute integers of more than 32 bits: refused, at the load or with the request."""

from __future__ import annotations

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

from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.engines.openvino import OpenVinoEngine
from graphkiln_backend.engines.openvino_integers import find_limits, read_limits, write_limits
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError, SignatureError

CONFIG = SessionConfig(engine="openvino", device=CPU, threads=1, spin=False, reason="test")
TABLE = {"table": np.ones((100, 8), np.float32)}
INT64, INT32, UINT64 = TensorProto.INT64, TensorProto.INT32, TensorProto.UINT64
FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL


def graph(
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
    return graph(("Loop", "times go x", "y", {"body": body}), constants={"times": 9, "go": True})


GATHERED = (FLOAT, ("n", 4, 8))
WHOLE = {
    "nothing is computed": graph(("Identity", "x", "y")),
    "ids choose rows": graph(("Gather", "table x", "y"), constants=TABLE, y=GATHERED),
    "a hash that only chooses": graph(
        ("Mul", "x k", "h"), ("Gather", "table h", "y"), constants={**TABLE, "k": 99999}, y=GATHERED
    ),
    "positions by the sum of a mask": graph(
        ("CumSum", "x one", "s"),
        ("Mul", "s x", "p"),
        ("Gather", "table p", "y"),
        constants={**TABLE, "one": 1},
        y=GATHERED,
    ),
    "the best of four": graph(
        ("ArgMax", "x", "i", {"axis": 1}), ("Mul", "i k", "y"), constants={"k": 91}, x=FLOAT, y=(INT64, ("n", 1))
    ),
    "a number between limits": graph(
        ("Clip", "x low high", "c"),
        ("Cast", "c", "y", {"to": INT64}),
        constants={"low": np.float32(0), "high": np.float32(5)},
        x=FLOAT,
    ),
    "a mask of floats": graph(
        ("Cast", "x", "f", {"to": FLOAT}), ("Sub", "one f", "y"), constants={"one": np.float32(1)}, y=(FLOAT, ("n", 4))
    ),
    "the largest of a window": graph(
        ("Unsqueeze", "x one", "u"),
        ("MaxPool", "u", "y", {"kernel_shape": [2]}),
        constants={"one": [1]},
        x=FLOAT,
        y=(FLOAT, ("n", 1, 3)),
    ),
    "one of several": graph(
        ("OneHot", "x depth values", "y"),
        constants={"depth": 5, "values": [0, 7]},
        y=(INT64, ("n", 4, 5)),
    ),
    "sizes of tensors": graph(("Shape", "x", "s"), ("ReduceProd", "s", "p", {"keepdims": 0}), ("Expand", "p s", "y")),
}
LIMITED = {
    "a sum": (graph(("Add", "x z", "y")), {"x": 2**23, "z": 2**23}),
    "a sum of words": (graph(("Add", "x z", "y"), x=INT32, y=(INT32, ("n", 4))), {"x": 2**23, "z": 2**23}),
    "a difference": (graph(("Sub", "x k", "y"), constants={"k": 7}), {"x": 2**23}),
    "a product with a small number": (graph(("Mul", "x k", "y"), constants={"k": 8}), {"x": 2**21}),
    "a remainder": (graph(("Mod", "x k", "y"), constants={"k": 7}), {"x": 2**24}),
    "a comparison with padding": (graph(("Equal", "x k", "y"), constants={"k": 1}, y=(BOOL, ("n", 4))), {"x": 2**24}),
    "a product of indices between limits": (
        graph(("Clip", "x low high", "c"), ("Mul", "c c", "y"), constants={"low": -1000, "high": 1000}),
        {"x": 2**24},
    ),
    "a sum of four": (graph(("ReduceSum", "x one", "y"), constants={"one": [1]}, y=(INT64, ("n", 1))), {"x": 2**22}),
    "a product of matrices": (graph(("MatMul", "x w", "y"), constants={"w": np.full((4, 4), 3)}), {"x": 2**20}),
    "positions of what is no padding, which are an output, too": (
        graph(
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
    "Multiply": graph(("Mul", "x z", "y")),
    "a hash": graph(("Mul", "x k", "h"), ("Mod", "h m", "y"), constants={"k": 2654435, "m": 1000}),
    "a comparison": graph(("Mul", "x z", "p"), ("Greater", "p k", "y"), constants={"k": 5}, y=(BOOL, ("n", 4))),
    "a float": graph(("Mul", "x z", "p"), ("Cast", "p", "y", {"to": FLOAT}), y=(FLOAT, ("n", 4))),
    "MatMul": graph(("Transpose", "z", "t"), ("MatMul", "x t", "y"), y=(INT64, ("n", "n"))),
    "Power": graph(("Pow", "x k", "y"), constants={"k": 2}),
    "a shift": graph(
        ("BitShift", "x k", "y", {"direction": "LEFT"}), constants={"k": np.uint64(9)}, x=UINT64, y=(UINT64, ("n", 4))
    ),
    "ReduceProd": graph(("ReduceProd", "x one", "y"), constants={"one": [1]}, y=(INT64, ("n", 1))),
    "CumSum": graph(("CumSum", "x zero", "y"), constants={"zero": 0}),
    "Convert": graph(("Cast", "x", "y", {"to": INT64}), x=FLOAT),
    "an addition at places": graph(
        ("ScatterND", "x at z", "y", {"reduction": "add"}), constants={"at": [[0]]}, y=(INT64, ("n", 4))
    ),
    "a large offset": graph(("Add", "x k", "y"), constants={"k": 2**24}),
    "a loop": looping(),
}


@pytest.mark.parametrize("model", WHOLE.values(), ids=list(WHOLE))
def test_what_common_graphs_do_is_not_limited(model: onnx.ModelProto, tmp_path: Path) -> None:
    assert limits_of(model, tmp_path) == {}


@pytest.mark.parametrize(("model", "limits"), LIMITED.values(), ids=list(LIMITED))
def test_inputs_are_limited_so_that_no_result_is_cut_off(
    model: onnx.ModelProto, limits: dict[str, int], tmp_path: Path
) -> None:
    assert limits_of(model, tmp_path) == limits


@pytest.mark.parametrize("model", REFUSED.values(), ids=list(REFUSED))
def test_what_may_be_cut_off_is_refused(model: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=r"computes integers in 32 bits or FP32; .* may need larger ones"):
        limits_of(model, tmp_path)


def test_a_mask_holds_zero_and_one(tmp_path: Path) -> None:
    mask, y = zoo.value("attention_mask", ("n", 4), INT64), zoo.value("y", ("n", 4), INT64)
    square = helper.make_node("Mul", ["attention_mask", "attention_mask"], ["y"])
    assert limits_of(zoo.model([square], [mask], [y]), tmp_path) == {"attention_mask": 2**12}


def build(folder: Path, model: onnx.ModelProto, compiled: Path | None = None) -> Session:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return OpenVinoEngine().build(path, CONFIG, compiled)


def rows(*numbers: int) -> AnyArray:
    return np.array([numbers], np.int64)


def reference(model: onnx.ModelProto, feeds: Mapping[str, AnyArray]) -> Sequence[int]:
    found: list[list[int]] = np.asarray(ReferenceEvaluator(model).run(None, dict(feeds))[0]).tolist()
    return found[0]


@pytest.mark.parametrize("kept", ["as compiled", "before there were limits", "no"])
def test_a_request_beyond_the_limit_is_refused_and_one_below_it_is_right(tmp_path: Path, kept: str) -> None:
    model, limits = LIMITED["a product of matrices"]
    compiled = None if kept == "no" else tmp_path / "compiled"
    onnx.save(model, tmp_path / "model.onnx")
    if compiled:
        compiled.mkdir()
        OpenVinoEngine().compile(tmp_path / "model.onnx", CONFIG, compiled)
        if kept != "as compiled":
            (compiled / "limits.json").unlink()
    largest = limits["x"] - 1
    with build(tmp_path, model, compiled) as session:
        most = {"x": rows(*[largest] * 4)}
        assert session.run(most)["y"][0].tolist() == reference(model, most)
        with pytest.raises(SignatureError, match=rf"input 'x' does not fit.*expected -{largest} to {largest}"):
            session.run({"x": rows(0, 0, 0, largest + 1)})


def test_limits_are_kept_beside_what_was_compiled(tmp_path: Path) -> None:
    assert read_limits(tmp_path) is None
    write_limits(tmp_path, {"x": 5})
    assert read_limits(tmp_path) == {"x": 5}
