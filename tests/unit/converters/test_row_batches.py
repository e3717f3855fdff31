"""Samples in batches of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import draw

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.row_batches import run_in_batches


class TestBatches:
    @pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 9])
    def test_are_joined_to_what_one_run_gives(self, size: int) -> None:
        seen: list[int] = []

        def run(feeds: Any) -> dict[str, AnyArray]:
            seen.append(len(feeds["x"]))
            return {"y": feeds["x"] * 2, "z": feeds["x"].sum(axis=1)}

        x = draw(6, 4)
        found = run_in_batches(run, {"x": x}, size)
        np.testing.assert_array_equal(found["y"], x * 2)
        assert found["z"].shape == (6,)
        assert max(seen) == min(size, 6)
        assert sum(seen) == 6

    @pytest.mark.parametrize("output", [np.zeros((2, 3)), np.zeros(()), np.zeros((1, 6))])
    def test_an_output_with_other_rows_is_an_error(self, output: AnyArray) -> None:
        with pytest.raises(ConversionError, match=r"output 'y' has the shape \[.*\] for a batch of 3") as caught:
            run_in_batches(lambda _: {"y": output}, {"x": draw(6, 4)}, 3)
        assert "mixes its rows" in caught.value.hint

    def test_an_output_whose_shape_depends_on_the_values_is_an_error(self) -> None:
        def run(feeds: Any) -> dict[str, AnyArray]:
            return {"y": np.zeros((1, int(feeds["x"][0])))}

        with pytest.raises(ConversionError, match=r"output 'y' depends on the values: \[0\] and \[3\]"):
            run_in_batches(run, {"x": np.array([3, 0])}, 1)
