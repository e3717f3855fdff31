"""Outputs are written as they are, whatever their shape and type."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.signature import ANY_RANK, TensorSpec
from graphkiln_backend.scoring.encoders import SHAPE, Tensors


def spec(name: str, *shape: int | str, dtype: DType = DType.FP32) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def table(encoder: Tensors, **outputs: AnyArray) -> pa.Table:
    return pa.table(encoder.encode(outputs), schema=encoder.schema)


def test_an_embedding_is_a_list() -> None:
    values = np.arange(8, dtype=np.float16).reshape(2, 4)
    found = table(Tensors([spec("vector", "batch", 4, dtype=DType.FP16)]), vector=values)
    assert found.schema.field("vector").type == pa.list_(pa.float16())
    assert found.column("vector").to_pylist() == values.tolist()


def test_a_map_of_features_says_its_shape() -> None:
    values = np.arange(12, dtype=np.float32).reshape(1, 2, 3, 2)
    found = table(Tensors([spec("map", "batch", 2, 3, 2)]), map=values)
    shape = json.loads(found.schema.field("map").metadata[SHAPE])
    assert np.asarray(found.column("map")[0].as_py(), np.float32).reshape(shape).tolist() == values[0].tolist()


def test_one_element_per_row_is_a_plain_column() -> None:
    found = table(Tensors([spec("age", "batch", dtype=DType.INT64)]), age=np.asarray([7, 8]))
    assert found.to_pydict() == {"age": [7, 8]}


@pytest.mark.parametrize("shape", [("batch", "?boxes", 4), (ANY_RANK,), ("batch", 0, 4)])
def test_rows_whose_shape_varies_say_it(shape: tuple[Any, ...]) -> None:
    encoder = Tensors([spec("boxes", *shape)])
    values = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    found = pa.concat_tables([table(encoder, boxes=values), table(encoder, boxes=values[:, :0])])
    assert found.column("boxes_shape").to_pylist() == [[2, 4], [0, 4]]
    assert found.column("boxes").to_pylist() == [values.reshape(-1).tolist(), []]


def test_texts_are_strings() -> None:
    values = np.asarray([["a", "b"], ["c", ""]], object)
    found = table(Tensors([spec("words", "batch", 2, dtype=DType.BYTES)]), words=values)
    assert found.column("words").to_pylist() == [["a", "b"], ["c", ""]]


def test_several_outputs_are_several_columns() -> None:
    encoder = Tensors([spec("a", "batch", 1), spec("b", "batch")])
    assert encoder.outputs == ("a", "b")
    assert encoder.schema.names == ["a", "b"]


def test_an_output_gives_way_to_a_column_of_its_name() -> None:
    assert Tensors([spec("id", "batch")], ["id"]).schema.names == ["output:id"]


def test_another_shape_than_the_graphs_is_an_error() -> None:
    with pytest.raises(ExecutionError, match=r"expected \[4\] for each row"):
        Tensors([spec("vector", "batch", 4)]).encode({"vector": np.zeros((2, 5), np.float32)})
    with pytest.raises(ExecutionError, match=r"expected \[\] for each row"):
        Tensors([spec("age", "batch")]).encode({"age": np.zeros((2, 5), np.float32)})
