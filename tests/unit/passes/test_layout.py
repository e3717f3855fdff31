"""Images and feature maps as `[batch, height, width, channels]`."""

from __future__ import annotations

import numpy as np
from graphs import compute, draw, graph

from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edge_passes import Nhwc

MIXED = """(float[b,3,4,5] image, float[b,7] row) => (float[b,3,4,5] map, float[b,7] other) {
    map = Relu(image)
    other = Neg(row)
}"""


def test_only_tensors_of_rank_four_are_turned() -> None:
    model, image, row = graph(MIXED), draw(2, 3, 4, 5), draw(2, 7)
    run_passes(model, [Nhwc(inputs=True, outputs=True)])
    found = compute(model, image=np.ascontiguousarray(image.transpose(0, 2, 3, 1)), row=row)
    np.testing.assert_array_equal(found["map"], np.maximum(image, 0).transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(found["other"], -row)


def test_shapes_are_told() -> None:
    model = graph(MIXED)
    run_passes(model, [Nhwc(inputs=True, outputs=True)])
    shapes = [str(value.shape) for value in (*model.graph.inputs, *model.graph.outputs)]
    assert shapes == ["[b,4,5,3]", "[b,7]", "[b,4,5,3]", "[b,7]"]


def test_an_image_is_turned_by_name_and_not_by_its_rank() -> None:
    """What the graph tells of its tensors counts, not what comes."""
    edge = run_passes(graph(MIXED), [Nhwc(inputs=True, outputs=True)]).edge
    assert edge.to_graph_outputs({"other": draw(2, 3, 4, 5)})["other"].shape == (2, 3, 4, 5)
    assert edge.to_source_feeds({"row": draw(2, 3, 4, 5)})["row"].shape == (2, 3, 4, 5)


def test_a_graph_of_tokens_leaves_the_preprocessing_alone() -> None:
    """Only its output is a feature map."""
    model = graph("(float[b,12] x) => (float[b,3,2,2] y) { y = Reshape(x, s) }", s=np.array([-1, 3, 2, 2]))
    edge = run_passes(model, [Nhwc(inputs=True, outputs=True)]).edge
    assert edge.to_graph_preprocess(Preprocess()).layout == "CHW"
