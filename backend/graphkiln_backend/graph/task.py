"""What a version answers about an image, and which of its outputs say so: classes, boxes, class maps, vectors.

The manifest holds it, the server publishes it, and whoever reads outputs (client, scoring, proof) goes by it. Outputs
are padded, so that requests of several clients can be computed as one batch: a graph gives every image the same number
of rows, and how many of them count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from graphkiln_backend.graph.decoding import decode_value, parse_json
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.labels import check_count
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.graph.signature import Signature, TensorSpec

PARAMETER = "task"
"""The key of config.pbtxt's `parameters` under which it is published, as JSON."""

VERBS = {"classification": "classify", "detection": "detect", "segmentation": "segment", "embedding": "embed"}
"""What clients and the command line call it, by the kind of a task."""

_FLOATS = (DType.FP32, DType.FP16, DType.BF16)
_INTEGERS = (DType.INT64, DType.INT32)
_CLASS_MAPS = (*_INTEGERS, DType.UINT8)

_T = TypeVar("_T", bound="Classification | Detection | Segmentation | Embedding")


def _tensor(types: tuple[DType, ...], rank: int, **sizes: int) -> dict[str, Any]:
    """Of a field that names an output: its element types, its number of dimensions, and the sizes that are fixed.

    Args:
        types: What is allowed.
        rank: With the batch.
        sizes: `last`: the size of the last dimension.
    """
    return {"types": types, "rank": rank, **sizes}


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """A score for each class; what every version without a task is asked."""

    kind: Literal["classification"] = "classification"


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """Boxes around things, the best first. Fields name outputs of the graph.

    Attributes:
        kind: Tells the tasks apart in a manifest.
        boxes: FP32 `[batch, detections, 4]`: x1, y1, x2, y2 in pixels of the model's input, by falling score.
        scores: FP32 `[batch, detections]`.
        classes: INT64 `[batch, detections]`: lines of the labels file, the first is 0.
        counts: INT32 `[batch]`: how many of the detections are any; the rest is padding with zeros.
        masks: FP32 `[batch, detections, height, width]`: probabilities; or None.
        mask_frame: What a mask covers: its `box`, as torchvision's do, or the `image`, which is the whole input.
        keypoints: FP32 `[batch, detections, keypoints, 3]`: x, y in pixels of the input, score; or None.
        score_threshold: Detections below it are left out, unless a caller wants them.
    """

    boxes: str = field(metadata=_tensor(_FLOATS, 3, last=4))
    scores: str = field(metadata=_tensor(_FLOATS, 2))
    classes: str = field(metadata=_tensor(_INTEGERS, 2))
    counts: str = field(metadata=_tensor(_INTEGERS, 1))
    masks: str | None = field(default=None, metadata=_tensor(_FLOATS, 4))
    mask_frame: Literal["box", "image"] = "box"
    keypoints: str | None = field(default=None, metadata=_tensor(_FLOATS, 4, last=3))
    score_threshold: float = 0.5
    kind: Literal["detection"] = "detection"

    def __post_init__(self) -> None:
        if not 0 <= self.score_threshold <= 1:
            raise ManifestError(f"task.score_threshold must be from 0 to 1, got {self.score_threshold}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Segmentation:
    """A class for each pixel. Exactly one of the fields names an output of the graph.

    Attributes:
        kind: Tells the tasks apart in a manifest.
        scores: FP32 `[batch, classes, height, width]`, over the model's input at any stride.
        classes: INT64, INT32 or UINT8 `[batch, height, width]`, likewise: lines of the labels file, the first is 0.
    """

    scores: str | None = field(default=None, metadata=_tensor(_FLOATS, 4))
    classes: str | None = field(default=None, metadata=_tensor(_CLASS_MAPS, 3))
    kind: Literal["segmentation"] = "segmentation"

    def __post_init__(self) -> None:
        if (self.scores is None) == (self.classes is None):
            raise ManifestError("task: a segmentation names either its scores or its classes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """A vector for each image.

    Attributes:
        kind: Tells the tasks apart in a manifest.
        vectors: FP32 `[batch, features]`.
        normalize: Whether clients divide it by its length; False where the graph does so, or nobody shall.
    """

    vectors: str = field(metadata=_tensor(_FLOATS, 2))
    normalize: bool = False
    kind: Literal["embedding"] = "embedding"


Task = Classification | Detection | Segmentation | Embedding
"""One of the four; `kind` tells which."""

Reading = Ranking | Task
"""What users read from the outputs: the best classes where the graph ranks them itself, or else a task."""


def is_classification(task: Task | None) -> bool:
    """Whether images are classified, as far as anybody says: also where no task is named."""
    return task is None or isinstance(task, Classification)


def read_task(text: str) -> Task:
    """Parses a published task.

    Raises:
        ManifestError: Not JSON, or no task; the message names the bad key.
    """
    task: Task = decode_value(Task, parse_json(text, what="the task"), path=PARAMETER)
    return task


def output_names(task: Task) -> tuple[str, ...]:
    """The outputs that a task is read from, in the order of its fields."""
    return tuple(name for _, name, _ in _outputs(task))


def rename_outputs(task: _T, names: Mapping[str, str]) -> _T:
    """A task after outputs were renamed.

    Args:
        task: By the old names.
        names: Old name -> new name; a name that is not among them stays.
    """
    changed: dict[str, Any] = {key: names.get(name, name) for key, name, _ in _outputs(task)}
    return replace(task, **changed)


def check_task(task: Task | None, labels: Sequence[str], signature: Signature, origin: object) -> None:
    """Checks that a graph has the outputs that its task names, as the task needs them, and a label for each class.

    Args:
        task: The task, or None.
        labels: By class index; empty for none.
        signature: Of the graph.
        origin: What holds the labels, for the message.

    Raises:
        ManifestError: An output is missing, has another type or shape, or there is another number of labels.
    """
    if task is None or isinstance(task, Classification):
        check_count(labels, signature, origin)
        return
    specs = {spec.name: spec for spec in signature.outputs}
    for key, name, wanted in _outputs(task):
        if name not in specs:
            raise ManifestError(
                f"'{PARAMETER}.{key}' names the output '{name}', which the graph does not have",
                hint=f"it has {', '.join(map(str, signature.outputs))}",
            )
        _check_output(specs[name], wanted, key)
    if isinstance(task, Segmentation) and task.scores:
        _check_scored_classes(specs[task.scores], labels, origin)


def _outputs(task: Task) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Key, name and demands of each output that a task names."""
    for each in fields(task):
        name = getattr(task, each.name)
        if "types" in each.metadata and name is not None:
            yield each.name, name, each.metadata


def _check_output(spec: TensorSpec, wanted: Mapping[str, Any], key: str) -> None:
    last = wanted.get("last")
    fits = (
        spec.dtype in wanted["types"]
        and (not spec.has_rank or len(spec.shape) == wanted["rank"])
        and (last is None or not isinstance(spec.shape[-1], int) or spec.shape[-1] == last)
    )
    if not fits:
        types = " or ".join(map(str, wanted["types"]))
        size = f", {last} in the last" if last else ""
        raise ManifestError(f"'{PARAMETER}.{key}' must name {types} of {wanted['rank']} dimensions{size}, got {spec}")


def _check_scored_classes(scores: TensorSpec, labels: Sequence[str], origin: object) -> None:
    classes = scores.shape[1] if scores.has_rank else None
    if labels and isinstance(classes, int) and len(labels) != classes:
        raise ManifestError(
            f"{origin} has {len(labels)} labels, but output '{scores.name}' has {classes} classes",
            hint="one line for each class, in the order of the output",
        )
