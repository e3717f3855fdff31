"""Vectors are written as the client returns them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.signature import TensorSpec
from graphkiln_backend.graph.task import Embedding
from graphkiln_backend.images.answers import read_vector
from graphkiln_backend.scoring.encoders import Vectors

VALUES = np.random.default_rng(4).standard_normal((3, 4)).astype(np.float32)
NORMALIZED = Embedding(vectors="v", normalize=True)


def encoder(task: Embedding, features: int | str = 4) -> Vectors:
    return Vectors(task, TensorSpec(name="v", dtype=DType.FP32, shape=("batch", features)))


@pytest.mark.parametrize("task", [NORMALIZED, Embedding(vectors="v")])
@pytest.mark.parametrize("values", [VALUES, VALUES.astype(np.float16), VALUES.astype(ml_dtypes.bfloat16)])
def test_is_what_the_client_reads(task: Embedding, values: AnyArray) -> None:
    (found,) = encoder(task).encode({"v": values})
    assert found.type == pa.list_(pa.float32())
    assert found.to_pylist() == [read_vector(task, {"v": row}).tolist() for row in values]


def test_normalized_vectors_have_length_one_and_zeros_stay() -> None:
    (found,) = encoder(NORMALIZED).encode({"v": np.array([[3, 0, 4, 0], [0, 0, 0, 0]], np.float32)})
    np.testing.assert_allclose(found.to_pylist(), [[0.6, 0, 0.8, 0], [0, 0, 0, 0]], rtol=1e-6)


def test_a_length_that_the_graph_does_not_say() -> None:
    (found,) = encoder(Embedding(vectors="v"), "features").encode({"v": VALUES})
    assert found.type == pa.list_(pa.float32())
    assert found.to_pylist() == VALUES.tolist()


def test_what_is_no_vector() -> None:
    with pytest.raises(ExecutionError, match="is no vector"):
        encoder(NORMALIZED).encode({"v": VALUES[np.newaxis]})
    with pytest.raises(ExecutionError, match="4 features, expected 5"):
        encoder(NORMALIZED, 5).encode({"v": VALUES})
