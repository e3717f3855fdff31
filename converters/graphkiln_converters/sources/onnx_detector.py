"""`FILE.onnx --task detection`: YOLO-like detectors; post-processing is appended to the graph.

The reference is the unchanged graph, with post-processing in NumPy image by image.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass
from onnxscript import version_converter

from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.passes.graph_file import OPSET, load, save
from graphkiln_converters.detection.candidates import DETECTION, OUTPUTS
from graphkiln_converters.detection.yolo import LEAST_SCORE, Settings, detect, head_of, recognize, selected
from graphkiln_converters.recipe import BoxFormat, Head, Recipe
from graphkiln_converters.sources import onnx_file
from graphkiln_converters.sources.base import EXPORT_BATCH, InputSpec, SourceModel, synthetic_samples
from graphkiln_converters.sources.onnx_file import OnnxModel
from graphkiln_converters.sources.pytorch import export_module, to_tensor

Arrays = Mapping[str, AnyArray]
# Default score threshold of clients. Source: Ultralytics, "Predict".
_SCORE_THRESHOLD = 0.25
_CHANNELS = 3
_MAX_DETECTIONS = 300
# Source: Ultralytics, "Predict" (YOLOv8), and `detect.py` (YOLOv5).
_IOU_THRESHOLDS = {Head.YOLOV8: 0.7, Head.YOLOV5: 0.45}
_FORMATS = {Head.YOLOV8: BoxFormat.CENTER, Head.YOLOV5: BoxFormat.CENTER, Head.END_TO_END: BoxFormat.CORNERS}


@dataclass(frozen=True, kw_only=True)
class OnnxDetector(SourceModel):
    """A YOLO-like graph with detections as outputs; its input has one image size.

    Attributes:
        graph: The original graph.
        read: Outputs of the graph that are inputs of the head.
        settings: Settings of the head.
    """

    graph: OnnxModel
    read: tuple[str, ...]
    settings: Settings
    _resources: ExitStack = field(default_factory=ExitStack)

    def run(self, feeds: Arrays) -> dict[str, AnyArray]:
        """See `SourceModel.run`."""
        return detect(self.graph.run(feeds)[self.read[0]], self.settings)

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`.

        Raises:
            ConversionError: A dimension other than the batch is requested to vary.
        """
        if any(spec.dynamic for spec in self.inputs):
            raise ConversionError("--dynamic: a detector takes images of one size", hint="choose it with --shape")
        model = self.graph.export()
        for value, spec in zip(model.graph.inputs, self.inputs, strict=True):
            value.shape = onnx_ir.Shape(["batch", *spec.shape])
        found = self.graph.run(synthetic_samples(self.inputs, EXPORT_BATCH, {}, seed=0))
        example = tuple(to_tensor(found[name]) for name in self.read)
        head = export_module(
            head_of(self.settings),
            example,
            {},
            dynamic_shapes=({0: torch.export.Dim("batch")},) * len(example),
            input_names=list(self.read),
            output_names=list(OUTPUTS),
            description=f"the head {self.settings.head}",
        )
        return append(model, head, self.read)

    def close(self) -> None:
        """See `SourceModel.close`."""
        self._resources.close()


@dataclass(frozen=True, kw_only=True)
class SelectingDetector(OnnxDetector):
    """A graph that ends in a NonMaxSuppression, which the head replaces.

    Attributes:
        selection: The NonMaxSuppression.
        session: Session of the whole graph that also returns the inputs of the NonMaxSuppression.
    """

    selection: Selection
    session: Session

    def run(self, feeds: Arrays) -> dict[str, AnyArray]:
        """See `SourceModel.run`: each image fills a whole batch, and the selection of the first row is used."""
        rows = len(next(iter(feeds.values())))
        found = [
            self.session.run({name: np.repeat(a[i : i + 1], self.batch_size, axis=0) for name, a in feeds.items()})
            for i in range(rows)
        ]
        boxes, scores = (np.concatenate([each[name][:1] for each in found]) for name in self.read)
        chosen = [each[self.selection.output] for each in found]
        return selected(boxes, scores, [each[each[:, 0] == 0] for each in chosen], self.settings)


