"""Arrays that a wire must carry unchanged: every kind of element, empty, scalar and not contiguous."""

from __future__ import annotations

import numpy as np

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array([[True, False]]),
    np.array([b"a", b"", b"\xff\x00"], np.object_),
    np.array([["x", "\u00e4"]], np.object_),
    np.zeros((0, 3), np.int64),
    np.array(7, np.uint8).reshape(()),
    np.arange(4, dtype=np.float16)[::2],
]
