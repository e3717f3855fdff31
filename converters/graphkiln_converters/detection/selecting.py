"""Graphs that end in a NonMaxSuppression: what it takes, what it is told, and the graph before it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from graphkiln_backend.graph.errors import ConversionError

_OPERATOR = "NonMaxSuppression"
_INPUTS = {2: "max_output_boxes_per_class", 3: "iou_threshold", 4: "score_threshold"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """A NonMaxSuppression whose result a graph returns: `[selected, 3]` of image, class and box.

    Attributes:
        output: The output of the graph.
        boxes: The value that holds the boxes, `[batch, boxes, 4]`.
        scores: The value that holds the scores, `[batch, classes, boxes]`.
        centered: Whether the node is told that boxes are center and size; else they are corners, in an order that it
            need not know.
        most_of_class: Most boxes of a class.
        iou_threshold: Most that two boxes of a class which are kept may overlap.
        score_threshold: Boxes at or below it are not selected.
    """

    output: str
    boxes: str
    scores: str
    centered: bool
    most_of_class: int
    iou_threshold: float
    score_threshold: float


def find_selection(model: onnx_ir.Model) -> Selection | None:
    """The only one among the outputs of a graph, or None.

    Raises:
        ConversionError: What it is told is computed by the graph.
    """
    nodes = [value.producer() for value in model.graph.outputs]
    found = [node for node in nodes if node is not None and node.op_type == _OPERATOR]
    if len(found) != 1:
        return None
    (node,) = found
    boxes, scores, *_ = node.inputs
    attribute = node.attributes.get("center_point_box")
    return Selection(
        output=str(node.outputs[0].name),
        boxes=str(boxes.name if boxes else ""),
        scores=str(scores.name if scores else ""),
        centered=attribute is not None and attribute.as_int() == 1,
        most_of_class=int(_told(node, 2)),
        iou_threshold=_told(node, 3),
        score_threshold=_told(node, 4),
    )


def return_values(model: onnx_ir.Model, names: tuple[str, ...]) -> onnx_ir.Model:
    """A graph that returns these of its values, changed in place, without what only others needed."""
    ShapeInferencePass()(model)
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    model.graph.outputs[:] = [values[name] for name in names]
    RemoveUnusedNodesPass()(model)
    return model


def _told(node: onnx_ir.Node, number: int) -> float:
    """A number that the node is given; 0 where it is left out."""
    value = node.inputs[number] if number < len(node.inputs) else None
    if value is None:
        return 0.0
    tensor = onnx_ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise ConversionError(
            f"{_INPUTS[number]} of {_OPERATOR} is computed by the graph, where a constant was expected",
            hint="export the model with fixed thresholds, or without its suppression: --head yolov8 or yolov5",
        )
    return float(tensor.numpy().reshape(-1)[0])
