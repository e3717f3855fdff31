"""Which task a conversion is for: the source's own, or the one that was requested and that the outputs fit."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.task import Classification, Detection, Embedding, Segmentation, Task, output_names
from graphkiln_converters.opening import OpenModel
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import TaskSource

_FLOATS = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
_DETECTION_OUTPUTS = ("boxes", "scores", "classes", "counts")


def with_task(model: OpenModel, recipe: Recipe, graph: onnx_ir.Model) -> OpenModel:
    """The model with the task that its version will publish, by the source's names of outputs.

    Args:
        model: The source.
        recipe: Requests a task, or leaves that to the source.
        graph: As exported.

    Raises:
        ConversionError: The outputs do not fit the task, or the recipe changes what the task needs.
    """
    values = {str(value.name): value for value in graph.graph.outputs}
    kept = {name: value for name, value in values.items() if not recipe.outputs or name in recipe.outputs}
    task = _task(recipe, model.source.task if isinstance(model.source, TaskSource) else None, kept)
    if task is not None and not isinstance(task, Classification):
        _check_edges(recipe, task)
    return replace(model, task=_with_length(_with_threshold(task, recipe.score_threshold), normalize=recipe.normalize))


def _with_threshold(task: Task | None, threshold: float | None) -> Task | None:
    if threshold is None:
        return task
    if not isinstance(task, Detection):
        raise ConversionError("--score-threshold is for detectors", hint="--task detection, or leave it out")
    return replace(task, score_threshold=threshold)


def _with_length(task: Task | None, *, normalize: bool) -> Task | None:
    if not normalize:
        return task
    if not isinstance(task, Embedding):
        raise ConversionError("--normalize is for vectors", hint="--task embedding, or leave it out")
    return replace(task, normalize=True)


def _task(recipe: Recipe, own: Task | None, outputs: dict[str, onnx_ir.Value]) -> Task | None:
    if recipe.task == "auto":
        return own if own is not None and set(output_names(own)) <= outputs.keys() else None
    if own is not None and own.kind == recipe.task and set(output_names(own)) <= outputs.keys():
        return own
    return _FITTING[recipe.task](outputs)


def _classification(outputs: dict[str, onnx_ir.Value]) -> Task:  # noqa: ARG001 - any scores will do
    return Classification()


def _detection(outputs: dict[str, onnx_ir.Value]) -> Task:
    if not set(_DETECTION_OUTPUTS) <= outputs.keys():
        raise _misfit("detection", f"outputs named {', '.join(_DETECTION_OUTPUTS)}", outputs)
    masks, keypoints = (name if name in outputs else None for name in ("masks", "keypoints"))
    boxes, scores, classes, counts = _DETECTION_OUTPUTS
    return Detection(boxes=boxes, scores=scores, classes=classes, counts=counts, masks=masks, keypoints=keypoints)


def _segmentation(outputs: dict[str, onnx_ir.Value]) -> Task:
    scores = [name for name, value in outputs.items() if value.dtype in _FLOATS and _rank(value) == 4]
    maps = [name for name, value in outputs.items() if value.dtype not in _FLOATS and _rank(value) == 3]
    if len(scores) == 1:
        return Segmentation(scores=scores[0])
    if len(maps) == 1:
        return Segmentation(classes=maps[0])
    raise _misfit("segmentation", "scores [batch, classes, height, width] or classes [batch, height, width]", outputs)


def _embedding(outputs: dict[str, onnx_ir.Value]) -> Task:
    vectors = [name for name, value in outputs.items() if value.dtype in _FLOATS and _rank(value) == 2]
    if len(vectors) != 1:
        raise _misfit("embedding", "one output of vectors [batch, features]", outputs)
    return Embedding(vectors=vectors[0])


_FITTING = {
    "classification": _classification,
    "detection": _detection,
    "segmentation": _segmentation,
    "embedding": _embedding,
}


def _rank(value: onnx_ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _misfit(task: str, wanted: str, outputs: dict[str, onnx_ir.Value]) -> ConversionError:
    found = ", ".join(f"{name} {value.dtype} {list(value.shape or ())}" for name, value in outputs.items())
    return ConversionError(f"--task {task} needs {wanted}; the graph has {found}", hint="choose with --outputs")


def _check_edges(recipe: Recipe, task: Task) -> None:
    flags = {"--top-k": bool(recipe.top_k), "--softmax": recipe.softmax, "--layout nhwc": recipe.layout == "nhwc"}
    for flag, given in flags.items():
        if given:
            raise ConversionError(f"{flag} is for classifiers, and this is a {task.kind} model", hint="leave it out")
