"""Tensors of every type, for clients that ask `types`, `FP16` and others, which return their inputs."""

import numpy as np

INTEGERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
LIMITS = {name: np.iinfo(name.lower()) for name in INTEGERS}
TYPES = {
    "BOOL": np.array([[True, False, True]]),
    **{name: np.array([[limits.min, 1, limits.max]], name.lower()) for name, limits in LIMITS.items()},
    "FP32": np.array([[np.finfo("f4").min, 0.1, 1e-45]], np.float32),
    "FP64": np.array([[np.finfo("f8").min, 0.1, 5e-324]], np.float64),
    "BYTES": np.array([[b"a", b"", "\u00e4\u20ac".encode()]], object),
}
ODD = np.array([[np.nan, np.inf, -np.inf]])
# Question -> model, and its inputs.
SHARED = {
    "every type": ("types", TYPES),
    "NaN and infinity": ("types", {**TYPES, "FP32": ODD.astype(np.float32), "FP64": ODD}),
    "empty": ("types", {name: array[:, :0] for name, array in TYPES.items()}),
    "FP16": ("FP16", {"FP16": np.array([[np.finfo("f2").min, 0.1, 6e-8]], np.float16)}),
}
