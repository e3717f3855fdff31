"""Which pixels of an image belong to which class: run lengths for each class, at the size of the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from graphkiln_backend.graph import task as tasks
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.answers import Sample, read_segmentation
from graphkiln_backend.images.frame import Frame
from graphkiln_backend.scoring.encoders.base import Size
from graphkiln_backend.scoring.encoders.detections import MASK
from graphkiln_backend.scoring.encoders.readings import columns_of, read_images

_SEGMENT = pa.struct(
    [
        pa.field("label", pa.string()),
        pa.field("index", pa.int32()),
        pa.field("share", pa.float64()),
        pa.field("mask", MASK),
    ]
)


class ClassMaps:
    """The columns `height` and `width` of the image, and `segments`: a struct for each class that occurs.

    The largest class comes first; pixels where the model did not look belong to none.

    Args:
        task: Which output holds them.
        labels: Class names by index; a class without one has an empty name.
        preprocess: How images became samples.
    """

    def __init__(self, task: tasks.Segmentation, labels: Sequence[str], preprocess: Preprocess) -> None:
        self.outputs: Sequence[str] = tasks.output_names(task)
        self._task, self._labels, self._preprocess = task, labels, preprocess
        sides = [pa.field("height", pa.int32()), pa.field("width", pa.int32())]
        self.schema = pa.schema([*sides, pa.field("segments", pa.list_(_SEGMENT))])

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size]) -> list[pa.Array]:
        """Reads each row, as clients do."""
        return columns_of(read_images(self._read, outputs, self._preprocess, sizes), self.schema)

    def _read(self, sample: Sample, frame: Frame) -> dict[str, Any]:
        return read_segmentation(self._task, sample, frame, self._labels).to_dict()