def open_source(location: str, recipe: Recipe) -> OnnxModel | OnnxDetector:
    """Open a YOLO-like graph, or one with the outputs `boxes`, `scores`, `classes` and `counts`.

    Raises:
        ConversionError: The file cannot be loaded, its kind is ambiguous, or it does not support batches of images.
    """
    with ExitStack() as resources:
        model = resources.enter_context(onnx_file.open_source(location, recipe))
        if set(OUTPUTS) <= set(model.outputs):
            if recipe.box_flags:
                raise ConversionError(
                    f"{location} already returns {', '.join(OUTPUTS)}", hint=f"leave out {recipe.box_flags[0]}"
                )
            resources.pop_all()
            return model
        image, layout = _image(model, recipe)
        height, width = image.shape[1:] if layout == "CHW" else image.shape[:2]
        selection = find_selection(load(model.path)) if recipe.head in (None, Head.SELECTED) else None
        detector: OnnxDetector
        if selection:
            detector = _open_selecting(model, selection, image, (height, width), recipe, resources)
        else:
            detector = _open_recognized(model, image, (height, width), recipe)
        return replace(
            detector,
            preprocess=Preprocess(letterbox=Letterbox(size=(height, width)), layout=layout, dtype=image.dtype),
            labels=_labels(model.path, detector.classes),
            _resources=resources.pop_all(),
        )


def _open_recognized(model: OnnxModel, image: InputSpec, size: tuple[int, int], recipe: Recipe) -> OnnxDetector:
    """Recognize the head by the shapes of the outputs."""
    _check_batch(model)
    found = model.run(synthetic_samples((image,), 1, {}, seed=0))
    recognized = recognize({name: array.shape for name, array in found.items()}, size, recipe.head)
    settings = _settings(recognized.head, size, recipe)
    return OnnxDetector(
        **_described(model, image, f"{recognized}, {_in_words(settings)}"),
        classes=recognized.classes,
        graph=model,
        read=(recognized.output,),
        settings=settings,
    )


def _open_selecting(  # noqa: PLR0917 - a step of `open_source`
    model: OnnxModel,
    selection: Selection,
    image: InputSpec,
    size: tuple[int, int],
    recipe: Recipe,
    resources: ExitStack,
) -> SelectingDetector:
    """Open the graph up to its NonMaxSuppression, and a session of the whole graph as the reference."""
    settings = replace(
        _settings(Head.END_TO_END, size, recipe),
        head=Head.SELECTED,
        boxes=_box_format(selection, recipe),
        iou_threshold=selection.iou_threshold,
        least_score=selection.score_threshold,
        most_of_class=selection.most_of_class,
    )
    read = (selection.boxes, selection.scores)
    folder = Path(resources.enter_context(TemporaryDirectory(prefix="graphkiln-")))
    for name, outputs in (("cut", read), ("whole", (*read, selection.output))):
        save(return_values(load(model.path), outputs), folder / f"{name}.onnx")
    session = resources.enter_context(OnnxRuntimeEngine().build_reference(folder / "whole.onnx"))
    graph = resources.enter_context(
        onnx_file.open_source(str(folder / "cut.onnx"), recipe.model_copy(update={"task": "auto"}))
    )
    _check_batch(graph)
    scores = graph.run(synthetic_samples(graph.inputs, 1, {}, seed=0))[selection.scores]
    note = f"output '{selection.output}' is of the kind {Head.SELECTED} [selected, 3], {_in_words(settings)}"
    return SelectingDetector(
        **_described(graph, image, note) | {"description": model.description},
        classes=int(scores.shape[1]),
        graph=graph,
        read=read,
        settings=settings,
        selection=selection,
        session=session,
    )


