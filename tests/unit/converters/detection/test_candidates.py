"""From candidates to detections, in PyTorch and as an ONNX graph with batches of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import torch
from detections import found_by_search, made_boxes, run_graph

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_converters.detection.candidates import OUTPUTS, Candidates, best_of_all_classes
from graphkiln_converters.sources.pytorch import export_module

CLASSES, MOST = 3, 40


class Tail(torch.nn.Module):
    """Post-processing of a detector."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor, classes: torch.Tensor) -> dict[str, torch.Tensor]:
        return Candidates(boxes, scores, classes).above(0.1).suppressed(CLASSES, 0.45).padded(MOST)


@pytest.fixture(scope="module")
def graph() -> onnx_ir.Model:
    batch = torch.export.Dim("batch")
    return export_module(
        Tail().eval(),
        made(2),
        {},
        dynamic_shapes=({0: batch},) * 3,
        input_names=["boxes_in", "scores_in", "classes_in"],
        output_names=list(OUTPUTS),
        description="a tail",
    )


def made(images: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    boxes, scores = (
        np.stack(arrays) for arrays in zip(*(made_boxes(seed=i, count=120) for i in range(images)), strict=True)
    )
    classes = np.random.default_rng(0).integers(0, CLASSES, scores.shape)
    return torch.from_numpy(boxes), torch.from_numpy(scores), torch.from_numpy(classes)


def expected(boxes: AnyArray, scores: AnyArray, classes: AnyArray) -> list[int]:
    """Indices of the kept candidates of one image, best first."""
    kept: list[int] = []
    for number in range(CLASSES):
        of_class = np.flatnonzero((classes == number) & (scores > 0.1))
        kept += of_class[found_by_search(boxes[of_class], scores[of_class], 0.45)].tolist()
    return sorted(kept, key=lambda index: -scores[index])[:MOST]


@pytest.mark.parametrize("images", [1, 5])
def test_the_graph_keeps_the_same_boxes_as_a_search(graph: onnx_ir.Model, tmp_path: Path, images: int) -> None:
    feeds = made(images)
    feeds[1][-1] = 0.05  # nothing in the last image
    arrays = [tensor.numpy() for tensor in feeds]
    found = run_graph(graph, tmp_path, **dict(zip(("boxes_in", "scores_in", "classes_in"), arrays, strict=True)))
    for name, tensor in Tail()(*feeds).items():
        np.testing.assert_array_equal(found[name], tensor.numpy(), err_msg=name)
    for image in range(images):
        boxes, scores, classes = (array[image] for array in arrays)
        kept = expected(boxes, scores, classes)
        count = len(kept)
        assert found["counts"][image] == count
        assert (count == 0) == (image == images - 1)
        for name, array in (("boxes", boxes), ("scores", scores), ("classes", classes)):
            np.testing.assert_array_equal(found[name][image, :count], array[kept])
            assert not found[name][image, count:].any(), "padding is zero"


def test_a_box_can_be_detected_as_two_classes() -> None:
    boxes = torch.tensor([[[0.0, 0, 1, 1], [2, 2, 3, 3]]])
    scores = torch.tensor([[[0.1, 0.9, 0.8], [0.2, 0.3, 0.7]]])
    found = best_of_all_classes(boxes, scores, 3)
    assert found.scores.tolist() == [[pytest.approx(0.9), pytest.approx(0.8), pytest.approx(0.7)]]
    assert found.classes.tolist() == [[1, 2, 2]]
    assert found.boxes[0, :, 0].tolist() == [0, 0, 2]
