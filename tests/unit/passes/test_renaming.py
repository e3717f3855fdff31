"""Inputs and outputs by other names."""

from __future__ import annotations

import numpy as np
from graphs import compute, draw, graph

from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edge_passes import Rename

TWO = "(float[b,3] x, float[b,3] z) => (float[b,3] y, float[b,3] w) { y = Add(x, z) w = Sub(y, z) }"


def test_names_change_and_numbers_do_not() -> None:
    model, x, z = graph(TWO), draw(2, 3), draw(2, 3, seed=1)
    run_passes(model, [Rename({"x": "INPUT_0", "z": "INPUT_1"}, {"y": "OUTPUT_0", "w": "OUTPUT_1"})])
    found = compute(model, INPUT_0=x, INPUT_1=z)
    assert list(found) == ["OUTPUT_0", "OUTPUT_1"]
    np.testing.assert_allclose(found["OUTPUT_0"], x + z)
    np.testing.assert_allclose(found["OUTPUT_1"], x, atol=1e-6)


def test_an_inner_value_of_that_name_gives_way() -> None:
    """Names are unique in a graph, and exporters like the same ones."""
    model = graph("(float[b,3] x) => (float[b,3] y) { OUTPUT_0 = Relu(x) INPUT_0 = Neg(OUTPUT_0) y = Exp(INPUT_0) }")
    run_passes(model, [Rename({"x": "INPUT_0"}, {"y": "OUTPUT_0"})])
    x = draw(2, 3)
    np.testing.assert_allclose(compute(model, INPUT_0=x)["OUTPUT_0"], np.exp(-np.maximum(x, 0)), rtol=1e-6)


def test_an_input_that_is_an_output_at_once() -> None:
    """The two cannot have two names before they are two values."""
    model = graph("(float[b,3] x) => (float[b,3] x, float[b,3] y) { y = Relu(x) }")
    run_passes(model, [Rename({"x": "INPUT_0"}, {"x": "OUTPUT_0", "y": "OUTPUT_1"})])
    x = draw(2, 3)
    found = compute(model, INPUT_0=x)
    assert list(found) == ["OUTPUT_0", "OUTPUT_1"]
    np.testing.assert_array_equal(found["OUTPUT_0"], x)
    np.testing.assert_array_equal(found["OUTPUT_1"], np.maximum(x, 0))


def test_a_name_that_is_not_there_is_told() -> None:
    (report,) = run_passes(graph(TWO), [Rename({"x": "INPUT_0"}, {"other": "OUTPUT_0"})]).reports
    assert report.note == "missing: OUTPUT_0"
