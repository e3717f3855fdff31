"""A graph that finds light pixels, as detector, segmenter and embedding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zoo
from onnx import TensorProto, helper, reference, save

from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, Task
from graphkiln_client import Box
from graphkiln_converters.prove import ReferenceSamples
from graphkiln_converters.write import SourceInfo, prove_and_write

SPEC = Preprocess(letterbox=Letterbox(size=(32, 32), padding=0), interpolation="box")
TASKS: dict[str, Task] = {
    "detector": Detection(boxes="boxes", scores="scores", classes="classes", counts="counts"),
    "segmenter": Segmentation(scores="map"),
    "embedder": Embedding(vectors="vector", normalize=True),
}


def light_box() -> Any:
    """Graph of a box around the light pixels, a map of light pixels, and the mean color."""
    n = helper.make_node
    nodes = [
        n("ReduceMean", ["x", "one"], ["gray"], keepdims=0),
        n("Greater", ["gray", "limit"], ["is_light"]),
        n("Cast", ["is_light"], ["light"], to=TensorProto.FLOAT),
        n("ReduceMax", ["light", "one"], ["columns"], keepdims=0),
        n("ReduceMax", ["light", "two"], ["rows"], keepdims=0),
    ]
    for name, axis in (("x", "columns"), ("y", "rows")):
        nodes += [
            n("ArgMax", [axis], [f"{name}1"], axis=1, keepdims=1),
            n("ArgMax", [axis], [f"{name}_last"], axis=1, keepdims=1, select_last_index=1),
            n("Add", [f"{name}_last", "one"], [f"{name}2"]),
        ]
    nodes += [
        n("Concat", ["x1", "y1", "x2", "y2"], ["corners"], axis=1),
        n("Cast", ["corners"], ["box"], to=TensorProto.FLOAT),
        n("Unsqueeze", ["box", "one"], ["boxes"]),
        n("ReduceMax", ["columns", "one"], ["scores"], keepdims=1),
        n("Cast", ["scores"], ["classes"], to=TensorProto.INT64),
        n("Cast", ["scores"], ["count"], to=TensorProto.INT32),
        n("Squeeze", ["count", "one"], ["counts"]),
        n("Unsqueeze", ["light", "one"], ["yes"]),
        n("Sub", ["unit", "yes"], ["no"]),
        n("Concat", ["no", "yes"], ["map"], axis=1),
        n("ReduceMean", ["x", "plane"], ["color"], keepdims=0),
        n("Mul", ["color", "gain"], ["vector"]),
    ]
    outputs = [
        zoo.value("boxes", ("batch", 1, 4)),
        zoo.value("scores", ("batch", 1)),
        zoo.value("classes", ("batch", 1), TensorProto.INT64),
        zoo.value("counts", ("batch",), TensorProto.INT32),
        zoo.value("map", ("batch", 2, 32, 32)),
        zoo.value("vector", ("batch", 3)),
    ]
    constants = {
        "one": np.array([1], np.int64),
        "two": np.array([2], np.int64),
        "plane": np.array([2, 3], np.int64),
        "limit": np.float32(0.4),
        "gain": np.ones(3, np.float32),
        "unit": np.float32(1),
    }
    return zoo.model(nodes, [zoo.value("x", ("batch", 3, 32, 32))], outputs, constants)


def write_store(folder: Path) -> Path:
    """Write a store with a model of the same graph for each task."""
    for name in TASKS:
        write_version(light_box(), folder, name, 1)
    return folder / "store"


def write_version(graph: Any, folder: Path, name: str, version: int, labels: Sequence[str] = ("dark", "light")) -> None:
    """Prove a graph for a task, and write it into the store."""
    file = folder / "export" / f"{name}-{version}.onnx"
    file.parent.mkdir(exist_ok=True)
    save(graph, file)
    x = np.random.default_rng(1).uniform(0, 1, (4, 3, 32, 32)).astype(np.float32)
    names = [output.name for output in graph.graph.output]
    outputs = dict(zip(names, reference.ReferenceEvaluator(graph).run(None, {"x": x}), strict=True))
    source = SourceInfo(
        description=name,
        command="",
        libraries=("onnx",),
        metrics={},
        preprocess=SPEC,
        labels=tuple(labels),
        task=TASKS[name],
    )
    prove_and_write(file, source, ReferenceSamples(feeds={"x": x}, outputs=outputs), folder / "store" / name, version)


def image(width: int, height: int, *box: int) -> Any:
    pixels = np.zeros((height, width, 3), np.uint8)
    x1, y1, x2, y2 = box
    pixels[y1:y2, x1:x2] = 255
    return pixels


IMAGES = [
    image(64, 32, 16, 8, 32, 16),
    image(32, 128, 8, 16, 24, 64),
    image(64, 64, 0, 0, 0, 0),
    image(32, 32, 3, 4, 9, 8),
]
BOXES = [Box(16, 8, 32, 16), Box(8, 16, 24, 64), None, Box(3, 4, 9, 8)]
