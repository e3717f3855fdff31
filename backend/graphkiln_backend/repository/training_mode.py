"""Nodes of a graph that train or draw random numbers, read from its file.

A model that was exported in training mode answers, and wrongly: it drops values at random, and normalizes by the
statistics of each request instead of those that it has learned.

Source: ONNX operator schemas, BatchNormalization 1 to 15 and Dropout 1 to 22.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.repository.onnx_file import opset_of, read_graph

if TYPE_CHECKING:
    import onnx
else:
    onnx = LazyModule("onnx")

EVALUATION_MODE = "export the model in evaluation mode: model.eval(), and torch.onnx.export without training="
# Operators that draw random numbers, whatever their mode; a Dropout does in training mode.
DRAWING = frozenset(
    ["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
# Opset since which an attribute sets a BatchNormalization's mode; before, its number of outputs does.
_TELLS_BY_ATTRIBUTE = 14
# Opsets since which an input sets a Dropout's mode, and since which it has none; before, an attribute does.
_IS_INPUT, _IS_NEVER = 12, 7
_MEAN = 3


def draws_numbers(path: Path) -> bool:
    """Return true where a graph draws random numbers, so that equal requests get different responses.

    Raises:
        RepositoryError: The file is damaged.
    """
    model = read_graph(path)
    known, version = _constants(model), opset_of(model)
    return any(node.op_type in DRAWING or _drops(node, version, known) for node in _nodes(model))


def find_training(path: Path) -> str:
    """Describe the nodes of a graph that are in training mode; empty for none.

    A mode or statistics that are inputs of requests are intended.

    Raises:
        RepositoryError: The file is damaged.
    """
    model = read_graph(path)
    known, version = _constants(model), opset_of(model)
    found = [node for node in _nodes(model) if _trains(node, version, known)]
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if found[1:] else ""
    return f"{found[0].op_type} '{found[0].name or found[0].output[0]}'{more}"


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Nodes of the graph, of its functions, and of their subgraphs."""
    parts: list[onnx.GraphProto | onnx.FunctionProto] = [model.graph, *model.functions]
    for part in parts:
        yield from part.node
        parts += [attribute.g for node in part.node for attribute in node.attribute if attribute.HasField("g")]


def _constants(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    values = {
        node.output[0]: attribute.t
        for node in _nodes(model)
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    }
    return values | {tensor.name: tensor for tensor in model.graph.initializer}


def _drops(node: onnx.NodeProto, version: int, known: dict[str, onnx.TensorProto]) -> bool:
    if node.op_type != "Dropout" or _IS_NEVER <= version < _IS_INPUT:
        return False
    if version < _IS_NEVER:
        return not _integer(node, "is_test")
    ratio, trains = (*node.input[1:], "", "")[:2]
    return bool(trains) and _may_be_true(trains, known) and (not ratio or _may_be_true(ratio, known))


def _may_be_true(name: str, known: dict[str, onnx.TensorProto]) -> bool:
    """Return false for a value that the file defines as 0."""
    tensor = known.get(name)
    if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return True
    return bool(onnx.numpy_helper.to_array(tensor).any())


def _trains(node: onnx.NodeProto, version: int, known: dict[str, onnx.TensorProto]) -> bool:
    if node.op_type == "Dropout" and version >= _IS_INPUT:
        return _drops(node, version, known) and node.input[2] in known
    if node.op_type != "BatchNormalization" or len(node.input) <= _MEAN or node.input[_MEAN] not in known:
        return False
    return any(node.output[1:]) if version < _TELLS_BY_ATTRIBUTE else _integer(node, "training_mode") == 1


def _integer(node: onnx.NodeProto, name: str) -> int:
    """An attribute, 0 where it is left out."""
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)
