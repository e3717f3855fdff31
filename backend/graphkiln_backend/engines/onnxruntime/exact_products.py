"""Graphs as ONNX Runtime multiplies their int8 weights exactly on x86 without VNNI.

There the kernel for uint8 activations and int8 weights cuts sums off at 16 bits, an error of up to 45%; that for two
uint8 does not. ONNX Runtime's `session.x64quantprecision` turns int8 weights into uint8, but only where it optimizes,
which the reference of the proof does not; it refuses weights with two readers, and activations in int8, which need none
of it. So products that the file holds as integers are turned here, with the same sums:
`(w + 128) - (zero + 128) = w - zero`.
Source: seen with ONNX Runtime 1.32; its `Avx2WeightS8ToU8Transformer`.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Container, Iterator
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
_DEQUANTIZE = "DequantizeLinear"
# Operators whose results are uint8 where no zero point says otherwise.
_MAKES_UNSIGNED = ("DynamicQuantizeLinear", "QuantizeLinear")


@dataclass(frozen=True, slots=True)
class _Places:
    """Indices of a product's inputs: activation and weight, each with its zero point."""

    activation: int
    activation_zero: int
    weight: int
    weight_zero: int


# Products of integers that are cut off; `ConvInteger` is not. Source: operators of ONNX 1.23 and ONNX Runtime 1.32.
_PRODUCTS = {
    "QLinearMatMul": _Places(0, 2, 3, 5),
    "QLinearConv": _Places(0, 2, 3, 5),
    "QGemm": _Places(0, 2, 3, 5),
    "MatMulInteger": _Places(0, 2, 1, 3),
    "MatMulIntegerToFloat": _Places(0, 4, 1, 5),
    "DynamicQuantizeMatMul": _Places(0, 0, 1, 3),
    "QAttention": _Places(0, 6, 1, 7),
}
_NAMES = re.compile("|".join(_PRODUCTS).encode())


def has_integer_products(graph_path: Path) -> bool:
    """Return true where a file holds products of integers, or a weight or name that reads like one."""
    if not graph_path.is_file() or not graph_path.stat().st_size:
        return False  # an error that ONNX Runtime reports
    with graph_path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _NAMES.search(content) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactGraph:
    """A graph in memory.

    Attributes:
        model: Serialized; weights that were not turned stay in the files beside the graph.
        signed: Whether a product has activations in int8: ONNX Runtime's own way would refuse it.
    """

    model: bytes
    signed: bool


def make_exact(graph_path: Path) -> ExactGraph:
    """Read a graph with uint8 weights for uint8 activations, and no int8 weight that is read twice.

    Raises:
        LoweringError: The file is damaged.
    """
    model = _read(graph_path)
    types = _types(model.graph)
    weights = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type == _INT8}
    turned, signed = dict[str, onnx.TensorProto](), False
    for node, places in _products(model.graph, weights):
        if _activation_type(node, places, types) == _INT8:
            signed = True
        else:
            _turn(node, places, weights, turned, graph_path.parent)
    model.graph.initializer.extend(turned.values())
    unshare(model.graph)
    return ExactGraph(model=model.SerializeToString(), signed=signed)


def _read(graph_path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(graph_path, load_external_data=False)
    except DecodeError as error:
        raise LoweringError(f"ONNX Runtime cannot load {graph_path}", attempts=(str(error),)) from error


def _activation_type(node: onnx.NodeProto, places: _Places, types: dict[str, int]) -> int | None:
    zero, activation = _input(node, places.activation_zero), _input(node, places.activation)
    return types.get(zero, types.get(activation))


def _products(graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto]) -> Iterator[tuple[onnx.NodeProto, _Places]]:
    """Those of the main graph that read an int8 weight, and no zero point that is computed."""
    for node in graph.node:
        places = _PRODUCTS.get(node.op_type)
        if places and node.input[places.weight] in weights and _input(node, places.weight_zero) in {"", *weights}:
            yield node, places


def _types(graph: onnx.GraphProto) -> dict[str, int]:
    """Types of values, as far as the graph declares them."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in _MAKES_UNSIGNED:
            types[node.output[0]] = types.get(_input(node, 2), _UINT8)
    return types


def _turn(
    node: onnx.NodeProto,
    places: _Places,
    weights: dict[str, onnx.TensorProto],
    turned: dict[str, onnx.TensorProto],
    folder: Path,
) -> None:
    node.input.extend("" for _ in range(places.weight_zero + 1 - len(node.input)))
    for place in (places.weight, places.weight_zero):
        name = node.input[place]
        if name not in turned:
            turned[name] = _unsigned(weights.get(name), name, folder)
        node.input[place] = turned[name].name


def _unsigned(tensor: onnx.TensorProto | None, name: str, folder: Path) -> onnx.TensorProto:
    if tensor is None:  # a zero point that is not given is zero
        return onnx.numpy_helper.from_array(np.array(_OFFSET, np.uint8), "zero/uint8")
    if onnx.external_data_helper.uses_external_data(tensor):
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    values = onnx.numpy_helper.to_array(tensor).astype(np.int16) + _OFFSET
    return onnx.numpy_helper.from_array(values.astype(np.uint8), f"{name}/uint8")


def _input(node: onnx.NodeProto, place: int) -> str:
    return node.input[place] if place < len(node.input) else ""


def unshare(graph: onnx.GraphProto) -> None:
    """Give each reader of an int8 weight a copy: ONNX Runtime refuses to turn one into uint8 twice.

    Quantizers write such graphs: one zero point for many weights, one weight for two products. Weights in other files
    stay there, and are named twice.
    """
    given = {value.name for value in graph.input}
    weights = {
        tensor.name: tensor for tensor in graph.initializer if tensor.data_type == _INT8 and tensor.name not in given
    }
    _dequantize_for_each_reader(graph, weights)
    _copy_for_each_reader(graph, weights)


def _dequantize_for_each_reader(graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto]) -> None:
    """ONNX Runtime would do it itself, with the same weight for all."""
    made = {node.output[0]: node for node in graph.node if node.op_type == _DEQUANTIZE and node.input[0] in weights}
    seen = Counter(output.name for output in graph.output)
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.extend(_own_dequantizers(node, made, seen))
        graph.node.append(node)


def _own_dequantizers(
    node: onnx.NodeProto, made: dict[str, onnx.NodeProto], seen: Counter[str]
) -> Iterator[onnx.NodeProto]:
    for place, name in _reads_again(node, made, seen):
        copy = onnx.NodeProto()
        copy.CopyFrom(made[name])
        node.input[place] = copy.output[0] = copy.name = f"{name}/{seen[name]}"
        yield copy


def _copy_for_each_reader(graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto]) -> None:
    seen = Counter[str]()
    for node in graph.node:
        for place, name in _reads_again(node, weights, seen):
            copy = graph.initializer.add()
            copy.CopyFrom(weights[name])
            node.input[place] = copy.name = f"{name}/{seen[name]}"


def _reads_again(node: onnx.NodeProto, what: Container[str], seen: Counter[str]) -> Iterator[tuple[int, str]]:
    """The inputs of a node that were read before, with their places; `seen` counts all."""
    for place, name in enumerate(node.input):
        if name in what:
            seen[name] += 1
            if seen[name] > 1:
                yield place, name
