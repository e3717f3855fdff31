"""Refuse string tensors that do not match the shape of their request (Triton before 25.10).

Those stubs reshape the result of `pb_utils.deserialize_bytes_tensor`, and exit if that raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray


def protect_texts(deserialize: Callable[[AnyArray], AnyArray]) -> Callable[[AnyArray], AnyArray]:
    """Wrap `deserialize_bytes_tensor`: reshaping its arrays to an impossible shape gives an empty array."""
    return lambda encoded: deserialize(encoded).view(_Strings)


class _Strings(np.ndarray[Any, Any]):
    """Strings that the stub is about to reshape."""

    def reshape(self, *shape: Any, **options: Any) -> AnyArray:
        plain = self.view(np.ndarray)
        sizes: Sequence[int] = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        possible = math.prod(sizes) == plain.size
        return plain.reshape(sizes, **options) if possible else np.empty([0] * (len(sizes) + 1), plain.dtype)
