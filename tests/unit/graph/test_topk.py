"""The order of classes: scores, ties, NaN and infinities, of every type and rank."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.topk import softmax, top_k

DTYPES = [np.bool_, np.uint8, np.uint64, np.int8, np.int64, np.float16, np.float32, np.float64]


def reference(row: Any, k: int) -> list[int]:
    """By Python's own sort: NaN last, then higher first, then lower index."""

    def key(index: int) -> tuple[bool, Any, int]:
        value = row[index].item()
        is_nan = isinstance(value, float) and math.isnan(value)
        return is_nan, 0 if is_nan else -value, index

    return sorted(range(len(row)), key=key)[:k]


@st.composite
def scores(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(arrays.array_shapes(min_dims=1, max_dims=4, max_side=6))
    elements = arrays.from_dtype(dtype, allow_nan=True, allow_infinity=True)
    few = draw(st.lists(elements, min_size=1, max_size=4))  # so that ties are common
    return draw(arrays.arrays(dtype, shape, elements=st.sampled_from(few), fill=st.nothing()))


@given(values=scores(), k=st.integers(1, 8))
def test_is_what_a_plain_sort_says(values: Any, k: int) -> None:
    indices, best = top_k(values, k)
    assert best.dtype == values.dtype
    for place in np.ndindex(values.shape[:-1]):
        expected = reference(values[place], k)
        assert indices[place].tolist() == expected
        np.testing.assert_array_equal(best[place], values[place][expected])


@given(values=arrays.arrays(np.float32, st.integers(1, 300), elements=st.integers(-3, 3) | st.just(math.nan)))
def test_many_classes_are_ranked_in_the_same_order(values: Any) -> None:
    assert top_k(values, 5)[0].tolist() == reference(values, 5)


def test_the_least_integer_is_the_last() -> None:
    assert top_k(np.array([-128, 127, 0], np.int8), 3)[0].tolist() == [1, 2, 0]
    assert top_k(np.array([-(2**63), 2**63 - 1]), 2)[0].tolist() == [1, 0]
    assert top_k(np.array([2**64 - 1, 0, 2**64 - 2], np.uint64), 3)[0].tolist() == [0, 2, 1]


def test_bfloat16_is_ranked_too() -> None:
    values = np.array([1, math.nan, 3, -math.inf, 3], ml_dtypes.bfloat16)
    assert top_k(values, 5)[0].tolist() == [2, 4, 0, 3, 1]


def test_more_than_there_are_gives_all() -> None:
    assert top_k(np.arange(3), 10**9)[0].tolist() == [2, 1, 0]


@pytest.mark.parametrize(("values", "k"), [(np.arange(3), 0), (np.array(1.0), 1), (np.array([b"a"], object), 1)])
def test_what_cannot_be_ranked(values: Any, k: int) -> None:
    with pytest.raises(InvalidInput):
        top_k(values, k)


class TestSoftmax:
    @given(arrays.arrays(np.float32, (2, 7), elements=st.floats(-1e4, 1e4, width=32)))
    def test_is_a_distribution_of_the_same_order(self, values: Any) -> None:
        probabilities = softmax(values)
        np.testing.assert_allclose(probabilities.sum(-1), 1)
        np.testing.assert_array_equal(np.sort(values.argsort(-1, kind="stable")), np.sort(probabilities.argsort(-1)))

    def test_infinities(self) -> None:
        assert softmax(np.array([0.0, -math.inf])).tolist() == [1, 0]
        for undefined in ([math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 1.0]):
            assert np.isnan(softmax(np.array(undefined))).any()

    def test_beside_torch_free_arithmetic(self) -> None:
        values = np.array([1.0, 2.0, 3.0])
        expected = [math.exp(v) / sum(map(math.exp, values)) for v in values]
        np.testing.assert_allclose(softmax(values), expected)
