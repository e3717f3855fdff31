"""One graph behind another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from detections import run_graph
from graphs import graph

from graphkiln_converters.detection.appending import append

FIRST = "(float[batch, 4] x) => (float[batch, 4] boxes, float[batch, 4] b) { boxes = Neg(x) b = Abs(x) }"
SECOND = "(float[batch, 4] x) => (float[batch, 4] boxes) { h = Relu(x) boxes = Add(h, h) }"


def test_what_the_second_returns_is_computed_from_the_first(tmp_path: Path) -> None:
    made = append(graph(FIRST), graph(SECOND), ["boxes"])
    x = np.array([[1, -2, 3, -4]], np.float32)
    assert [value.name for value in made.graph.outputs] == ["boxes"]
    np.testing.assert_array_equal(run_graph(made, tmp_path, x=x)["boxes"], 2 * np.maximum(-x, 0))


def test_what_nobody_reads_is_gone() -> None:
    made = append(graph(FIRST), graph(SECOND), ["boxes"])
    assert "Abs" not in [node.op_type for node in made.graph]


def test_the_operator_set_of_the_first_may_be_newer(tmp_path: Path) -> None:
    made = append(graph(FIRST, opset=21), graph(SECOND), ["b"])
    assert made.graph.opset_imports[""] == 21
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(run_graph(made, tmp_path, x=x)["boxes"], 2 * x)
