"""What is found in an image: lists of boxes, classes and scores, the best first, in pixels of the image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from graphkiln_backend.graph import task as tasks
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.answers import Sample, read_detections
from graphkiln_backend.images.frame import Frame
from graphkiln_backend.scoring.encoders.base import Size
from graphkiln_backend.scoring.encoders.readings import columns_of, read_images

# COCO's uncompressed run lengths: `size` is height and width, `counts` go down the columns and begin with zeros.
MASK = pa.struct([pa.field("size", pa.list_(pa.int32())), pa.field("counts", pa.list_(pa.int32()))])
# The columns: what a detection calls it, and the type of one.
_KEYS = {
    "boxes": ("box", pa.list_(pa.float64())),
    "indices": ("index", pa.int32()),
    "labels": ("label", pa.string()),
    "scores": ("score", pa.float32()),
    "masks": ("mask", MASK),
    "keypoints": ("keypoints", pa.list_(pa.list_(pa.float64()))),
}


class Detections:
    """The columns `boxes`, `indices`, `labels` (where classes have names), `scores`, and what else the model gives.

    Each holds a list for a row: `boxes` x1, y1, x2, y2, `masks` run lengths, `keypoints` lists of x, y, score.

    Args:
        task: Which outputs hold them; what scores less than its threshold is left out, as clients do it.
        labels: Class names by index; empty for none. A class without one has an empty name.
        preprocess: How images became samples.
    """

    def __init__(self, task: tasks.Detection, labels: Sequence[str], preprocess: Preprocess) -> None:
        self.outputs: Sequence[str] = tasks.output_names(task)
        self._task, self._labels, self._preprocess = task, labels, preprocess
        given = {"labels": labels, "masks": task.masks, "keypoints": task.keypoints}
        fields = [pa.field(name, pa.list_(kind)) for name, (_, kind) in _KEYS.items() if given.get(name, True)]
        self.schema = pa.schema(fields)

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size]) -> list[pa.Array]:
        """Reads each row, as clients do."""
        return columns_of(self._rows(outputs, sizes), self.schema)

    def _rows(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size]) -> Iterator[dict[str, Any]]:
        for found in read_images(self._read, outputs, self._preprocess, sizes):
            yield {name: [each[_KEYS[name][0]] for each in found] for name in self.schema.names}

    def _read(self, sample: Sample, frame: Frame) -> list[dict[str, Any]]:
        return [each.to_dict() for each in read_detections(self._task, sample, frame, self._labels)]
