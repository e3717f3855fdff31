"""Which task a conversion is for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import onnx_ir
import pytest
from graphs import graph
from sources import TextSource

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.task import Classification, Detection, Embedding, Segmentation, Task
from graphkiln_converters.convert import with_task
from graphkiln_converters.opening import OpenModel
from graphkiln_converters.recipe import Recipe

VECTORS = "(float[batch, 4] x) => (float[batch, 4] y) { y = Relu(x) }"
MAPS = "(float[batch, 3, 8, 8] x) => (float[batch, 3, 8, 8] y) { y = Relu(x) }"
DETECTIONS = (
    "(float[batch, 5, 4] x) => (float[batch, 5, 4] boxes, float[batch, 5] scores, int64[batch, 5] classes, "
    "int32[batch] counts) { boxes = Relu(x) axes = Constant<value_ints=[2]>() scores = ReduceMax<keepdims=0>(x, axes) "
    "classes = ArgMax<axis=2, keepdims=0>(x) one = Constant<value_ints=[1]>() "
    "many = ReduceSum<keepdims=0>(classes, one) "
    "counts = Cast<to=6>(many) }"
)


def task_of(text: str, own: Task | None = None, **options: Any) -> Task | None:
    source: Any = TextSource(text=text, inputs=())
    if own is not None:
        source = SimpleNamespace(task=own, inputs=(), close=lambda: None)
    model = OpenModel(source=source, inputs=(), preprocess=None, labels=())
    return with_task(model, Recipe(source="python:x", name="m", **options), made(text)).task


def made(text: str) -> onnx_ir.Model:
    return graph(text)


def test_nothing_is_guessed_unasked() -> None:
    assert task_of(VECTORS) is None


def test_a_source_that_knows_its_task_is_believed() -> None:
    assert task_of(MAPS, Segmentation(scores="y")) == Segmentation(scores="y")


def test_a_task_whose_outputs_are_left_out_is_none() -> None:
    assert task_of(MAPS, Segmentation(scores="other")) is None


@pytest.mark.parametrize(
    ("text", "task", "expected"),
    [
        (VECTORS, "classification", Classification()),
        (VECTORS, "embedding", Embedding(vectors="y")),
        (MAPS, "segmentation", Segmentation(scores="y")),
        (DETECTIONS, "detection", Detection(boxes="boxes", scores="scores", classes="classes", counts="counts")),
    ],
)
def test_a_requested_task_names_the_outputs_that_fit(text: str, task: str, expected: Task) -> None:
    assert task_of(text, task=task) == expected


@pytest.mark.parametrize(("text", "task"), [(MAPS, "embedding"), (VECTORS, "segmentation"), (VECTORS, "detection")])
def test_a_task_that_no_output_fits_is_refused(text: str, task: str) -> None:
    with pytest.raises(ConversionError, match=f"--task {task} needs") as caught:
        task_of(text, task=task)
    assert "--outputs" in caught.value.hint


def test_the_threshold_of_scores_is_the_users() -> None:
    task = task_of(DETECTIONS, task="detection", score_threshold=0.125)
    assert isinstance(task, Detection)
    assert task.score_threshold == 0.125


@pytest.mark.parametrize("task", ["auto", "embedding"])
def test_a_threshold_of_scores_is_for_detectors(task: str) -> None:
    with pytest.raises(ConversionError, match="--score-threshold is for detectors"):
        task_of(VECTORS, task=task, score_threshold=0.1)


def test_vectors_are_normalized_where_the_user_says_so() -> None:
    assert task_of(VECTORS, task="embedding", normalize=True) == Embedding(vectors="y", normalize=True)


@pytest.mark.parametrize("task", ["auto", "segmentation"])
def test_a_length_is_for_vectors(task: str) -> None:
    with pytest.raises(ConversionError, match="--normalize is for vectors"):
        task_of(MAPS, task=task, normalize=True)


@pytest.mark.parametrize("flag", [{"top_k": 2}, {"softmax": True}, {"layout": "nhwc"}])
def test_what_changes_scores_is_for_classifiers(flag: dict[str, Any]) -> None:
    with pytest.raises(ConversionError, match="is for classifiers"):
        task_of(MAPS, task="segmentation", **flag)
