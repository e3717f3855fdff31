"""torchvision's detectors for batches beside torchvision's own pipeline, and the graph of one beside both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from detections import run_graph
from tiny_detectors import SIDE, images, tiny_detector

from graphkiln_converters.detection.candidates import OUTPUTS
from graphkiln_converters.detection.library import LibraryPipeline
from graphkiln_converters.detection.one_stage import ByLevel, Ssd
from graphkiln_converters.sources.pytorch import export_module

MOST = 30
KINDS = {"ssd": Ssd, "retinanet": ByLevel, "fcos": ByLevel}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_finds_what_torchvision_finds_image_by_image(kind: str) -> None:
    model, batch = tiny_detector(kind), images(3)
    with torch.inference_mode():
        found = KINDS[kind](model, (SIDE, SIDE))(batch)
        expected = LibraryPipeline(model, MOST)(batch)
    assert expected["counts"].min() > 0, "nothing was found: nothing was compared"
    assert set(found) == set(OUTPUTS)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_its_graph_finds_the_same_in_batches_of_other_sizes(kind: str, tmp_path: Path) -> None:
    model, batch = tiny_detector(kind), images(3)
    detector = KINDS[kind](model, (SIDE, SIDE)).eval()
    graph = export_module(
        detector,
        (batch[:2],),
        {},
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        input_names=["image"],
        output_names=list(OUTPUTS),
        description=kind,
    )
    found = run_graph(graph, tmp_path, image=batch.numpy())
    for name, tensor in LibraryPipeline(model, MOST)(batch).items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=0, atol=1e-3, err_msg=name)