def _described(graph: OnnxModel, image: InputSpec, note: str) -> dict[str, Any]:
    """Fields common to all detectors."""
    return {
        "description": graph.description,
        "named": True,
        "libraries": ("onnx", "onnxruntime", "torch"),
        "inputs": (image,),
        "batch_size": graph.batch_size,
        "notes": (note,),
        "task": replace(DETECTION, score_threshold=_SCORE_THRESHOLD),
    }


def _settings(head: Head, size: tuple[int, int], recipe: Recipe) -> Settings:
    if head is Head.END_TO_END and recipe.iou_threshold is not None:
        raise ConversionError("--iou-threshold: the graph already suppresses boxes", hint="leave it out")
    return Settings(
        head=head,
        boxes=recipe.boxes or _FORMATS[head],
        size=size,
        iou_threshold=recipe.iou_threshold or _IOU_THRESHOLDS.get(head, 1.0),
        max_detections=recipe.max_detections or _MAX_DETECTIONS,
        least_score=LEAST_SCORE,
    )


def _in_words(settings: Settings) -> str:
    suppressed = "" if settings.head is Head.END_TO_END else f"overlaps over {settings.iou_threshold:g} suppressed, "
    return f"boxes {settings.boxes}, {suppressed}at most {settings.max_detections} detections"


def _check_batch(model: OnnxModel) -> None:
    """Refuse a graph with a fixed batch size."""
    if model.whole:
        raise ConversionError(
            f"{model.path} cannot take batches of images: {model.whole}",
            hint="export it with a dynamic batch, or without its suppression (nms=False), which is then added here",
        )


def _box_format(selection: Selection, recipe: Recipe) -> BoxFormat:
    """Return the box format given by the user, or that of the node; a node does not state the order of corners."""
    if recipe.boxes is None and not selection.centered:
        raise ConversionError(
            f"--task detection: NonMaxSuppression '{selection.output}' takes corners of boxes in any order",
            hint="give the format of its boxes: --boxes xyxy, yxyx, or with -unit if they are relative to the image",
        )
    boxes = recipe.boxes or BoxFormat.CENTER
    if selection.centered != boxes.value.startswith(BoxFormat.CENTER.value):
        raise ConversionError(f"--boxes {boxes} contradicts NonMaxSuppression '{selection.output}'")
    return boxes


def _image(model: OnnxModel, recipe: Recipe) -> tuple[InputSpec, Literal["CHW", "HWC"]]:
    """Return the only input, with a fixed size, and its layout."""
    (spec, *others) = model.inputs
    shape = spec.shape[1:] if model.whole else spec.shape
    varies = any(axis >= len(spec.shape) - len(shape) for axis in spec.dynamic)
    if others or len(shape) != 3 or _CHANNELS not in (shape[0], shape[2]):
        listed = ", ".join(f"{each.name} {list(each.shape)}" for each in model.inputs)
        raise ConversionError(f"a detector takes one image, {model.path} takes {listed}", hint="--shape 3x640x640")
    if varies and not recipe.shapes:
        raise ConversionError(
            f"{model.path} takes images of any size, and a version has one fixed size", hint="--shape 3x640x640"
        )
    return replace(spec, shape=shape, dynamic={}), "CHW" if shape[0] == _CHANNELS else "HWC"


def _labels(path: Path, classes: int) -> tuple[str, ...]:
    """Read class names from Ultralytics' metadata: a dict by class in Python syntax."""
    properties = {each.key: each.value for each in onnx.load(path, load_external_data=False).metadata_props}
    try:
        names = ast.literal_eval(properties.get("names", "{}"))
    except (ValueError, SyntaxError):
        return ()
    if not isinstance(names, dict) or set(names) != set(range(len(names))):
        return ()
    if names and classes and len(names) != classes:
        raise ConversionError(
            f"{path} names {len(names)} classes, and its output would have {classes}: it does not return plain boxes, "
            "but poses, masks or rotated boxes, for example",
            hint="name the kind with --head, or wrap it: python:FILE:FACTORY --task detection",
        )
    return tuple(str(names[number]) for number in range(len(names)))


