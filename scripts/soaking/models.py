"""Models of the soak: small, of different kinds, each with a reference computed without the server."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from graphkiln_backend.graph.dtypes import AnyArray

Arrays = Mapping[str, AnyArray]
Tensor = tuple[str, tuple[int, ...]]  # datatype, and shape without the batch dimension

REPOSITORY = Path(__file__).resolve().parents[2]
DIGITS = REPOSITORY / "model_repository" / "digits"
DIGIT_IMAGES = REPOSITORY / "docs" / "digits"
DIGIT_LABELS = tuple((DIGITS / "1" / "labels.txt").read_text().split())

_TYPES = {"FP32": TensorProto.FLOAT, "INT64": TensorProto.INT64, "BYTES": TensorProto.STRING}
_ONE_INSTANCE = "instance_group { count: 1 kind: KIND_CPU }"
_ROW: Tensor = ("FP32", (128,))
_INTEGERS: Tensor = ("INT64", (4,))
_TEXTS: Tensor = ("BYTES", (3,))
# Absolute and relative tolerance: far above rounding errors, far below the difference of other rows or versions.
TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class SoakModel:
    """A served model and its reference.

    Attributes:
        name: Model name.
        inputs: Datatype and shape without the batch dimension, by input name.
        largest_batch: Maximum rows in one request.
        reference: Computes the outputs from version and inputs.
        config: config.pbtxt, or None if the folder has one.
        graph: Builds the graph of a version, or None if the folder has one.
        versions: Initial versions.
        integers: Range of random integers.
    """

    name: str
    inputs: Mapping[str, Tensor]
    largest_batch: int
    reference: Callable[[int, Arrays], dict[str, AnyArray]]
    config: str | None = None
    graph: Callable[[int], onnx.ModelProto] | None = None
    versions: tuple[int, ...] = (1,)
    integers: tuple[int, int] = (-(2**40), 2**40)

    def feeds(self, random: np.random.Generator, rows: int) -> dict[str, AnyArray]:
        """Random inputs with a batch dimension."""
        return {name: self._random(random, dtype, (rows, *shape)) for name, (dtype, shape) in self.inputs.items()}

    def _random(self, random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> AnyArray:
        if dtype == "FP32":
            return random.normal(size=shape).astype(np.float32)
        if dtype == "INT64":
            return random.integers(*self.integers, size=shape)
        return _texts(random, shape)


def digit_labels(version: int) -> tuple[str, ...]:
    """Labels of a version of `digits`: those of the first version, or reversed."""
    turn = version % (len(DIGIT_LABELS) - 1) + 1 if version > 1 else 0
    return DIGIT_LABELS[turn:] + DIGIT_LABELS[:turn]


def factor(version: int) -> float:
    """Factor of a version of `scaled`."""
    return float(version + 1)


def scaled_graph(version: int) -> onnx.ModelProto:
    """`y = x * factor(version)`."""
    nodes = [helper.make_node("Mul", ["x", "factor"], ["y"])]
    return _graph(nodes, {"x": _ROW}, {"y": _ROW}, {"factor": np.float32(factor(version))})


def _several_graph(_: int) -> onnx.ModelProto:
    """`sum`, `difference` and `echo` of two integer inputs and one text input."""
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("Sub", ["a", "b"], ["difference"]),
        helper.make_node("Identity", ["text"], ["echo"]),
    ]
    outputs = {"sum": _INTEGERS, "difference": _INTEGERS, "echo": _TEXTS}
    return _graph(nodes, {"a": _INTEGERS, "b": _INTEGERS, "text": _TEXTS}, outputs)


def _fixed_graph(_: int) -> onnx.ModelProto:
    """`y = x + 1` with a fixed shape."""
    nodes = [helper.make_node("Add", ["x", "one"], ["y"])]
    return _graph(nodes, {"x": ("FP32", (3,))}, {"y": ("FP32", (3,))}, {"one": np.float32(1)})


def _looped_graph(_: int) -> onnx.ModelProto:
    """`count = rounds`, computed in a loop: as slow as requested."""
    integer, boolean = TensorProto.INT64, TensorProto.BOOL
    body = helper.make_graph(
        [helper.make_node("Add", ["count_in", "one"], ["count_out"]), helper.make_node("Identity", ["go_in"], ["go"])],
        "body",
        [
            helper.make_tensor_value_info("round", integer, []),
            helper.make_tensor_value_info("go_in", boolean, []),
            helper.make_tensor_value_info("count_in", integer, []),
        ],
        [helper.make_tensor_value_info("go", boolean, []), helper.make_tensor_value_info("count_out", integer, [])],
    )
    nodes = [
        helper.make_node("ReduceMax", ["rounds"], ["most"], keepdims=0),
        helper.make_node("Loop", ["most", "", "zero"], ["counted"], body=body),
        helper.make_node("Shape", ["rounds"], ["shape"]),
        helper.make_node("Expand", ["counted", "shape"], ["count"]),
    ]
    constants = {"zero": np.int64(0), "one": np.int64(1)}
    return _graph(nodes, {"rounds": ("INT64", (1,))}, {"count": ("INT64", (1,))}, constants)


def _graph(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    constants: Mapping[str, Any] | None = None,
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "soak", _values(inputs), _values(outputs), tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _values(tensors: Mapping[str, Tensor]) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, _TYPES[dtype], ["batch", *shape])
        for name, (dtype, shape) in tensors.items()
    ]


def _texts(random: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
    texts = [f"{number:x}\N{SNOWMAN}".encode() * int(number % 3) for number in random.integers(0, 2**60, shape).ravel()]
    return np.array(texts, dtype=object).reshape(shape)


@cache
def _digits_session() -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(DIGITS / "1" / "model.onnx", options, providers=["CPUExecutionProvider"])


def digits_reference(_: int, feeds: Arrays) -> dict[str, AnyArray]:
    """Compute the digits model with ONNX Runtime in this process."""
    return {"OUTPUT_0": _digits_session().run(None, {"INPUT_0": feeds["INPUT_0"]})[0]}


def _several_reference(_: int, feeds: Arrays) -> dict[str, AnyArray]:
    a, b = (feeds[name].astype(np.int64) for name in ("a", "b"))
    return {"sum": a + b, "difference": a - b, "echo": feeds["text"]}


MODELS = (
    SoakModel(name="digits", inputs={"INPUT_0": ("FP32", (1, 32, 32))}, largest_batch=32, reference=digits_reference),
    SoakModel(
        name="scaled",
        inputs={"x": _ROW},
        largest_batch=256,
        reference=lambda version, feeds: {"y": feeds["x"].astype(np.float32) * np.float32(factor(version))},
        config='backend: "graphkiln" max_batch_size: 256 version_policy { all {} }'
        f" dynamic_batching {{ max_queue_delay_microseconds: 500 }} {_ONE_INSTANCE}",
        graph=scaled_graph,
        versions=(1, 2),
    ),
    SoakModel(
        name="several",
        inputs={"a": _INTEGERS, "b": _INTEGERS, "text": _TEXTS},
        largest_batch=16,
        reference=_several_reference,
        config=f'backend: "onnxruntime" max_batch_size: 16 {_ONE_INSTANCE}',
        graph=_several_graph,
    ),
    SoakModel(
        name="fixed",
        inputs={"x": ("FP32", (3,))},
        largest_batch=8,
        reference=lambda _, feeds: {"y": feeds["x"].astype(np.float32) + np.float32(1)},
        config=f"max_batch_size: 8 {_ONE_INSTANCE}",
        graph=_fixed_graph,
    ),
    SoakModel(
        name="looped",
        inputs={"rounds": ("INT64", (1,))},
        largest_batch=1,
        reference=lambda _, feeds: {"count": feeds["rounds"]},
        config=f'backend: "graphkiln" max_batch_size: 1 {_ONE_INSTANCE}',
        graph=_looped_graph,
        integers=(0, 200),
    ),
)
MODELS_BY_NAME = {model.name: model for model in MODELS}


def build_store(store: Path) -> None:
    """Write all models into an empty model store."""
    store.mkdir(parents=True)
    for model in MODELS:
        if model.graph is None:
            shutil.copytree(DIGITS, store / model.name)
            continue
        for version in model.versions:
            write_version(store / model.name / str(version), model.graph(version))
        (store / model.name / "config.pbtxt").write_text(model.config or "")


def write_version(folder: Path, graph: onnx.ModelProto | bytes) -> None:
    """Add a version to a store atomically."""
    folder.parent.mkdir(exist_ok=True)
    temporary = folder.parents[2] / f"{folder.parent.name}-{folder.name}.tmp"
    temporary.mkdir()
    content = graph if isinstance(graph, bytes) else graph.SerializeToString()
    (temporary / "model.onnx").write_bytes(content)
    temporary.rename(folder)


def difference(expected: Arrays, got: Arrays) -> str:
    """Describe why an answer is wrong; empty if it is correct."""
    if expected.keys() != got.keys():
        return f"outputs {sorted(got)} instead of {sorted(expected)}"
    for name, array in expected.items():
        answer = np.asarray(got[name])
        if answer.shape != array.shape:
            return f"{name} has the shape {answer.shape} instead of {array.shape}"
        same = _close(array, answer) if array.dtype.kind == "f" else bool((answer == array).all())
        if not same:
            return f"{name} is {answer.ravel()[:4]} instead of {array.ravel()[:4]}"
    return ""


def _close(expected: AnyArray, answer: AnyArray) -> bool:
    return bool(np.allclose(expected, answer, rtol=TOLERANCE, atol=TOLERANCE))
