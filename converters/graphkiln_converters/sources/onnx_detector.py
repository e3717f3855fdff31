"""`FILE.onnx --task detection`: detectors of the YOLO kind, whose post-processing is appended to the graph.

The reference is the graph as it is, with its outputs read image by image in NumPy.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import onnx
import onnx_ir
import torch

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.graph.task import Detection
from graphkiln_converters.detection.appending import append
from graphkiln_converters.detection.candidates import DETECTION, OUTPUTS
from graphkiln_converters.detection.yolo import head_of
from graphkiln_converters.sources import onnx_file
from graphkiln_converters.sources.base import EXPORT_BATCH, InputSpec, SourceOptions, synthetic_samples
from graphkiln_converters.sources.onnx_file import OnnxModel
from graphkiln_converters.sources.onnx_heads import FoundHead, find_head
from graphkiln_converters.sources.pytorch import export_module
from graphkiln_converters.sources.tensors import to_tensor

_SCORE_THRESHOLD = 0.25
"""Below it, clients leave detections out unless they want them. Source: Ultralytics, "Predict"."""
_CHANNELS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxDetector:
    """A graph of the YOLO kind as a `SourceModel` that returns detections.

    Attributes:
        file: The graph as it was opened.
        head: How it is read.
        inputs: Its image, of one size.
        preprocess: How an image becomes that.
        labels: Class names, where the file holds some.
        task: See `TaskSource`.
    """

    file: OnnxModel
    head: FoundHead
    inputs: tuple[InputSpec, ...]
    preprocess: Preprocess
    labels: tuple[str, ...]
    task: Detection
    libraries: tuple[str, ...] = ("onnx", "onnxruntime", "torch")

    @property
    def description(self) -> str:
        """The file's name."""
        return self.file.description

    @property
    def batch_size(self) -> int:
        """See `FixedBatchSource`."""
        return self.head.graph.batch_size

    @property
    def classes(self) -> int:
        """See `ClassesSource`."""
        return self.head.classes

    @property
    def notes(self) -> tuple[str, ...]:
        """See `NotedSource`."""
        return (self.head.note,)

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`."""
        return self.head.run(feeds)

    def export(self, dynamic: Mapping[str, Mapping[int, tuple[int, int]]]) -> onnx_ir.Model:
        """See `SourceModel.export`.

        Raises:
            ConversionError: Another size than the batch is to vary.
        """
        if any(dynamic.values()):
            raise ConversionError("--dynamic: a detector takes images of one size", hint="choose it with --shape")
        model = self.head.graph.export({})
        for value, spec in zip(model.graph.inputs, self.inputs, strict=True):
            value.shape = onnx_ir.Shape(["batch", *spec.shape])
        return append(model, self._export_head(), self.head.read)

    def _export_head(self) -> onnx_ir.Model:
        found = self.head.graph.run(synthetic_samples(self.inputs, EXPORT_BATCH, {}, seed=0))
        example = tuple(to_tensor(found[name]) for name in self.head.read)
        return export_module(
            head_of(self.head.settings),
            example,
            {},
            dynamic_shapes=({0: torch.export.Dim("batch")},) * len(example),
            input_names=list(self.head.read),
            output_names=list(OUTPUTS),
            description=f"the head {self.head.settings.head}",
        )

    def close(self) -> None:
        """See `SourceModel.close`."""
        self.head.release()
        self.file.close()


def open_source(location: str, options: SourceOptions) -> OnnxModel | OnnxDetector:
    """Opens a graph of the YOLO kind, or one that returns `boxes`, `scores`, `classes` and `counts` itself.

    Raises:
        ConversionError: The file cannot be loaded, its kind is not clear, or it cannot take batches of images.
    """
    model = onnx_file.open_source(location, options)
    try:
        return _with_head(model, options)
    except BaseException:
        model.close()
        raise


def _with_head(model: OnnxModel, options: SourceOptions) -> OnnxModel | OnnxDetector:
    given = options.detection.given
    if set(OUTPUTS) <= set(model.outputs):
        if given:
            raise ConversionError(f"{model.path} returns {', '.join(OUTPUTS)} itself", hint=f"leave out {given[0]}")
        return model
    image, layout = _image(model, options)
    height, width = image.shape[1:] if layout == "CHW" else image.shape[:2]
    head = find_head(model, image, (height, width), options)
    try:
        return OnnxDetector(
            file=model,
            head=head,
            inputs=(image,),
            preprocess=Preprocess(letterbox=Letterbox(size=(height, width)), layout=layout, dtype=image.dtype),
            labels=_labels(model.path, head.classes),
            task=replace(DETECTION, score_threshold=_SCORE_THRESHOLD),
        )
    except BaseException:
        head.release()
        raise


def _image(model: OnnxModel, options: SourceOptions) -> tuple[InputSpec, Literal["CHW", "HWC"]]:
    """The only input, of one size, and the order of its dimensions.

    Raises:
        ConversionError: It is no image, or nothing says how large it is.
    """
    (spec, *others) = model.inputs
    shape = spec.shape[1:] if model.whole else spec.shape
    varies = any(axis >= len(spec.shape) - len(shape) for axis in spec.dynamic)
    if others or len(shape) != 3 or _CHANNELS not in (shape[0], shape[2]):
        listed = ", ".join(f"{each.name} {list(each.shape)}" for each in model.inputs)
        raise ConversionError(f"a detector takes one image, {model.path} takes {listed}", hint="--shape 3x640x640")
    if varies and not options.shapes:
        raise ConversionError(
            f"{model.path} takes images of any size, and a version takes images of one", hint="--shape 3x640x640"
        )
    return replace(spec, shape=shape, dynamic={}), "CHW" if shape[0] == _CHANNELS else "HWC"


def _labels(path: Path, classes: int) -> tuple[str, ...]:
    """The names that Ultralytics writes into its files: a dict by class, as Python spells it.

    Raises:
        ConversionError: They are of another number of classes than the outputs hold: the outputs hold something else.
    """
    properties = {each.key: each.value for each in onnx.load(path, load_external_data=False).metadata_props}
    try:
        names = ast.literal_eval(properties.get("names", "{}"))
    except (ValueError, SyntaxError):
        return ()
    if not isinstance(names, dict) or set(names) != set(range(len(names))):
        return ()
    if names and classes and len(names) != classes:
        raise ConversionError(
            f"{path} names {len(names)} classes, and its output would hold {classes}: it is of another kind than plain "
            "boxes, such as poses, masks or turned boxes",
            hint="name the kind with --head, or wrap it: python:FILE:FACTORY --task detection",
        )
    return tuple(str(names[number]) for number in range(len(names)))
