"""Refuse a request whose texts do not fill its shape, where the stub makes their arrays in Python (until 25.10).

The stub gives what `pb_utils.deserialize_bytes_tensor` returns the shape of the request, and ends where that fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray


def protect_texts(deserialize: Callable[[AnyArray], AnyArray]) -> Callable[[AnyArray], AnyArray]:
    """Wrap `deserialize_bytes_tensor`: its arrays become empty where the requested shape is impossible."""
    return lambda encoded: deserialize(encoded).view(_Words)


class _Words(np.ndarray[Any, Any]):
    """Texts that the stub is about to give the shape of the request."""

    def reshape(self, *shape: Any, **options: Any) -> AnyArray:
        plain = self.view(np.ndarray)
        sizes: Sequence[int] = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        possible = math.prod(sizes) == plain.size
        return plain.reshape(sizes, **options) if possible else np.empty([0] * (len(sizes) + 1), plain.dtype)
