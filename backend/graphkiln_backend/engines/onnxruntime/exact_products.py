"""Rewrite graphs with int8 weights so that ONNX Runtime multiplies them exactly on x86 without VNNI.

There the kernel for uint8 activations and int8 weights saturates sums at 16 bits, an error of up to 45%; the kernel for
two uint8 tensors does not. ONNX Runtime's `session.x64quantprecision` converts int8 weights to uint8, but only during
optimization, which the reference of the proof disables; it refuses weights with two readers, and int8 activations,
which are not affected. So products that the file stores as integers are converted here, with the same sums:
`(w + 128) - (zero + 128) = w - zero`.

Source: seen with ONNX Runtime 1.32; its `Avx2WeightS8ToU8Transformer`.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    import onnx
else:
    onnx = LazyModule("onnx")  # few graphs have products of integers

_UINT8, _INT8 = 2, 3  # source: `onnx.TensorProto.DataType`
_OFFSET = 128
_QUANTIZING = ("DynamicQuantizeLinear", "QuantizeLinear")  # their results are uint8 unless the zero point differs
# Products of integers that saturate; `ConvInteger` does not. Indices of their inputs: activation, zero point of the
# activation, weight, zero point of the weight. Source: operators of ONNX 1.23 and ONNX Runtime 1.32.
_PRODUCTS = {
    "QLinearMatMul": (0, 2, 3, 5),
    "QLinearConv": (0, 2, 3, 5),
    "QGemm": (0, 2, 3, 5),
    "MatMulInteger": (0, 2, 1, 3),
    "MatMulIntegerToFloat": (0, 4, 1, 5),
    "DynamicQuantizeMatMul": (0, 0, 1, 3),
    "QAttention": (0, 6, 1, 7),
}
_NAMES = re.compile("|".join(_PRODUCTS).encode())


def has_integer_products(graph_path: Path) -> bool:
    """Return True if a file contains products of integers, or a weight or name that reads like one."""
    if not graph_path.is_file() or not graph_path.stat().st_size:
        return False  # ONNX Runtime reports the error
    with graph_path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _NAMES.search(content) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactGraph:
    """A graph in memory.

    Attributes:
        model: Serialized graph; weights that were not converted stay in the files beside the graph.
        signed: Whether a product has int8 activations, which `session.x64quantprecision` refuses.
    """

    model: bytes
    signed: bool


def make_exact(graph_path: Path) -> ExactGraph:
    """Read a graph, convert weights of uint8 activations to uint8, and copy int8 weights that are read twice.

    Raises:
        LoweringError: The file is damaged.
    """
    try:
        model = onnx.load(graph_path, load_external_data=False)
    except DecodeError as error:
        raise LoweringError(f"ONNX Runtime cannot load {graph_path}", attempts=(str(error),)) from error
    types = _declared_types(model.graph)
    weights = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type == _INT8}
    converted, signed = dict[str, onnx.TensorProto](), False
    for node in model.graph.node:
        if node.op_type not in _PRODUCTS:
            continue
        activation, activation_zero, weight, weight_zero = _PRODUCTS[node.op_type]
        if node.input[weight] not in weights or _input(node, weight_zero) not in {"", *weights}:
            continue  # no int8 weight, or its zero point is computed
        if types.get(_input(node, activation_zero), types.get(node.input[activation])) == _INT8:
            signed = True
            continue
        node.input.extend("" for _ in range(weight_zero + 1 - len(node.input)))
        for index in (weight, weight_zero):
            name = node.input[index]
            if name not in converted:
                converted[name] = _to_uint8(weights.get(name), name, graph_path.parent)
            node.input[index] = converted[name].name
    model.graph.initializer.extend(converted.values())
    copy_shared_weights(model.graph)
    return ExactGraph(model=model.SerializeToString(), signed=signed)


def _declared_types(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the types of values, as far as the graph declares them."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in _QUANTIZING:
            types[node.output[0]] = types.get(_input(node, 2), _UINT8)
    return types


def _to_uint8(tensor: onnx.TensorProto | None, name: str, folder: Path) -> onnx.TensorProto:
    if tensor is None:  # an omitted zero point is 0
        return onnx.numpy_helper.from_array(np.array(_OFFSET, np.uint8), "zero/uint8")
    if onnx.external_data_helper.uses_external_data(tensor):
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    values = onnx.numpy_helper.to_array(tensor).astype(np.int16) + _OFFSET
    return onnx.numpy_helper.from_array(values.astype(np.uint8), f"{name}/uint8")


def _input(node: onnx.NodeProto, index: int) -> str:
    return node.input[index] if index < len(node.input) else ""


def copy_shared_weights(graph: onnx.GraphProto) -> None:
    """Give each reader of an int8 weight its own copy, since ONNX Runtime refuses to convert one twice.

    Quantizers write such graphs: one zero point for many weights, one weight for two products. External weights stay in
    their file, which is then named twice.
    """
    given = {value.name for value in graph.input}
    weights = {
        tensor.name: tensor for tensor in graph.initializer if tensor.data_type == _INT8 and tensor.name not in given
    }
    # Each reader gets its own DequantizeLinear first: ONNX Runtime would copy the node, but not its weight.
    dequantized = {
        node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in weights
    }
    reads = Counter(output.name for output in graph.output)
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        for index, name, copy_name in _repeated_reads(node, dequantized, reads):
            own = graph.node.add()
            own.CopyFrom(dequantized[name])
            node.input[index] = own.output[0] = own.name = copy_name
        graph.node.append(node)
    reads = Counter[str]()
    for node in graph.node:
        for index, name, copy_name in _repeated_reads(node, weights, reads):
            copy = graph.initializer.add()
            copy.CopyFrom(weights[name])
            node.input[index] = copy.name = copy_name


def _repeated_reads(node: onnx.NodeProto, names: Collection[str], reads: Counter[str]) -> list[tuple[int, str, str]]:
    """Count the reads of some values by a node; for each input that reads one again, return index, name, new name."""
    repeated = []
    for index, name in enumerate(node.input):
        if name in names:
            reads[name] += 1
            if reads[name] > 1:
                repeated.append((index, name, f"{name}/{reads[name]}"))
    return repeated
