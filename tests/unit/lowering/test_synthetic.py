"""Requests that are made up from a signature."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.trial import SyntheticInputs, synthetic_inputs


class TestFeeds:
    @pytest.mark.parametrize(
        ("shape", "expected"),
        [
            (("batch", 3), (5, 3)),
            ((2, 3), (2, 3)),
            (("batch", "length", 8), (5, 1, 8)),
            ((1, "length"), (1, 1)),
            ((), ()),
            (("n",), (5,)),
            (("batch", 0), (5, 0)),
        ],
    )
    def test_sizes(self, shape: tuple[int | str, ...], expected: tuple[int, ...]) -> None:
        signature = Signature(inputs=(TensorSpec(name="x", dtype=DType.FP32, shape=shape),), outputs=())
        assert SyntheticInputs().feeds(signature, 5)["x"].shape == expected
        assert SyntheticInputs().batch(signature, 5)["x"].shape == expected

    @pytest.mark.parametrize("fill", [0, 1, 2, 3])
    @pytest.mark.parametrize("dtype", list(DType))
    def test_types(self, dtype: DType, fill: int) -> None:
        signature = Signature(inputs=(TensorSpec(name="x", dtype=dtype, shape=("batch", 2)),), outputs=())
        feeds = SyntheticInputs(fill=fill).feeds(signature, 3)
        signature.check(feeds)
        assert dtype.is_float or bool(feeds["x"].any()) == bool(fill)


def signature(*shape: int | str, dtype: DType = DType.FP32) -> Signature:
    return Signature(inputs=(TensorSpec(name="x", dtype=dtype, shape=shape),), outputs=())


class TestChoices:
    def test_fixed_sizes_are_filled_in_four_ways(self) -> None:
        assert list(synthetic_inputs(signature("batch", 3))) == [
            SyntheticInputs(),
            SyntheticInputs(fill=1),
            SyntheticInputs(fill=2),
            SyntheticInputs(fill=3),
        ]

    def test_sizes_that_vary_are_tried_as_well(self) -> None:
        sizes = {
            way.feeds(signature("batch", 3, "h", "w"))["x"].shape
            for way in synthetic_inputs(signature("batch", 3, "h", "w"))
        }
        assert sizes == {(1, 3, size, size) for size in (1, 8, 64, 224)}

    def test_no_request_is_enormous(self) -> None:
        assert {way.size for way in synthetic_inputs(signature("batch", "c", "d", "h", "w"))} == {1, 8}

    def test_indices_divisors_and_ranges(self) -> None:
        filled = [way.feeds(signature(3, dtype=DType.INT64))["x"].tolist() for way in synthetic_inputs(signature(3))]
        assert filled == [[0, 0, 0], [1, 1, 1], [0, 1, 2], [2, 3, 4]]

    def test_scales_and_texts_that_are_numbers(self) -> None:
        assert SyntheticInputs(fill=3).feeds(signature(2))["x"].tolist() == [2.0, 3.0]
        assert SyntheticInputs(fill=3).feeds(signature(1, dtype=DType.BYTES))["x"].tolist() == ["2"]
