"""Replace outputs that are not tensors, which Triton does not support, by the tensors that they are made from.

Exports of scikit-learn, XGBoost and LightGBM end in a ZipMap, which converts probabilities `[batch, classes]` to one
map per row. The probabilities are served instead, under the name of the output. Other outputs that are not tensors are
left out, as long as a tensor remains.

Source: ONNX, "ai.onnx.ml.ZipMap".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import onnx
else:
    np = LazyModule("numpy")
    onnx = LazyModule("onnx")

_MOST_NAMED = 10
_IDENTITY_OPSET = 13  # for graphs without operators of the domain ai.onnx


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedOutput:
    """An output of a graph that is not a tensor.

    Attributes:
        name: Name of the output.
        kind: Its type, for messages.
        classes: Keys of its maps, in the order of the columns of the served tensor; empty if it is left out.
    """

    name: str
    kind: str
    classes: tuple[str | int, ...] = ()

    def to_tensor(self, rows: object) -> AnyArray:
        """Convert the maps to the served tensor, FP32 `[batch, classes]`.

        Args:
            rows: One mapping per row, as returned by ONNX Runtime.

        Raises:
            TypeError: The output is not a list.
        """
        if not isinstance(rows, list):
            raise TypeError(f"'{self.name}' holds a {type(rows).__name__}, not one map for each row")
        table = [[row[key] for key in self.classes] for row in rows]
        return np.array(table, np.float32).reshape(len(rows), len(self.classes))

    def __str__(self) -> str:
        if not self.classes:
            return f"output '{self.name}' is left out: it is a {self.kind}, and Triton carries tensors only"
        shown = ", ".join(map(str, self.classes[:_MOST_NAMED])) + (", ..." if len(self.classes) > _MOST_NAMED else "")
        return (
            f"output '{self.name}' is a {self.kind}, and Triton carries tensors only: the tensor that it is made from "
            f"is served, a column for each of {shown}"
        )


def find_replaced(graph: onnx.GraphProto) -> tuple[ReplacedOutput, ...]:
    """Find the outputs of a graph that are not tensors; empty if no output would be left to serve."""
    makers = {name: node for node in graph.node for name in node.output}
    found = tuple(
        ReplacedOutput(name=value.name, kind=_words(value.type), classes=_classes(makers.get(value.name)))
        for value in graph.output
        if value.type.WhichOneof("value") not in {None, "tensor_type"}
    )
    served = len(graph.output) - sum(not output.classes for output in found)
    return found if served else ()


def with_tensor_outputs(model: onnx.ModelProto) -> tuple[ReplacedOutput, ...]:
    """Replace the outputs of a graph that are not tensors, in place, and remove nodes that only they need.

    Returns:
        The outputs that were replaced or left out.
    """
    graph = model.graph
    replaced = {output.name: output for output in find_replaced(graph)}
    if not replaced:
        return ()
    for node in graph.node:
        if node.op_type == "ZipMap" and replaced.keys() & set(node.output):
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
    has_classes = any(output.classes for output in replaced.values())
    if has_classes and not any(opset.domain in {"", "ai.onnx"} for opset in model.opset_import):
        model.opset_import.add(domain="", version=_IDENTITY_OPSET)
    kept = []
    for value in graph.output:
        if value.name not in replaced:
            kept.append(value)
        elif classes := replaced[value.name].classes:  # ZipMap supports only FP32
            shape = [None, len(classes)]
            kept.append(onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, shape))
    del graph.output[:]
    graph.output.extend(kept)
    _drop_unused(graph)
    return tuple(replaced.values())


def _words(kind: onnx.TypeProto) -> str:
    """Describe a type that is not a tensor, such as `sequence of maps`."""
    name = kind.WhichOneof("value")
    if name == "sequence_type":
        return f"sequence of {_words(kind.sequence_type.elem_type)}s"
    if name == "optional_type":
        return f"optional {_words(kind.optional_type.elem_type)}"
    return {"map_type": "map", "tensor_type": "tensor", "sparse_tensor_type": "sparse tensor"}.get(
        str(name), "value without a type"
    )


def _classes(maker: onnx.NodeProto | None) -> tuple[str | int, ...]:
    """Return the classes of an output that a ZipMap makes."""
    if maker is None or maker.op_type != "ZipMap":
        return ()
    attributes = {attribute.name: attribute for attribute in maker.attribute}
    if "classlabels_strings" in attributes:
        return tuple(label.decode("utf-8", "replace") for label in attributes["classlabels_strings"].strings)
    return tuple(attributes["classlabels_int64s"].ints) if "classlabels_int64s" in attributes else ()


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Remove nodes that no output needs; nodes are in topological order."""
    needed = {value.name for value in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed.update(_read_by(node))
            kept.append(node)
    kept.reverse()
    del graph.node[:]
    graph.node.extend(kept)
    names = needed | {name for node in graph.node for name in node.output}
    kept_infos = [value for value in graph.value_info if value.name in names]
    del graph.value_info[:]
    graph.value_info.extend(kept_infos)


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads, including in subgraphs."""
    yield from node.input
    for attribute in node.attribute:
        for graph in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from _read_by(inner)