# Graphs that end in a NonMaxSuppression: its inputs, its thresholds, and the graph before it.

_OPERATOR = "NonMaxSuppression"
_INPUTS = {2: "max_output_boxes_per_class", 3: "iou_threshold", 4: "score_threshold"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """A NonMaxSuppression whose result is an output of the graph: `[selected, 3]` of image, class and box.

    Attributes:
        output: The output of the graph.
        boxes: Name of the boxes, `[batch, boxes, 4]`.
        scores: Name of the scores, `[batch, classes, boxes]`.
        centered: Whether boxes are center and size; else corners in any order.
        most_of_class: Maximum number of boxes of a class.
        iou_threshold: Largest intersection over union of two kept boxes of a class.
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
    """Find the only NonMaxSuppression among the outputs of a graph.

    Raises:
        ConversionError: A threshold is computed by the graph.
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
        most_of_class=int(_number(node, 2)),
        iou_threshold=_number(node, 3),
        score_threshold=_number(node, 4),
    )


def return_values(model: onnx_ir.Model, names: tuple[str, ...]) -> onnx_ir.Model:
    """Make values the outputs of a graph, in place, and remove unused nodes."""
    ShapeInferencePass()(model)
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    model.graph.outputs[:] = [values[name] for name in names]
    RemoveUnusedNodesPass()(model)
    return model


def _number(node: onnx_ir.Node, number: int) -> float:
    """Read a constant scalar input of the node; 0 if it is omitted."""
    value = node.inputs[number] if number < len(node.inputs) else None
    if value is None:
        return 0.0
    tensor = onnx_ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise ConversionError(
            f"{_INPUTS[number]} of {_OPERATOR} is computed by the graph, expected a constant",
            hint="export the model with fixed thresholds, or without its suppression: --head yolov8 or yolov5",
        )
    return float(tensor.numpy().reshape(-1)[0])


# Append one graph to another.

_FIRST, _SECOND = "source/", "detection/"


def append(first: onnx_ir.Model, second: onnx_ir.Model, names: Sequence[str]) -> onnx_ir.Model:
    """Append a graph to another one; the result has the outputs of the second.

    Args:
        first: Changed in place, and returned.
        second: Its nodes and weights are moved.
        names: Outputs of the first in the order of the inputs of the second.
    """
    version = first.opset_imports.get("", OPSET)
    if version > OPSET:
        version_converter.convert_version(second, version, fallback=True)
    read = {str(value.name): value for value in first.graph.outputs}
    outputs = list(second.graph.outputs)
    returned = {str(value.name) for value in outputs}
    _prefix([value for value in _values(first) if value.name in returned], _FIRST)
    _prefix([value for value in _values(second) if value.name not in returned], _SECOND)
    for value, name in zip(second.graph.inputs, names, strict=True):
        onnx_ir.convenience.replace_all_uses_with(value, read[name])
    _move(second, first)
    first.graph.outputs[:] = outputs
    RemoveUnusedNodesPass()(first)
    return first


def _values(model: onnx_ir.Model) -> Iterator[onnx_ir.Value]:
    yield from model.graph.initializers.values()
    for node in model.graph.all_nodes():
        yield from node.outputs


def _prefix(values: Sequence[onnx_ir.Value], prefix: str) -> None:
    onnx_ir.convenience.rename_values(values, [f"{prefix}{value.name}" for value in values])


def _move(source: onnx_ir.Model, target: onnx_ir.Model) -> None:
    """Move nodes, weights and functions."""
    weights, nodes = list(source.graph.initializers.values()), list(source.graph)
    source.graph.outputs.clear()
    source.graph.initializers.clear()
    source.graph.remove(nodes)
    for number, node in enumerate(nodes):
        node.name = f"{_SECOND}{number}"
    for value in weights:
        target.graph.register_initializer(value)
    target.graph.extend(nodes)
    target.functions.update(source.functions)
    for domain, version in source.opset_imports.items():
        target.opset_imports.setdefault(domain, version)
