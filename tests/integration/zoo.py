"""Small ONNX models, each with one property that a serving backend may handle wrongly."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str]

DTYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}


def value(name: str, shape: Shape, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, list(shape))


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: dict[str, Any] | None = None,
    *,
    opset: int = 18,
    ir: int = 9,
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "zoo", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def identity(shape: Shape, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    return model(nodes, [value("x", shape, dtype)], [value("y", shape, dtype)])


def identities(names: Collection[str]) -> onnx.ModelProto:
    """Graph with an identity for each type; the output is named after it."""
    shape = ("batch", "n")
    nodes = [helper.make_node("Identity", [f"{name}_in"], [name]) for name in names]
    inputs = [value(f"{name}_in", shape, DTYPES[name]) for name in names]
    return model(nodes, inputs, [value(name, shape, DTYPES[name]) for name in names])


def scale(shape: Shape, factor: float = 2.0, *, opset: int = 18) -> onnx.ModelProto:
    """`y = x * factor`."""
    nodes = [helper.make_node("Mul", ["x", "factor"], ["y"])]
    return model(nodes, [value("x", shape)], [value("y", shape)], {"factor": np.float32(factor)}, opset=opset)


def listed_twice() -> onnx.ModelProto:
    """`y = x * 2`, listed twice among the outputs; the batch dimension is -1, as in older exports."""
    proto = scale((-1, 3))
    proto.graph.output.append(proto.graph.output[0])
    proto.graph.name = ""
    return proto


def sum_and_difference() -> onnx.ModelProto:
    nodes = [helper.make_node("Add", ["b", "a"], ["sum"]), helper.make_node("Sub", ["b", "a"], ["difference"])]
    shape = ("batch", 2)
    return model(nodes, [value("b", shape), value("a", shape)], [value("sum", shape), value("difference", shape)])


def good_and_fragile() -> onnx.ModelProto:
    """`good` is `x + 1`; `fragile` picks the rows `x` of a table of 3, and fails for other rows."""
    nodes = [
        helper.make_node("Add", ["x", "one"], ["good"]),
        helper.make_node("Gather", ["table", "x"], ["fragile"]),
    ]
    shape = ("batch", 2)
    outputs = [value("good", shape, TensorProto.INT64), value("fragile", shape)]
    constants = {"one": np.int64(1), "table": np.arange(3, dtype=np.float32)}
    return model(nodes, [value("x", shape, TensorProto.INT64)], outputs, constants)


def flat() -> onnx.ModelProto:
    """Ragged batch: `y = x * 2` of all elements, `ends` of each request, and their `total`, in every response."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"]),
        helper.make_node("Unsqueeze", ["ends_in", "one"], ["ends"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=1),
        helper.make_node("Shape", ["ends"], ["shape"]),
        helper.make_node("Expand", ["sum", "shape"], ["total"]),
    ]
    inputs = [value("x", ("all",)), value("ends_in", ("requests",), TensorProto.INT32)]
    outputs = [
        value("y", ("all",)), value("ends", ("requests", 1), TensorProto.INT32), value("total", ("requests", 1))
    ]  # fmt: skip
    return model(nodes, inputs, outputs, {"one": np.array([1])})


def unnamed() -> onnx.ModelProto:
    """`y` joins `x` and `z`, whose unnamed dimensions vary independently."""
    unknown: Any = [None]
    tensors = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, unknown) for name in ("x", "z", "y")}
    nodes = [helper.make_node("Concat", ["x", "z"], ["y"], axis=0)]
    return model(nodes, [tensors["x"], tensors["z"]], [tensors["y"]])


def with_optional_bias() -> onnx.ModelProto:
    """`y = x + bias`, with a default of 100 for `bias` in the graph."""
    nodes = [helper.make_node("Add", ["x", "bias"], ["y"])]
    inputs = [value("x", (3,)), value("bias", (1,))]
    return model(nodes, inputs, [value("y", (3,))], {"bias": np.array([100], np.float32)})


def with_sequence_output() -> onnx.ModelProto:
    nodes = [helper.make_node("SequenceConstruct", ["x"], ["y"])]
    sequence = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    return model(nodes, [value("x", ("batch", 3))], [sequence])


WORDS = ("", "n\u00e9", "a\0b", "end\0", "x" * 70_000, "\u65e5\u672c")


