"""YOLO-like ONNX files as detectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from detections import run_graph
from graphs import graph
from recipes import recipe
from tiny_yolo import FOUND, NAMES, SIDE, V5, V8, EndToEnd, Parts, images, write_yolo
from torch import nn

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.graph.task import Detection
from graphkiln_converters.recipe import BoxFormat, Head
from graphkiln_converters.sources.base import open_source
from graphkiln_converters.sources.onnx_detector import (
    append,
    find_selection,
)

CORNERS = {"boxes": BoxFormat.CORNERS}
KINDS: dict[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "yolov8": (V8, {}),
    "yolov5": (V5, {}),
    "end-to-end": (EndToEnd, {}),
    "selected": (Parts, CORNERS),
}


@contextmanager
def opened(path: Path, given: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    source = open_source(recipe(str(path), task="detection", **(given or {}), **options))
    with closing(source):
        yield source


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("yolo")
    return {kind: write_yolo(made(), folder / f"{kind}.onnx", names=NAMES) for kind, (made, _) in KINDS.items()}


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_finds_the_same_as_the_reference(kind: str, files: dict[str, Path], tmp_path: Path) -> None:
    batch = images(5).numpy()
    with opened(files[kind], KINDS[kind][1]) as source:
        expected = source.run({"images": batch})
        found = run_graph(source.export(), tmp_path, images=batch)
        assert kind in source.notes[0]
    assert expected["counts"].min() > 3, "nothing to compare"
    assert expected["boxes"].shape == (5, FOUND, 4)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-2 if name == "boxes" else 1e-5, err_msg=name)


@pytest.mark.wide
def test_labels_size_and_threshold_are_read_from_the_file(files: dict[str, Path]) -> None:
    with opened(files["yolov8"]) as source:
        assert source.labels == tuple(NAMES.values())
        assert source.preprocess == Preprocess(letterbox=Letterbox(size=(SIDE, SIDE)))
        assert isinstance(source.task, Detection)
        assert source.task.score_threshold == 0.25
        assert source.classes == len(NAMES)


@pytest.mark.wide
def test_a_fixed_batch_is_made_dynamic(tmp_path: Path) -> None:
    path, batch = write_yolo(V8(), tmp_path / "one.onnx", batch=1), images(3).numpy()
    with opened(path) as source:
        found = run_graph(source.export(), tmp_path, images=batch)
        expected = source.run({"images": batch})
    assert source.batch_size == 1
    np.testing.assert_allclose(found["boxes"], expected["boxes"], atol=1e-2)


@pytest.mark.wide
def test_thresholds_and_limits_of_the_recipe_are_used(files: dict[str, Path]) -> None:
    given = {"iou_threshold": 0.1, "max_detections": 9}
    with opened(files["yolov8"], given) as source, opened(files["yolov8"]) as usual:
        found, more = (each.run({"images": images(1).numpy()}) for each in (source, usual))
    assert found["boxes"].shape == (1, 9, 4)
    assert more["counts"] > found["counts"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "given", "problem"),
    [
        ("selected", {}, "corners of boxes in any order"),
        ("selected", {"boxes": BoxFormat.CENTER}, "contradicts NonMaxSuppression"),
        ("selected", {**CORNERS, "iou_threshold": 0.5}, "already suppresses boxes"),
        ("end-to-end", {"iou_threshold": 0.5}, "already suppresses boxes"),
        ("yolov8", {"head": Head.END_TO_END}, "no output is of the kind"),
        ("yolov8", {"head": Head.YOLOV5}, "names 3 classes, and its output would have 79"),
    ],
)
def test_contradicting_options_are_refused(
    kind: str, given: Mapping[str, Any], problem: str, files: dict[str, Path]
) -> None:
    with pytest.raises(ConversionError, match=problem) as caught, opened(files[kind], given):
        pass
    assert caught.value.hint or kind == "selected"


@pytest.mark.wide
def test_poses_are_refused(tmp_path: Path) -> None:
    path = write_yolo(V8(classes=52), tmp_path / "pose.onnx", names={0: "person"})
    with pytest.raises(ConversionError, match="names 1 classes, and its output would have 52"), opened(path):
        pass


@pytest.mark.wide
def test_a_dynamic_image_size_is_refused(files: dict[str, Path]) -> None:
    with opened(files["yolov8"]) as source, pytest.raises(ConversionError, match="images of one size"):
        replace(source, inputs=(replace(source.inputs[0], dynamic={1: (32, 64)}),)).export()


# Appended graphs.

FIRST = "(float[batch, 4] x) => (float[batch, 4] boxes, float[batch, 4] b) { boxes = Neg(x) b = Abs(x) }"
SECOND = "(float[batch, 4] x) => (float[batch, 4] boxes) { h = Relu(x) boxes = Add(h, h) }"


def test_the_second_graph_reads_the_outputs_of_the_first(tmp_path: Path) -> None:
    made = append(graph(FIRST), graph(SECOND), ["boxes"])
    x = np.array([[1, -2, 3, -4]], np.float32)
    assert [value.name for value in made.graph.outputs] == ["boxes"]
    np.testing.assert_array_equal(run_graph(made, tmp_path, x=x)["boxes"], 2 * np.maximum(-x, 0))


def test_the_first_graph_may_have_a_newer_opset(tmp_path: Path) -> None:
    made = append(graph(FIRST, opset=21), graph(SECOND), ["b"])
    assert made.graph.opset_imports[""] == 21
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(run_graph(made, tmp_path, x=x)["boxes"], 2 * x)


# Graphs that end in a NonMaxSuppression.

TEXT = (
    "(float[batch, 9, 4] x, float[batch, 2, 9] y) => (int64[n, 3] chosen) "
    "{ boxes = Relu(x) scores = Sigmoid(y) chosen = NonMaxSuppression(boxes, scores, most, iou, least) }"
)
THRESHOLDS = {
    "most": np.array([5], np.int64),
    "iou": np.array([0.5], np.float32),
    "least": np.array([0.25], np.float32),
}


def test_computed_thresholds_are_refused() -> None:
    text = TEXT.replace("float[batch, 2, 9] y", "float[batch, 2, 9] y, float[1] limit")
    made = graph(text.replace("iou, least", "limit, least"), most=THRESHOLDS["most"], least=THRESHOLDS["least"])
    with pytest.raises(ConversionError, match="iou_threshold of NonMaxSuppression is computed"):
        find_selection(made)
