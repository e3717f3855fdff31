"""Gives each use of an int8 weight its own copy, where ONNX Runtime refuses a graph that shares one.

On x86 without VNNI, products are kept exact by turning int8 weights and zero points into uint8. ONNX Runtime does that
once for each use and gives the result a name made of the weight's: a graph in which two nodes read the same weight or
the same zero point, as quantizers write them, cannot be loaded.
Source: `Avx2WeightS8ToU8Transformer` of ONNX Runtime, seen with 1.31 and 1.32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx

_DEQUANTIZE = "DequantizeLinear"


def unshare_bytes(graph_path: Path) -> bytes:
    """The graph with no int8 initializer that is read twice; weights in files of their own stay there, read twice."""
    model = onnx.load(graph_path, load_external_data=False)
    given = {value.name for value in model.graph.input}
    weights = {
        tensor.name: tensor
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and tensor.name not in given
    }
    _dequantize_for_each_reader(model.graph, weights)
    _copy_for_each_reader(model.graph, weights)
    return model.SerializeToString()


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
    for place, name in _reads(node, made, seen):
        copy = onnx.NodeProto()
        copy.CopyFrom(made[name])
        node.input[place] = copy.output[0] = copy.name = f"{name}/{seen[name]}"
        yield copy


def _copy_for_each_reader(graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto]) -> None:
    seen = Counter[str]()
    for node in graph.node:
        for place, name in _reads(node, weights, seen):
            copy = graph.initializer.add()
            copy.CopyFrom(weights[name])
            node.input[place] = copy.name = f"{name}/{seen[name]}"


def _reads(node: onnx.NodeProto, what: dict[str, object], seen: Counter[str]) -> Iterator[tuple[int, str]]:
    """The inputs of a node that somebody read before it, with their places; `seen` counts all."""
    for place, name in enumerate(node.input):
        if name in what:
            seen[name] += 1
            if seen[name] > 1:
                yield place, name
