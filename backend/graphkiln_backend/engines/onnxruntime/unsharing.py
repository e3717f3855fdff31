"""Gives each use of an int8 weight its own copy: ONNX Runtime refuses to turn one into uint8 twice.

See `exact_products`. Quantizers write such graphs: one zero point for many weights, one weight for two products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator

import onnx

_DEQUANTIZE = "DequantizeLinear"


def unshare(graph: onnx.GraphProto) -> None:
    """Leaves no int8 initializer with two readers; weights in files of their own stay there, and are named twice."""
    given = {value.name for value in graph.input}
    weights = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and tensor.name not in given
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
