"""Decode the outputs of a task for one sample, in pixels of the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph import task as tasks
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_backend.images.frame import Frame
from graphkiln_backend.images.masks import Mask, best_class, encode_rle, sample_nearest


@dataclass(frozen=True, slots=True)
class Box:
    """A box in pixels of an image; the upper left corner is 0, 0.

    Attributes:
        x1: Left.
        y1: Top.
        x2: Right.
        y2: Bottom.
    """

    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """A detected object.

    Attributes:
        box: Bounding box.
        label: Class name; empty without labels.
        index: Class index.
        score: The model's score.
        mask: Mask of the object, or None.
        keypoints: `[keypoints, 3]`: x and y in pixels of the image, score; or None.
    """

    box: Box
    label: str
    index: int
    score: float
    mask: Mask | None = field(default=None, compare=False)
    keypoints: npt.NDArray[np.float64] | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data; the mask becomes run lengths."""
        row: dict[str, Any] = {
            "label": self.label,
            "index": self.index,
            "score": self.score,
            "box": [self.box.x1, self.box.y1, self.box.x2, self.box.y2],
        }
        if self.mask is not None:
            row["mask"] = self.mask.rle()
        if self.keypoints is not None:
            row["keypoints"] = self.keypoints.tolist()
        return row


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentedImage:
    """The class of every pixel of an image.

    Attributes:
        classes: `[height, width]` at the size of the image; UINT8, or INT32 with more than 255 classes.
        labels: Names by class; empty without labels.
        unseen: Value in `classes` outside of the model's center crop.
    """

    classes: npt.NDArray[np.uint8] | npt.NDArray[np.int32]
    labels: tuple[str, ...]
    unseen: int

    @property
    def present(self) -> tuple[int, ...]:
        """The classes present, by decreasing share of the image."""
        indices, counts = np.unique(self.classes, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return tuple(int(indices[place]) for place in order if indices[place] != self.unseen)

    def label(self, index: int) -> str:
        """Name of a class; empty without labels."""
        return self.labels[index] if 0 <= index < len(self.labels) else ""

    def share(self, index: int) -> float:
        """Share of the image that a class covers, from 0 to 1."""
        return float((self.classes == index).mean())

    def rle(self, index: int) -> dict[str, Any]:
        """Mask of a class as COCO's uncompressed run lengths."""
        return encode_rle(self.classes == index)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data; each class becomes run lengths."""
        rows = [
            {"label": self.label(index), "index": index, "share": self.share(index), "mask": self.rle(index)}
            for index in self.present
        ]
        return {"height": self.classes.shape[0], "width": self.classes.shape[1], "segments": rows}


# The outputs of one sample by name, without the batch.
Sample = Mapping[str, AnyArray]


def read_detections(
    task: tasks.Detection, sample: Sample, frame: Frame, labels: Sequence[str], threshold: float | None = None
) -> tuple[Detection, ...]:
    """Decode the detections of one sample, best first.

    Args:
        task: Names of the outputs.
        sample: Outputs of the sample.
        frame: Frame of its image.
        labels: Names by class; may be shorter.
        threshold: Minimum score; None for the task's threshold.

    Raises:
        ProtocolError: The outputs do not match the task.
    """
    count = _count(task, sample)
    boxes, classes = sample[task.boxes][:count], sample[task.classes][:count]
    scores = sample[task.scores][:count].astype(np.float64)
    kept = np.flatnonzero(scores >= (task.score_threshold if threshold is None else threshold))
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    places, whole = frame.boxes_to_image(boxes), frame.to_image(boxes)
    return tuple(
        Detection(
            box=Box(*map(float, places[row])),
            label=labels[index] if 0 <= index < len(labels) else "",
            index=index,
            score=float(scores[row]),
            mask=_mask(task, sample, row, frame, whole[row]),  # relative to the unclipped box
            keypoints=_keypoints(task, sample, row, frame),
        )
        for row, index in ((int(row), int(classes[row])) for row in kept)
    )


def read_segmentation(task: tasks.Segmentation, sample: Sample, frame: Frame, labels: Sequence[str]) -> SegmentedImage:
    """Decode the segmentation of one sample.

    Scores are interpolated once, from the model's grid to the pixels of the image, before the best class is chosen.

    Args:
        task: Name of the output.
        sample: Outputs of the sample.
        frame: Frame of its image.
        labels: Names by class; may be shorter.

    Raises:
        ProtocolError: The output does not match the task.
    """
    grid = sample[task.scores or task.classes or ""]
    if grid.ndim != (3 if task.scores else 2) or not grid.size:
        raise ProtocolError(f"{list(grid.shape)} is not a {'score' if task.scores else 'class'} of each pixel")
    rows, columns = frame.rows(), frame.columns()
    grid_rows, grid_columns = (
        rows * (grid.shape[-2] / frame.input_height),
        columns * (grid.shape[-1] / frame.input_width),
    )
    if task.scores:
        found: npt.NDArray[Any] = best_class(grid.astype(np.float32, copy=False), grid_rows, grid_columns)
        classes = len(grid)
    else:
        found = sample_nearest(grid, grid_rows, grid_columns)
        classes = max(int(grid.max()) + 1, len(labels))
    small = classes <= 255
    unseen = 255 if small else -1
    image: npt.NDArray[Any] = found.astype(np.uint8 if small else np.int32, copy=False)
    image[(rows < 0) | (rows > frame.input_height)] = unseen
    image[:, (columns < 0) | (columns > frame.input_width)] = unseen
    return SegmentedImage(classes=image, labels=tuple(labels), unseen=unseen)


def read_vector(task: tasks.Embedding, sample: Sample, normalize: bool | None = None) -> npt.NDArray[np.float32]:
    """Decode the vector `[features]` of one sample.

    Args:
        task: Name of the output.
        sample: Outputs of the sample.
        normalize: Whether to divide it by its length, unless it is zero; None for the task's setting.

    Raises:
        ProtocolError: The output is not a vector.
    """
    vector = sample[task.vectors].astype(np.float32)
    if vector.ndim != 1:
        raise ProtocolError(f"{list(vector.shape)} is not a vector")
    length = np.linalg.norm(vector.astype(np.float64))
    normalized = task.normalize if normalize is None else normalize
    return (vector / length).astype(np.float32) if normalized and length else vector


def _count(task: tasks.Detection, sample: Sample) -> int:
    shapes = {name: list(sample[name].shape) for name in (task.boxes, task.scores, task.classes, task.counts)}
    most = len(sample[task.scores]) if sample[task.scores].ndim == 1 else -1
    count = int(sample[task.counts].reshape(-1)[0]) if sample[task.counts].size == 1 else -1
    fits = shapes[task.boxes] == [most, 4] and shapes[task.classes] == [most] and 0 <= count <= most
    if not fits:
        raise ProtocolError(f"the outputs hold no detections: {shapes}, of which {count} count")
    return count


def _mask(task: tasks.Detection, sample: Sample, row: int, frame: Frame, box: AnyArray) -> Mask | None:
    if task.masks is None:
        return None
    x1, y1, x2, y2 = map(float, box)
    within = (x1, y1, x2, y2) if task.mask_frame == "box" else None
    return Mask(probabilities=sample[task.masks][row], frame=frame, box=within)


def _keypoints(task: tasks.Detection, sample: Sample, row: int, frame: Frame) -> npt.NDArray[np.float64] | None:
    if task.keypoints is None:
        return None
    points = sample[task.keypoints][row].astype(np.float64)
    placed: npt.NDArray[np.float64] = np.concatenate([frame.to_image(points[:, :2]), points[:, 2:]], axis=1)
    return placed
