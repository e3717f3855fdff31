"""Detections are written as the client returns them, and read back from Parquet as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from task_outputs import DETECTION, detector_outputs

from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.images.answers import read_detections
from graphkiln_backend.images.frame import frame_of
from graphkiln_backend.scoring.encoders import Detections

SPEC = Preprocess(letterbox=Letterbox(size=(224, 224)))
SIZES = [(60, 224), (448, 100), (31, 77)]
LABELS = ("ant", "bee")
RICH = replace(DETECTION, keypoints="keypoints")


def outputs() -> dict[str, Any]:
    """Of three images: four detections, two, none."""
    found = detector_outputs()
    found["counts"][:] = 4, 2, 0
    found["keypoints"] = np.random.default_rng(5).uniform(0, 224, (3, 6, 2, 3)).astype(np.float32)
    return found


def rows(encoder: Detections, found: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    given = {name: found[name] for name in encoder.outputs}
    pq.write_table(pa.table(encoder.encode(given, SIZES), schema=encoder.schema), folder / "rows.parquet")
    read: list[dict[str, Any]] = pq.read_table(folder / "rows.parquet").to_pylist()
    return read


def test_is_what_the_client_reads(tmp_path: Path) -> None:
    found = outputs()
    written = rows(Detections(RICH, LABELS, SPEC), found, tmp_path)
    assert [len(row["boxes"]) for row in written] == [4, 2, 0]
    for index, (row, size) in enumerate(zip(written, SIZES, strict=True)):
        sample = {name: values[index] for name, values in found.items()}
        expected = [one.to_dict() for one in read_detections(RICH, sample, frame_of(SPEC, size), LABELS)]
        keys = {"boxes": "box", "indices": "index", "labels": "label", "scores": "score", "masks": "mask"}
        for column, key in {**keys, "keypoints": "keypoints"}.items():
            assert row[column] == [one[key] for one in expected]


def test_only_what_the_model_gives() -> None:
    plain = replace(DETECTION, masks=None)
    assert Detections(plain, (), SPEC).schema.names == ["boxes", "indices", "scores"]
    assert Detections(plain, LABELS, SPEC).schema.names == ["boxes", "indices", "labels", "scores"]
    assert Detections(plain, (), SPEC).outputs == ("boxes", "scores", "classes", "counts")


def test_places_follow_the_size_of_each_image(tmp_path: Path) -> None:
    found = outputs()
    found["boxes"][:, 0] = 0, 82, 112, 112  # the upper left part of a wide image of which 82 rows are padding
    first, second, _ = rows(Detections(DETECTION, LABELS, SPEC), found, tmp_path)
    assert first["boxes"][0] == [0, 0, 112, 30]
    assert second["boxes"][0] == [0, 164, 50, 224]
    assert first["masks"][0]["size"] == [60, 224]
    assert sum(second["masks"][0]["counts"]) == 448 * 100


def test_nothing_found_anywhere() -> None:
    found = {**outputs(), "counts": np.zeros(3, np.int32)}
    encoder = Detections(DETECTION, (), SPEC)
    table = pa.table(encoder.encode({name: found[name] for name in encoder.outputs}, SIZES), schema=encoder.schema)
    assert table.column("boxes").to_pylist() == [[], [], []]
    assert table.column("boxes").null_count == 0


def test_outputs_that_hold_no_detections() -> None:
    found = {**outputs(), "counts": np.array([4, 9, 0], np.int32)}
    encoder = Detections(DETECTION, (), SPEC)
    with pytest.raises(ExecutionError, match="hold no detections"):
        encoder.encode({name: found[name] for name in encoder.outputs}, SIZES)
