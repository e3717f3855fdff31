"""Graphs that end in a NonMaxSuppression."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import graph, operators

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.detection.selecting import find_selection, return_values

TEXT = (
    "(float[batch, 9, 4] x, float[batch, 2, 9] y) => (int64[n, 3] chosen) "
    "{ boxes = Relu(x) scores = Sigmoid(y) chosen = NonMaxSuppression{told}(boxes, scores, most, iou, least) }"
)
TOLD = {"most": np.array([5], np.int64), "iou": np.array([0.5], np.float32), "least": np.array([0.25], np.float32)}


def test_the_node_is_found_with_what_it_is_told() -> None:
    found = find_selection(graph(TEXT.replace("{told}", ""), **TOLD))
    assert found is not None
    assert (found.output, found.boxes, found.scores, found.centered) == ("chosen", "boxes", "scores", False)
    assert (found.most_of_class, found.iou_threshold, found.score_threshold) == (5, 0.5, 0.25)


def test_centers_are_told_by_an_attribute() -> None:
    found = find_selection(graph(TEXT.replace("{told}", "<center_point_box=1>"), **TOLD))
    assert found is not None
    assert found.centered


def test_other_graphs_have_none() -> None:
    assert find_selection(graph("(float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }")) is None


def test_thresholds_that_are_computed_are_refused() -> None:
    text = TEXT.replace("float[batch, 2, 9] y", "float[batch, 2, 9] y, float[1] limit").replace("{told}", "")
    made = graph(text.replace("iou, least", "limit, least"), most=TOLD["most"], least=TOLD["least"])
    with pytest.raises(ConversionError, match="iou_threshold of NonMaxSuppression is computed"):
        find_selection(made)


def test_the_graph_before_it_returns_boxes_and_scores() -> None:
    made = return_values(graph(TEXT.replace("{told}", ""), **TOLD), ("boxes", "scores"))
    assert operators(made) == ["Relu", "Sigmoid"]
    assert [value.name for value in made.graph.outputs] == ["boxes", "scores"]
