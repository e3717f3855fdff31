"""When an answer is the expected one, by the suite's own rules."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conforming.comparison import difference, differences

ONE = np.array([1.0], np.float32)
BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        pytest.param(ONE, ONE * np.float32(1.0005), id="within the tolerance"),
        pytest.param(np.array([np.nan, np.inf]), np.array([np.nan, np.inf]), id="no numbers"),
        pytest.param(np.array(["a", "b"], object), np.array([b"a", b"b"], object), id="text comes as bytes"),
        pytest.param(ONE.astype(BF16), (ONE * np.float32(1.01)).astype(BF16), id="two roundings of bf16"),
        pytest.param([ONE, [ONE]], [ONE, [ONE]], id="sequences"),
        pytest.param(None, None, id="nothing"),
        pytest.param(np.empty(0), np.empty(0), id="empty"),
    ],
)
def test_the_same(expected: Any, got: Any) -> None:
    assert not difference(expected, got, 1e-3, 1e-7)


@pytest.mark.parametrize(
    ("expected", "got", "how"),
    [
        (ONE, ONE * 2, "Mismatched elements: 1 / 1"),
        (ONE, ONE.reshape(1, 1), r"the shape \[1, 1\] instead of \[1\]"),
        (ONE, ONE.astype(np.float64), "float64 instead of float32"),
        (np.array(["a"], object), np.array([b"b"], object), r"\[b'b'\] instead of \['a'\]"),
        (ONE.astype(BF16), (ONE * np.float32(1.1)).astype(BF16), "Mismatched"),
        ([ONE], [ONE, ONE], "another sequence"),
        ([ONE], [ONE * 2], "Mismatched"),
        ([ONE], ONE, "another sequence"),
        (None, ONE, "a value in the place of none"),
    ],
)
def test_another(expected: Any, got: Any, how: str) -> None:
    with pytest.raises(AssertionError, match=how):
        raise AssertionError(difference(expected, got, 1e-3, 1e-7))


def test_the_first_output_that_differs_is_named() -> None:
    assert differences({"a": ONE, "b": ONE}, {"a": ONE, "b": ONE * 2}, 1e-3, 1e-7).startswith("b: Not equal")
