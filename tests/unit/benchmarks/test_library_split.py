"""Models of the library beside PyTorch: how far apart outputs are, and what is said of products that stay whole."""

from __future__ import annotations

from typing import Any

import library_split
import numpy as np
import pytest


class TestDifference:
    def test_is_the_largest_of_all_outputs(self) -> None:
        expected = {"a": np.array([3.0, 4.0]), "b": np.array([2.0])}
        assert library_split.difference({"a": np.array([3.0, 4.5]), "b": np.array([2.0])}, expected) == 0.1
        assert library_split.difference(expected, expected) == 0.0

    @pytest.mark.parametrize(
        "found", [{}, {"a": np.zeros(3)}, {"a": np.array([[3.0, 4.0]])}], ids=["missing", "longer", "another rank"]
    )
    def test_what_cannot_be_compared_is_never_equal(self, found: Any) -> None:
        with pytest.raises(ValueError, match="'a' cannot be compared"):
            library_split.difference(found, {"a": np.array([3.0, 4.0])})

    def test_zeros_say_nothing(self) -> None:
        zeros = {"a": np.zeros(2)}
        with pytest.raises(ValueError, match="'a' cannot be compared"):
            library_split.difference(zeros, zeros)


def test_reasons_are_counted_by_kind() -> None:
    reasons = {
        "node_MatMul_1": "'val_3' is an input or output of the graph",
        "node_MatMul_2": "'val_4' is an input or output of the graph",
        "node_MatMul_3": "Concat node_cat_7 has no rule",
        "node_MatMul_4": "node_Mul_9 repeats what is cut",
    }
    assert library_split.in_words(reasons) == (
        "2: a tensor is an input or output of the graph; 1: Concat has no rule; 1: repeats what is cut"
    )
    many = {str(number): f"reason {'abcde'[number]}" for number in range(5)}
    assert library_split.in_words(many).endswith("; 2 for other reasons")
    assert library_split.in_words({}) == ""


def test_samples_alone_are_joined_in_order() -> None:
    class Session:
        def run(self, feeds: Any) -> Any:
            assert len(feeds["x"]) == 1
            return {"y": feeds["x"] * 2}

    found = library_split.run_alone(Session(), {"x": np.arange(3)[:, None]})  # type: ignore[arg-type]
    assert found["y"].tolist() == [[0], [2], [4]]


def test_a_name_that_is_none() -> None:
    with pytest.raises(SystemExit, match="there is no model 'bert': BERT, GPT-2"):
        library_split.benchmark_models(1, 1.0, "bert")
