"""torchvision's two-stage detectors for batches beside torchvision's own pipeline, and their graphs beside both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from detections import run_graph
from tiny_detectors import SIDE, images, tiny_detector

from graphkiln_converters.detection.candidates import OUTPUTS
from graphkiln_converters.detection.library import LibraryPipeline
from graphkiln_converters.detection.two_stage import TwoStage
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


@pytest.mark.parametrize(
    ("kind", "size"),
    [("masked", TALL), ("keypoints", (SIDE, SIDE)), pytest.param("faster", (SIDE, SIDE), marks=pytest.mark.slow)],
)
def test_a_batch_finds_what_torchvision_finds_image_by_image(kind: str, size: tuple[int, int]) -> None:
    model = tiny_detector(kind)
    batch = torch.nn.functional.interpolate(images(3), size)
    with torch.inference_mode():
        found = TwoStage(model, size)(batch)
    expected = library(model, batch)
    assert expected["counts"].min() > 0, "nothing was found: nothing was compared"
    assert set(found) == {*OUTPUTS, *KINDS[kind]}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-3)


def test_nothing_found_is_a_count_of_none_and_has_no_mask() -> None:
    model = tiny_detector("masked")
    model.roi_heads.score_thresh = 1.0
    with torch.inference_mode():
        found = TwoStage(model, (SIDE, SIDE))(images(2))
    assert found["counts"].tolist() == [0, 0]
    assert not found["masks"].any()


def test_three_hundred_objects_are_all_returned() -> None:
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
def test_its_graph_finds_the_same_in_batches_of_other_sizes(kind: str, tmp_path: Path) -> None:
    model, batch = tiny_detector(kind), images(3)
    detector = TwoStage(model, (SIDE, SIDE)).eval()
    graph = export_module(
        detector,
        (batch[:2],),
        {},
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        input_names=["image"],
        output_names=[*OUTPUTS, *KINDS[kind]],
        description=kind,
    )
    found = run_graph(graph, tmp_path, image=batch.numpy())
    for name, tensor in library(model, batch).items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=0, atol=1e-2, err_msg=name)