def words() -> onnx.ModelProto:
    """`word` is the `x`-th of `WORDS`; other texts are returned unchanged."""
    keys: dict[str, Any] = {"keys_int64s": range(len(WORDS)), "values_strings": WORDS, "default_string": "?"}
    nodes = [
        helper.make_node("LabelEncoder", ["x"], ["word"], domain="ai.onnx.ml", **keys),
        helper.make_node("Identity", ["text"], ["same"]),
    ]
    shape = ("batch", 1)
    inputs = [value("x", shape, TensorProto.INT64), value("text", shape, TensorProto.STRING)]
    outputs = [value("word", shape, TensorProto.STRING), value("same", shape, TensorProto.STRING)]
    return with_ml(model(nodes, inputs, outputs))


def zipped(labels: Sequence[str | int] = ("no", "n\u00e9", "yes"), *, text: bool = True) -> onnx.ModelProto:
    """Linear classifier of two numbers as skl2onnx writes it: probabilities in one map per row."""
    linear: dict[str, Any] = {"classlabels_strings" if text else "classlabels_ints": labels}
    linear |= {"coefficients": [1.0, 0.0, 0.0, 1.0, -1.0, -1.0], "intercepts": [0.0, 0.0, 0.0]}
    keys: dict[str, Any] = {"classlabels_strings" if text else "classlabels_int64s": labels}
    nodes = [
        helper.make_node(
            "LinearClassifier", ["X"], ["label", "p"], domain="ai.onnx.ml", post_transform="SOFTMAX", **linear
        ),
        helper.make_node("ZipMap", ["p"], ["probability"], domain="ai.onnx.ml", **keys),
    ]
    key = TensorProto.STRING if text else TensorProto.INT64
    rows = helper.make_sequence_type_proto(
        helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    )
    outputs = [value("label", ("batch",), key), helper.make_value_info("probability", rows)]
    return with_ml(model(nodes, [value("X", ("batch", 2))], outputs), only=True)


def with_ml(proto: onnx.ModelProto, *, only: bool = False) -> onnx.ModelProto:
    """Add the import of classic machine learning operators; some exports import no others."""
    if only:
        del proto.opset_import[:]
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return proto


def with_tensor_and_sequence() -> onnx.ModelProto:
    """`y` is `x + x`, `parts` a sequence of it."""
    nodes = [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("SequenceConstruct", ["y"], ["parts"])]
    shape = ("batch", 3)
    parts = helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)
    return model(nodes, [value("x", shape)], [value("y", shape), parts])


def add(store: Path, name: str, proto: onnx.ModelProto, config: str | None = None, *, version: int = 1) -> Path:
    """Write a model; return its version folder."""
    folder = store / name / str(version)
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())  # unchecked: some are meant to be broken
    if config is not None:
        (store / name / "config.pbtxt").write_text(config)
    return folder


def add_external(store: Path, name: str, location: str = "weights.bin") -> Path:
    """Write a model with weights in another file; return its version folder."""
    proto = model(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [value("x", ("batch", 4))],
        [value("y", ("batch", 4))],
        {"w": np.arange(4, dtype=np.float32)},
    )
    tensor = proto.graph.initializer[0]
    (raw, tensor.raw_data) = (tensor.raw_data, b"")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="length", value=str(len(raw)))
    folder = add(store, name, proto)
    (folder / location).write_bytes(raw)
    return folder


def build(store: Path) -> Path:
    """Models that must work, most of them without any configuration."""
    add(store, "types", identities(DTYPES))
    for name in ("BF16", "BYTES", "FP32"):
        add(store, f"identity_{name.lower()}", identity(("batch", "n"), DTYPES[name]))
    add(store, "bare", scale(("batch", 3)))
    add(store, "whole", scale((2, 3)))
    add(store, "words", words(), "max_batch_size: 8")
    add(store, "zipped", zipped())
    add(store, "parts", with_tensor_and_sequence())
    add(store, "scalar", scale(()))
    add(store, "batch_of_scalars", scale(("batch",)))
    add(store, "unnamed", unnamed(), 'input { name: "x" dims: [-1] } input { name: "z" dims: [-1] }')
    add(store, "openvino_scalar", scale(()), 'parameters { key: "xrt" value { string_value: "openvino" } }')
    xrt = 'parameters { key: "xrt" value { string_value: "openvino" } }'
    add(store, "openvino_bf16", identity(("batch", "n"), TensorProto.BFLOAT16), xrt)
    add(store, "fragile", good_and_fragile())
    add(store, "eight", identity(("batch", 1, 2, 1, 2, 1, 2, 1)))
    add(store, "pair", sum_and_difference())
    add(store, "listed_twice", listed_twice())
    optional = 'input { name: "x" } input { name: "bias" optional: true }'
    add(store, "optional", with_optional_bias(), optional)
    add(store, "labeled", scale(("batch", 3)))
    (store / "labeled" / "labels.txt").write_text("red\ngreen\nblue\n")
    platform = 'platform: "onnxruntime_onnx" default_model_filename: "net.onnx"'
    folder = add(store, "platform", scale(("batch", 3)), platform)
    (folder / "model.onnx").rename(folder / "net.onnx")
    backend = 'backend: "onnxruntime" max_batch_size: 16 instance_group { count: 1 kind: KIND_CPU }'
    add(store, "backend", scale(("batch", 3)), backend)
    accelerator = 'cpu_execution_accelerator { name: "openvino" parameters { key: "num_of_threads" value: "1" } }'
    add(store, "openvino", scale(("batch", 3)), f"optimization {{ execution_accelerators {{ {accelerator} }} }}")
    add(store, "xrt", scale(("batch", 3)), 'parameters { key: "xrt" value { string_value: "openvino" } }')
    add(store, "versions", scale(("batch", 3), 10), "version_policy { all {} }", version=1)
    add(store, "versions", scale(("batch", 3), 20), None, version=2)
    add_external(store, "external")
    folder = add_external(store, "folder")
    (store / "held").mkdir()
    (folder / "model.onnx").rename(store / "held" / "model.onnx")
    (folder / "weights.bin").rename(store / "held" / "weights.bin")
    (store / "held").rename(folder / "model.onnx")
    return store


