"""The vector of an image, as clients get it: normalized where the task says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.signature import TensorSpec
from graphkiln_backend.graph.task import Embedding
from graphkiln_backend.images.answers import read_vector
from graphkiln_backend.scoring.encoders.arrays import lists
from graphkiln_backend.scoring.encoders.base import Size
from graphkiln_backend.scoring.encoders.readings import read_rows


class Vectors:
    """The column `vector`: a list of floats, each of one length where the graph says how many.

    Args:
        task: Which output holds them.
        spec: Of that output.
    """

    def __init__(self, task: Embedding, spec: TensorSpec) -> None:
        self.outputs: Sequence[str] = (task.vectors,)
        self._task = task
        features = spec.shape[-1] if spec.has_rank else None
        self._features = features if isinstance(features, int) else None
        self.schema = pa.schema([pa.field("vector", pa.list_(pa.float32()))])

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size] = ()) -> list[pa.Array]:
        """Reads each row, as clients do."""
        del sizes
        vectors = np.stack(list(read_rows(partial(read_vector, self._task), outputs)))
        if self._features and vectors.shape[1] != self._features:
            raise ExecutionError(f"a vector has {vectors.shape[1]} features, expected {self._features}")
        return [lists(vectors)]
