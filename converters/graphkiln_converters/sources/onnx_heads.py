"""How the detections of a graph are read: by the shapes of its outputs, or from its NonMaxSuppression at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes.graph_file import load, save
from graphkiln_converters.detection.options import BoxFormat, DetectorOptions, Head
from graphkiln_converters.detection.plain import detect, selected
from graphkiln_converters.detection.recognition import recognize
from graphkiln_converters.detection.selecting import Selection, find_selection, return_values
from graphkiln_converters.detection.yolo import LEAST_SCORE, Settings
from graphkiln_converters.sources import onnx_file
from graphkiln_converters.sources.base import InputSpec, SourceOptions, synthetic_samples
from graphkiln_converters.sources.onnx_file import OnnxModel

Arrays = Mapping[str, AnyArray]
_MAX_DETECTIONS = 300
_IOU_THRESHOLDS = {Head.YOLOV8: 0.7, Head.YOLOV5: 0.45}
"""Source: Ultralytics, "Predict" (YOLOv8), and `detect.py` (YOLOv5)."""
_FORMATS = {Head.YOLOV8: BoxFormat.CENTER, Head.YOLOV5: BoxFormat.CENTER, Head.END_TO_END: BoxFormat.CORNERS}


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundHead:
    """How a graph is read.

    Attributes:
        graph: What the head is appended to.
        read: Outputs of that graph which the head takes.
        settings: What the head does.
        classes: How many there are; 0 where that is not known.
        note: What was found, for the user.
        run: The reference: detections of any number of images, `OUTPUTS` by name.
        release: Closes what the reference holds beside the graph.
    """

    graph: OnnxModel
    read: tuple[str, ...]
    settings: Settings
    classes: int
    note: str
    run: Callable[[Arrays], dict[str, AnyArray]]
    release: Callable[[], None] = lambda: None


def find_head(model: OnnxModel, image: InputSpec, size: tuple[int, int], options: SourceOptions) -> FoundHead:
    """Finds out how to read a graph.

    Args:
        model: The graph.
        image: Its input, of one size.
        size: `(height, width)` of that in pixels.
        options: What the user says.

    Raises:
        ConversionError: It is not clear, or the graph takes no batches.
    """
    told = options.detection
    selection = find_selection(load(model.path)) if told.head in (None, Head.SELECTED) else None
    if selection:
        return _selected(model, selection, size, options)
    _check_batch(model)
    found = model.run(synthetic_samples((image,), 1, {}, seed=0))
    recognized = recognize({name: array.shape for name, array in found.items()}, size, told.head)
    settings = _settings(recognized.head, size, told)
    read = recognized.output
    return FoundHead(
        graph=model,
        read=(read,),
        settings=settings,
        classes=recognized.classes,
        note=f"{recognized}, {_described(settings)}",
        run=lambda feeds: detect(model.run(feeds)[read], settings),
    )


def _settings(head: Head, size: tuple[int, int], told: DetectorOptions) -> Settings:
    if head is Head.END_TO_END and told.iou_threshold is not None:
        raise ConversionError("--iou-threshold: the graph suppresses boxes itself", hint="leave it out")
    return Settings(
        head=head,
        boxes=told.boxes or _FORMATS[head],
        size=size,
        iou_threshold=told.iou_threshold or _IOU_THRESHOLDS.get(head, 1.0),
        max_detections=told.max_detections or _MAX_DETECTIONS,
        least_score=LEAST_SCORE,
    )


def _described(settings: Settings) -> str:
    suppressed = "" if settings.head is Head.END_TO_END else f"overlaps over {settings.iou_threshold:g} suppressed, "
    return f"boxes {settings.boxes}, {suppressed}at most {settings.max_detections} detections"


def _check_batch(model: OnnxModel) -> None:
    """Refuses a graph that takes one batch size only."""
    if model.whole:
        raise ConversionError(
            f"{model.path} cannot take batches of images: {model.whole}",
            hint="export it with a dynamic batch, or without its suppression (nms=False), which is then added here",
        )


def _selected(model: OnnxModel, selection: Selection, size: tuple[int, int], options: SourceOptions) -> FoundHead:
    told = options.detection
    settings = replace(_settings(Head.END_TO_END, size, told), head=Head.SELECTED)
    settings = replace(
        settings,
        boxes=_box_format(selection, told),
        iou_threshold=selection.iou_threshold,
        least_score=selection.score_threshold,
        most_of_class=selection.most_of_class,
    )
    temporary = TemporaryDirectory(prefix="graphkiln-")
    try:
        return _open_selection(model, selection, settings, options, temporary)
    except BaseException:
        temporary.cleanup()
        raise


def _box_format(selection: Selection, told: DetectorOptions) -> BoxFormat:
    """The format that the user names, or that the node is told; which corner comes first, a node need not know."""
    if told.boxes is None and not selection.centered:
        raise ConversionError(
            f"--task detection: NonMaxSuppression '{selection.output}' takes corners of boxes in any order",
            hint="say which its boxes have: --boxes xyxy, yxyx, or with -unit where they are shares of the image",
        )
    chosen = told.boxes or BoxFormat.CENTER
    if selection.centered != chosen.value.startswith(BoxFormat.CENTER.value):
        raise ConversionError(f"--boxes {chosen} is not what NonMaxSuppression '{selection.output}' is told")
    return chosen


def _open_selection(
    model: OnnxModel,
    selection: Selection,
    settings: Settings,
    options: SourceOptions,
    temporary: TemporaryDirectory[str],
) -> FoundHead:
    """The graph up to its suppression, and a session of all of it as the reference."""
    read, folder = (selection.boxes, selection.scores), Path(temporary.name)
    cut, whole = (_save(model.path, names, folder) for names in (read, (*read, selection.output)))
    session = OnnxRuntimeEngine().build_reference(whole)
    try:
        graph = onnx_file.open_source(str(cut), replace(options, task="auto"))
    except BaseException:
        session.close()
        raise

    def release() -> None:
        session.close()
        graph.close()
        temporary.cleanup()

    try:
        _check_batch(graph)
    except BaseException:
        release()
        raise
    return FoundHead(
        graph=graph,
        read=read,
        settings=settings,
        classes=_classes(graph, selection.scores),
        note=f"output '{selection.output}' is of the kind {Head.SELECTED} [selected, 3], {_described(settings)}",
        run=lambda feeds: _run_selection(session, graph.batch_size, selection, feeds, settings),
        release=release,
    )


def _save(path: Path, names: tuple[str, ...], folder: Path) -> Path:
    target = folder / f"{len(names)}.onnx"
    save(return_values(load(path), names), target)
    return target


def _run_selection(
    session: Session, batch_size: int, selection: Selection, feeds: Arrays, settings: Settings
) -> dict[str, AnyArray]:
    """Image by image, each filling the batch; of what is selected, what belongs to the first."""
    rows = len(next(iter(feeds.values())))
    images = [
        {name: np.repeat(a[row : row + 1], batch_size, axis=0) for name, a in feeds.items()} for row in range(rows)
    ]
    found = [session.run(image) for image in images]
    boxes, scores = (np.concatenate([each[name][:1] for each in found]) for name in (selection.boxes, selection.scores))
    chosen = [each[selection.output] for each in found]
    return selected(boxes, scores, [each[each[:, 0] == 0] for each in chosen], settings)


def _classes(graph: OnnxModel, scores: str) -> int:
    return int(graph.run(synthetic_samples(graph.inputs, 1, {}, seed=0))[scores].shape[1])