def slow() -> onnx.ModelProto:
    """`SUM` of as many products of 256x256 matrices as `ROUNDS` says; batches of one row."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state_in", "weight"], ["state_out"]),
            helper.make_node("Identity", ["go_in"], ["go_out"]),
        ],
        "body",
        [value("round", (), TensorProto.INT64), value("go_in", (), TensorProto.BOOL), value("state_in", (256, 256))],
        [value("go_out", (), TensorProto.BOOL), value("state_out", (256, 256))],
    )
    nodes = [
        helper.make_node("ReduceMax", ["ROUNDS"], ["rounds"], keepdims=0),
        helper.make_node("Loop", ["rounds", "", "weight"], ["state"], body=body),
        helper.make_node("ReduceSum", ["state"], ["sum"], keepdims=0),
        helper.make_node("Shape", ["ROUNDS"], ["shape"]),
        helper.make_node("Expand", ["sum", "shape"], ["SUM"]),
    ]
    inputs = [value("ROUNDS", ("batch", 1), TensorProto.INT64)]
    return model(nodes, inputs, [value("SUM", ("batch", 1))], {"weight": np.eye(256, dtype=np.float32)})


def endless() -> onnx.ModelProto:
    """A loop that never ends."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go_in"], ["go_out"]), helper.make_node("Add", ["s_in", "s_in"], ["s_out"])],
        "body",
        [value("i", (), TensorProto.INT64), value("go_in", (), TensorProto.BOOL), value("s_in", ("batch", 3))],
        [value("go_out", (), TensorProto.BOOL), value("s_out", ("batch", 3))],
    )
    nodes = [helper.make_node("Loop", ["", "go", "x"], ["y"], body=body)]
    return model(nodes, [value("x", ("batch", 3))], [value("y", ("batch", 3))], {"go": np.array(True)})


def integer_product() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A product of int8 at the ends of its range, and a feed whose sums exceed 16 bits."""
    generator = np.random.default_rng(0)
    constants = {
        "scale": np.array(1 / 127, np.float32),
        "middle": np.array(128, np.uint8),
        "weight": generator.integers(-127, 128, (64, 16)).astype(np.int8),
        "zero": np.array(0, np.int8),
    }
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale", "middle"], ["quantized"]),
        onnx.helper.make_node("DequantizeLinear", ["quantized", "scale", "middle"], ["left"]),
        onnx.helper.make_node("DequantizeLinear", ["weight", "scale", "zero"], ["right"]),
        onnx.helper.make_node("MatMul", ["left", "right"], ["y"]),
    ]
    graph = model(nodes, [value("x", ("n", 64))], [value("y", ("n", 16))], constants)
    return graph, {"x": generator.uniform(0.8, 1, (4, 64)).astype(np.float32)}


DELAY = "dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: [8] }"


def add_lookup(store: Path) -> None:
    """Add `lookup`: batches of indices into ten numbers; an index of 10 fails at run time."""
    shape = ("batch", "length")
    nodes = [helper.make_node("Gather", ["table", "INDEX"], ["VALUE"])]
    inputs, outputs = [value("INDEX", shape, TensorProto.INT64)], [value("VALUE", shape)]
    proto = model(nodes, inputs, outputs, {"table": np.arange(10, dtype=np.float32) * 10})
    add(store, "lookup", proto, f'backend: "graphkiln" max_batch_size: 8 {DELAY}')
