"""Tasks of transformers' models: what is chosen, what is refused, how images get in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_transformers import SIZE, images, tiny_model

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Letterbox
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation
from graphkiln_converters.sources.huggingface_tasks import (
    check_takes_images_alone,
    fitted_preprocess,
    fitted_size,
    image_task,
    takes_images_of_any_size,
)
from graphkiln_converters.torch_libraries import import_torchvision

import_torchvision()
import transformers as hf  # noqa: E402 - transformers imports torchvision

TINY_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 32,
    "patch_size": 16,
}


def processor(**changes: Any) -> Any:
    size = SimpleNamespace(height=None, width=None, shortest_edge=None, longest_edge=None)
    told: dict[str, Any] = {
        "size": size, "do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3,
        "resample": 2,
    }  # fmt: skip
    return SimpleNamespace(**{**told, **changes})


def sized(**sizes: int) -> Any:
    return SimpleNamespace(**{"height": None, "width": None, "shortest_edge": None, "longest_edge": None, **sizes})


def test_tasks_follow_from_the_kind_of_model() -> None:
    kinds = {"yolos": Detection, "segformer": Segmentation}
    for kind, task in kinds.items():
        made = image_task(tiny_model(kind), SIZE, "auto")
        assert made is not None
        assert isinstance(made.task, task)
        assert takes_images_of_any_size(tiny_model(kind))
    assert image_task(hf.ViTModel(hf.ViTConfig(**TINY_VIT)), (32, 32), "auto") is None


@pytest.mark.parametrize("kind", ["owlvit", "owlv2", "grounding-dino"])
def test_models_of_text_and_image_are_refused(kind: str) -> None:
    with pytest.raises(ConversionError, match="finds what a text names"):
        check_takes_images_alone(SimpleNamespace(model_type=kind), "google/it")


def test_a_detector_of_another_kind_is_refused() -> None:
    class OddForObjectDetection:
        config = SimpleNamespace(model_type="odd")

    with pytest.raises(ConversionError, match="is not known") as caught:
        image_task(OddForObjectDetection(), SIZE, "auto")
    assert "rt_detr" in caught.value.hint


@pytest.mark.parametrize(
    ("config", "size", "expected"),
    [
        ({"image_size": [64, 96]}, {}, (64, 96)),
        ({"image_size": None}, {"height": 640, "width": 600}, (640, 600)),
        ({}, {"shortest_edge": 790}, (800, 800)),
        ({"image_size": 224}, {}, (224, 224)),
        ({}, {}, (800, 800)),
    ],
)
def test_the_usual_size(config: dict[str, Any], size: dict[str, int], expected: tuple[int, int]) -> None:
    assert fitted_size(SimpleNamespace(**config), processor(size=sized(**size))) == expected


def test_images_are_fitted_as_the_processor_does() -> None:
    exact = fitted_preprocess(processor(size=sized(height=64, width=96)), (64, 96))
    assert exact is not None
    assert (exact.resize, exact.letterbox, exact.mean) == ((64, 96), None, (0.5,) * 3)
    padded = fitted_preprocess(processor(size=sized(shortest_edge=64), do_normalize=False), (64, 64))
    assert padded is not None
    assert padded.letterbox == Letterbox(size=(64, 64), padding=None, position="top-left", rounding="down")
    assert padded.mean == ()
    assert fitted_preprocess(None, (64, 64)) is None


def test_a_backbone_returns_its_pooled_features() -> None:
    model = hf.ViTModel(hf.ViTConfig(**TINY_VIT)).eval()
    made, batch = image_task(model, (32, 32), "embedding"), images(2)[:, :, :32, :32]
    assert made is not None
    assert made.task == Embedding(vectors="vectors")
    with torch.inference_mode():
        torch.testing.assert_close(made.module(batch)["vectors"], model(batch).pooler_output)


@pytest.mark.parametrize("kind", ["ViT", "ResNet"])
def test_a_classifier_returns_what_its_last_layer_reads(kind: str) -> None:
    config = (
        hf.ViTConfig(**TINY_VIT)
        if kind == "ViT"
        else hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    )
    model = getattr(hf, f"{kind}ForImageClassification")(config).eval()
    head, batch = model.classifier, images(2)[:, :, :32, :32]
    head = head[-1] if isinstance(head, torch.nn.Sequential) else head
    with torch.inference_mode():
        expected = model(batch).logits
        made = image_task(model, (32, 32), "embedding")
        assert made is not None
        vectors = made.module(batch)["vectors"]
        assert vectors.shape == (2, 16)
        torch.testing.assert_close(head(vectors), expected)


def test_a_head_that_is_not_where_it_mostly_is() -> None:
    class OddForImageClassification(torch.nn.Module):
        config = SimpleNamespace(model_type="odd")

    with pytest.raises(ConversionError, match="its last layer is not known"):
        image_task(OddForImageClassification(), (32, 32), "embedding")
