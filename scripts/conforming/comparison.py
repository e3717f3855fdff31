"""When an answer is the expected one, by the suite's own rules.

Source: `onnx.backend.test.runner.Runner.assert_similar_outputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray

_BFLOAT16_RTOL = 2**-6  # what the suite allows, whatever else a case says
_LONGEST = 300


def differences(expected: Mapping[str, Any], got: Mapping[str, Any], rtol: float, atol: float) -> str:
    """How the first output differs that does; empty where none does.

    Args:
        expected: Values by name: arrays, lists of values, or None.
        got: As many, by the same names.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
    """
    found = ((name, difference(value, got[name], rtol, atol)) for name, value in expected.items())
    return next((f"{name}: {text}" for name, text in found if text), "")


def difference(expected: Any, got: Any, rtol: float, atol: float) -> str:
    """How a value differs; empty where it does not."""
    if isinstance(expected, list) or isinstance(got, list):
        return _difference_of_lists(expected, got, rtol, atol)
    if expected is None or got is None:
        return "" if expected is got else "a value in the place of none"
    if got.shape != expected.shape:
        return f"the shape {list(got.shape)} instead of {list(expected.shape)}"
    if expected.dtype.kind in "OSU":
        return "" if _texts(got) == _texts(expected) else f"{got.tolist()} instead of {expected.tolist()}"
    if got.dtype != expected.dtype:
        return f"{got.dtype} instead of {expected.dtype}"
    return _difference_of_numbers(expected, got, rtol, atol)


def _difference_of_lists(expected: Any, got: Any, rtol: float, atol: float) -> str:
    if not (isinstance(expected, list) and isinstance(got, list)) or len(expected) != len(got):
        return "another sequence"
    return next(filter(None, (difference(*pair, rtol, atol) for pair in zip(expected, got, strict=True))), "")


def _difference_of_numbers(expected: Any, got: Any, rtol: float, atol: float) -> str:
    if got.dtype.name == "bfloat16":  # which numpy does not promote with Python's numbers
        got, expected, rtol = got.astype(np.float32), expected.astype(np.float32), max(rtol, _BFLOAT16_RTOL)
    try:
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        return " ".join(str(error).split())[:_LONGEST]
    return ""


def _texts(array: AnyArray) -> list[str]:
    return [text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel().tolist()]
