"""transformers' detectors and segmenters for batches, compared with their processors image by image."""

from __future__ import annotations

import pytest
import torch
from tiny_segmenters import processor_of, size_of
from tiny_transformers import DETECTORS, SEGMENTERS, SIZE, images, tiny_model

from graphkiln_converters.detection.candidates import OUTPUTS
from graphkiln_converters.sources.huggingface_tasks import image_task

QUICK = ("detr", "yolos", "segformer", "upernet")
SLOW = {kind: pytest.mark.slow for kind in (*DETECTORS, *SEGMENTERS) if kind not in QUICK}
# Slow to make; the kinds that differ most are always tested.


def one_by_one(module: torch.nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = [module(image[None]) for image in batch]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("kind", [pytest.param(each, marks=SLOW.get(each, ())) for each in DETECTORS])
def test_detections_of_a_batch_are_those_of_the_processor(kind: str) -> None:
    made, batch = image_task(tiny_model(kind), SIZE, "auto"), images(3)
    assert made is not None
    assert made.reference is not None
    with torch.inference_mode():
        found, expected = made.module(batch), one_by_one(made.reference, batch)
    assert expected["counts"].min() > 0, "nothing to compare"
    assert set(found) == set(OUTPUTS)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-2 if name == "boxes" else 1e-3)


def test_no_detections_are_a_count_of_zero() -> None:
    model = tiny_model("yolos")
    last = model.class_labels_classifier.layers[-1]
    with torch.no_grad():
        last.bias[-1] += 100  # "nothing"
    made = image_task(model, SIZE, "auto")
    assert made is not None
    with torch.inference_mode():
        found = made.module(images(2))
    assert found["counts"].tolist() == [0, 0]
    assert not found["boxes"].any()


def test_more_than_a_hundred_queries() -> None:
    made, batch = image_task(tiny_model("yolos", num_detection_tokens=300), SIZE, "auto"), images(2)
    assert made is not None
    assert made.reference is not None
    with torch.inference_mode():
        found, expected = made.module(batch), made.reference(batch)
    assert found["counts"].max() > 100
    torch.testing.assert_close(found["boxes"], expected["boxes"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", [pytest.param(each, marks=SLOW.get(each, ())) for each in SEGMENTERS])
def test_classes_of_pixels_are_those_of_the_processor(kind: str) -> None:
    size = size_of(kind, SIZE)
    made, batch = image_task(tiny_model(kind), size, "auto"), images(2, size)
    assert made is not None
    processor = processor_of(kind)
    with torch.inference_mode():
        scores = made.module(batch)["scores"]
        outputs = made.module.model(pixel_values=batch, return_dict=True)
        expected = processor.post_process_semantic_segmentation(outputs, target_sizes=[(97, 61), (61, 97)])
    for row, size in enumerate([(97, 61), (61, 97)]):
        pixels = torch.nn.functional.interpolate(scores[row : row + 1], size, mode="bilinear").argmax(1)[0]
        assert len(pixels.unique()) > 1, "nothing to compare"
        assert (pixels == expected[row]).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["maskformer", "mask2former"])
def test_scores_of_a_segmenter_are_those_of_the_processor(kind: str) -> None:
    made, batch = image_task(tiny_model(kind), SIZE, "auto"), images(2)
    assert made is not None
    assert made.reference is not None
    with torch.inference_mode():
        torch.testing.assert_close(made.module(batch), made.reference(batch), rtol=1e-4, atol=1e-5)
