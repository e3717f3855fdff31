"""Class maps are written as the client returns them, and read back from Parquet as they were."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from task_outputs import SEGMENTATION, segmenter_outputs

from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Segmentation
from graphkiln_backend.images import masks as sampling
from graphkiln_backend.images.answers import read_segmentation
from graphkiln_backend.images.frame import frame_of
from graphkiln_backend.images.masks import decode_rle
from graphkiln_backend.scoring.encoders import ClassMaps, Size

SPEC = Preprocess(resize=40, crop=(32, 32))
SIZES = [(50, 100), (91, 33)]
LABELS = ("ground", "box")
CLASSES = Segmentation(classes="classes")


def rows(task: Segmentation, outputs: dict[str, Any], sizes: Sequence[Size], folder: Path) -> list[dict[str, Any]]:
    encoder = ClassMaps(task, LABELS, SPEC)
    given = {name: outputs[name] for name in encoder.outputs}
    pq.write_table(pa.table(encoder.encode(given, sizes), schema=encoder.schema), folder / "rows.parquet")
    read: list[dict[str, Any]] = pq.read_table(folder / "rows.parquet").to_pylist()
    return read


@pytest.mark.parametrize("task", [SEGMENTATION, CLASSES])
def test_is_what_the_client_reads(task: Segmentation, tmp_path: Path) -> None:
    outputs = segmenter_outputs()
    outputs["classes"] = outputs["maps"].argmax(axis=1).astype(np.int64)
    written = rows(task, outputs, SIZES, tmp_path)
    for index, (row, size) in enumerate(zip(written, SIZES, strict=True)):
        sample = {name: values[index] for name, values in outputs.items()}
        expected = read_segmentation(task, sample, frame_of(SPEC, size), LABELS)
        assert row == expected.to_dict()
        assert [segment["label"] for segment in row["segments"]] == ["ground", "box", ""]
        for segment in row["segments"]:
            np.testing.assert_array_equal(decode_rle(segment["mask"]), expected.classes == segment["index"])


def test_what_lies_outside_the_crop_belongs_to_no_class(tmp_path: Path) -> None:
    (row,) = rows(SEGMENTATION, {"maps": segmenter_outputs()["maps"][:1]}, SIZES[:1], tmp_path)
    seen = sum(decode_rle(segment["mask"]).astype(int) for segment in row["segments"])
    assert (row["height"], row["width"]) == (50, 100)
    assert seen[25, 50] == 1
    assert seen[25, 5] == 0
    assert seen.max() == 1


def test_pixels_are_held_of_one_image_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_MOST_VALUES", 1 << 14)  # scores on their way to classes would hide it
    encoder, side = ClassMaps(SEGMENTATION, LABELS, Preprocess(resize=(32, 32))), 256
    outputs = {"maps": np.repeat(segmenter_outputs()["maps"], 8, axis=0)}

    def peak(count: int) -> int:
        tracemalloc.start()
        encoder.encode({"maps": outputs["maps"][:count]}, [(side, side)] * count)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(16) < 1.5 * peak(1)


def test_an_output_that_is_no_map() -> None:
    with pytest.raises(ExecutionError, match="is no score of each pixel"):
        ClassMaps(SEGMENTATION, LABELS, SPEC).encode({"maps": np.zeros((2, 3, 4), np.float32)}, SIZES)
