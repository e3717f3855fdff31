"""Find nodes of a graph in training mode, and nodes that draw random numbers.

A model that was exported in training mode gives wrong results: it drops values at random, and normalizes by the
statistics of each request instead of the learned ones.

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
# Operators that draw random numbers in any mode; Dropout does so in training mode.
DRAWING = frozenset(
    ["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
# Since this opset an attribute sets the mode of BatchNormalization; before, the number of outputs did.
_MODE_IS_ATTRIBUTE = 14
# Since opset 12 an input sets the mode of Dropout; opsets 7 to 11 have no training mode; before, an attribute set it.
_MODE_IS_INPUT, _NO_MODE = 12, 7
_MEAN = 3


def draws_numbers(path: Path) -> bool:
    """Return true if a graph draws random numbers, so that equal requests get different responses.

    Raises:
        RepositoryError: The file is damaged.
    """
    model = read_graph(path)
    known, version = _constants(model), opset_of(model)
    return any(node.op_type in DRAWING or _drops(node, version, known) for node in _nodes(model))


def find_training(path: Path) -> str:
    """Describe the nodes of a graph in training mode; empty for none.

    Nodes whose mode or statistics are inputs of the graph do not count.

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
    if node.op_type != "Dropout" or _NO_MODE <= version < _MODE_IS_INPUT:
        return False
    if version < _NO_MODE:
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
    if node.op_type == "Dropout" and version >= _MODE_IS_INPUT:
        return _drops(node, version, known) and node.input[2] in known
    if node.op_type != "BatchNormalization" or len(node.input) <= _MEAN or node.input[_MEAN] not in known:
        return False
    return any(node.output[1:]) if version < _MODE_IS_ATTRIBUTE else _integer(node, "training_mode") == 1


def _integer(node: onnx.NodeProto, name: str) -> int:
    """Read an integer attribute; 0 if it is omitted."""
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)
