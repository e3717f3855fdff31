"""Scores become probabilities, or the best classes."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import compute, draw, graph
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edge_passes import Softmax, TopK

SCORES = "(float[b,5] x) => (float[b,5] y, float[b,5] other) { y = Relu(x) other = Neg(x) }"
MATRIX = arrays(np.float32, (3, 5), elements=st.floats(-80, 80, width=32))


class TestSoftmax:
    @settings(max_examples=60, deadline=None)
    @given(MATRIX)
    def test_numpy_and_the_graph_say_the_same(self, x: np.ndarray) -> None:
        model = graph(SCORES)
        edge = run_passes(model, [Softmax()]).edge
        expected = edge.to_graph_outputs(compute(graph(SCORES), x=x))
        found = compute(model, x=x)
        np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(expected["y"].sum(axis=-1), 1, rtol=1e-5)
        np.testing.assert_array_equal(found["other"], -x)

    def test_scores_that_overflow_an_exponent(self) -> None:
        edge = run_passes(graph(SCORES), [Softmax()]).edge
        found = edge.to_graph_outputs({"y": np.array([[1e4, 0, -1e4]], np.float32)})["y"]
        np.testing.assert_array_equal(found, [[1, 0, 0]])
        assert found.dtype == np.float32

    def test_along_the_last_axis_of_any_rank(self) -> None:
        model = graph("(float[b,2,3,4] x) => (float[b,2,3,4] y) { y = Neg(x) }")
        edge, x = run_passes(model, [Softmax()]).edge, draw(2, 2, 3, 4)
        np.testing.assert_allclose(compute(model, x=x)["y"], edge.to_graph_outputs({"y": -x})["y"], rtol=1e-5)


class TestTopK:
    @settings(max_examples=60, deadline=None)
    @given(MATRIX, st.integers(1, 5))
    def test_numpy_and_the_graph_say_the_same(self, x: np.ndarray, k: int) -> None:
        model = graph(SCORES)
        edge = run_passes(model, [TopK(k)]).edge
        expected = edge.to_graph_outputs(compute(graph(SCORES), x=x))
        found = compute(model, x=x)
        assert list(found) == list(expected) == ["y", "INDEX_0", "other"]
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype

    def test_more_than_there_are(self) -> None:
        with pytest.raises(ConversionError, match=r"top-k 6: the output y has 5 scores \(choose at most 5"):
            run_passes(graph(SCORES), [TopK(k=6)])

    def test_of_equal_scores_the_first(self) -> None:
        edge = run_passes(graph(SCORES), [TopK(3)]).edge
        found = edge.to_graph_outputs({"y": np.array([[2, 7, 2, 7, 2]], np.float32)})
        np.testing.assert_array_equal(found["INDEX_0"], [[1, 3, 0]])

    def test_shapes_and_types_are_told(self) -> None:
        model = graph(SCORES)
        edge = run_passes(model, [TopK(2)]).edge
        assert [(value.name, str(value.dtype), str(value.shape)) for value in model.graph.outputs] == [
            ("y", "FLOAT", "[b,2]"),
            ("INDEX_0", "INT64", "[b,2]"),
            ("other", "FLOAT", "[b,5]"),
        ]
        assert edge.ranking == Ranking(scores="y", indices="INDEX_0")

    def test_probabilities_and_then_the_best(self) -> None:
        model, x = graph(SCORES), draw(4, 5)
        edge = run_passes(model, [Softmax(), TopK(2)]).edge
        expected = edge.to_graph_outputs({"y": np.maximum(x, 0), "other": -x})
        np.testing.assert_allclose(compute(model, x=x)["y"], expected["y"], rtol=1e-5)

    def test_outputs_without_the_scores_are_left_alone(self) -> None:
        edge = run_passes(graph(SCORES), [TopK(2)]).edge
        assert list(edge.to_graph_outputs({"other": draw(2, 5)})) == ["other"]
