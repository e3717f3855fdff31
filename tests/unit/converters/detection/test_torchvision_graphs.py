"""torchvision's detectors for batches and their graphs, compared with torchvision's own pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from detections import run_graph
from tiny_detectors import SIDE, images, tiny_detector

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_converters.detection.candidates import OUTPUTS
from graphkiln_converters.detection.torchvision import ByLevel, LibraryPipeline, Ssd, TwoStage, pad_found
from graphkiln_converters.sources.pytorch import export_module

MOST = 15
KINDS = {"faster": (), "masked": ("masks",), "keypoints": ("keypoints",)}
TALL = (96, 64)


def library(model: object, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Image by image."""
    pipeline = LibraryPipeline(model, MOST)
    with torch.inference_mode():
        rows = [pipeline(image[None]) for image in batch]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def run_exported(
    detector: torch.nn.Module, batch: torch.Tensor, outputs: list[str], folder: Path
) -> dict[str, AnyArray]:
    """Export a detector with a batch of two, and run the graph with the whole batch."""
    graph = export_module(
        detector,
        (batch[:2],),
        {},
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        input_names=["image"],
        output_names=outputs,
        description="a detector",
    )
    return run_graph(graph, folder, image=batch.numpy())


@pytest.mark.parametrize(
    ("kind", "size"),
    [("masked", TALL), ("keypoints", (SIDE, SIDE)), pytest.param("faster", (SIDE, SIDE), marks=pytest.mark.slow)],
)
def test_detections_of_two_stages_are_those_of_torchvision(kind: str, size: tuple[int, int]) -> None:
    model = tiny_detector(kind)
    batch = torch.nn.functional.interpolate(images(3), size)
    with torch.inference_mode():
        found = TwoStage(model, size)(batch)
    expected = library(model, batch)
    assert expected["counts"].min() > 0, "nothing to compare"
    assert set(found) == {*OUTPUTS, *KINDS[kind]}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-3)


def test_no_detections_are_a_count_of_zero() -> None:
    model = tiny_detector("masked")
    model.roi_heads.score_thresh = 1.0
    with torch.inference_mode():
        found = TwoStage(model, (SIDE, SIDE))(images(2))
    assert found["counts"].tolist() == [0, 0]
    assert not found["masks"].any()


def test_three_hundred_detections() -> None:
    model = tiny_detector("faster")
    model.rpn._pre_nms_top_n["testing"] = model.rpn._post_nms_top_n["testing"] = 1000
    model.rpn.nms_thresh = model.roi_heads.nms_thresh = 1.0
    model.roi_heads.score_thresh, model.roi_heads.detections_per_img = 0.0, 300
    with torch.inference_mode():
        found = TwoStage(model, (SIDE, SIDE))(images(1))
        expected = LibraryPipeline(model, 300)(images(1))
    assert found["counts"].tolist() == [300]
    torch.testing.assert_close(found["scores"], expected["scores"], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "keypoints"])
def test_the_graph_of_two_stages_finds_the_same(kind: str, tmp_path: Path) -> None:
    model, batch = tiny_detector(kind), images(3)
    detector = TwoStage(model, (SIDE, SIDE)).eval()
    found = run_exported(detector, batch, [*OUTPUTS, *KINDS[kind]], tmp_path)
    for name, tensor in library(model, batch).items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=0, atol=1e-2, err_msg=name)


# One-stage detectors.

MOST_OF_ONE_STAGE = 30
KINDS_OF_ONE_STAGE = {"ssd": Ssd, "retinanet": ByLevel, "fcos": ByLevel}


@pytest.mark.parametrize("kind", KINDS_OF_ONE_STAGE)
def test_detections_of_one_stage_are_those_of_torchvision(kind: str) -> None:
    model, batch = tiny_detector(kind), images(3)
    with torch.inference_mode():
        found = KINDS_OF_ONE_STAGE[kind](model, (SIDE, SIDE))(batch)
        expected = LibraryPipeline(model, MOST_OF_ONE_STAGE)(batch)
    assert expected["counts"].min() > 0, "nothing to compare"
    assert set(found) == set(OUTPUTS)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS_OF_ONE_STAGE)
def test_the_graph_of_one_stage_finds_the_same(kind: str, tmp_path: Path) -> None:
    model, batch = tiny_detector(kind), images(3)
    detector = KINDS_OF_ONE_STAGE[kind](model, (SIDE, SIDE)).eval()
    found = run_exported(detector, batch, list(OUTPUTS), tmp_path)
    for name, tensor in LibraryPipeline(model, MOST_OF_ONE_STAGE)(batch).items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=0, atol=1e-3, err_msg=name)


# Detections of libraries as one batch.


def test_detections_are_ranked_cut_and_padded() -> None:
    boxes = torch.arange(12.0).reshape(3, 4)
    scores, labels = torch.tensor([0.2, 0.9, 0.5]), torch.tensor([1, 2, 3])
    some = {"boxes": boxes, "scores": scores, "labels": labels, "masks": torch.ones(3, 1, 2, 2)}
    none = {key: value[:0] for key, value in some.items()}
    found = pad_found([some, none], 2)
    assert found["boxes"][0].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert found["classes"].tolist() == [[2, 3], [0, 0]]
    assert found["counts"].tolist() == [2, 0]
    assert found["masks"].shape == (2, 2, 2, 2)
    assert not found["scores"][1].any()


def test_keypoints_are_padded_with_their_scores() -> None:
    found = {"boxes": torch.ones(2, 4), "scores": torch.tensor([0.2, 0.9]), "labels": torch.ones(2)}
    points = {"keypoints": torch.arange(12.0).reshape(2, 2, 3), "keypoints_scores": torch.tensor([[7.0, 8], [9, 10]])}
    padded = pad_found([{**found, **points}], 3)["keypoints"]
    assert padded[0].tolist() == [[[6, 7, 9], [9, 10, 10]], [[0, 1, 7], [3, 4, 8]], [[0, 0, 0], [0, 0, 0]]]
