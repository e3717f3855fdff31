"""Rows are read one at a time, each with the frame of its own image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from graphkiln_backend.graph.errors import ExecutionError, ProtocolError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.answers import Sample
from graphkiln_backend.images.frame import Frame
from graphkiln_backend.scoring.encoders import columns_of, read_images, read_rows

OUTPUTS = {"a": np.arange(6).reshape(3, 2), "b": np.arange(3)}


def test_each_row_has_its_outputs_and_its_image() -> None:
    def read(sample: Sample, frame: Frame) -> list[Any]:
        return [sample["a"].tolist(), int(sample["b"]), (frame.height, frame.width)]

    sizes = [(4, 5), (6, 7), (8, 9)]
    found = list(read_images(read, OUTPUTS, Preprocess(resize=(2, 2)), sizes))
    assert found == [[[0, 1], 0, (4, 5)], [[2, 3], 1, (6, 7)], [[4, 5], 2, (8, 9)]]


def test_outputs_that_the_client_would_refuse_are_the_models_fault() -> None:
    def read(sample: Sample) -> int:
        if sample["b"] == 1:
            raise ProtocolError("no such thing")
        return 0

    found = read_rows(read, OUTPUTS)
    assert next(found) == 0
    with pytest.raises(ExecutionError, match="no such thing"):
        next(found)


def test_plain_data_becomes_columns_of_the_schemas_types() -> None:
    def read() -> Iterator[dict[str, Any]]:
        for number in range(3):
            yield {"n": number, "list": [number] * number}

    schema = pa.schema([pa.field("n", pa.int32()), pa.field("list", pa.list_(pa.int64()))])
    columns = columns_of(read(), schema)
    assert [column.to_pylist() for column in columns] == [[0, 1, 2], [[], [1], [2, 2]]]
    assert [column.type for column in columns] == schema.types
