"""Tasks of transformers' models, and refused models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recipes import recipe
from tiny_transformers import DETECTORS, SEGMENTERS, SIZE, images, tiny_model

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation
from graphkiln_converters.sources import huggingface_tasks
from graphkiln_converters.sources.huggingface import open_source
from graphkiln_converters.sources.huggingface_tasks import (
    image_task,
    takes_images_of_any_size,
)
from graphkiln_converters.sources.torchvision import list_detectors, list_segmenters
from graphkiln_converters.torch_libraries import import_torchvision

import_torchvision()
import transformers as hf  # noqa: E402 - transformers imports torchvision
from transformers.models.auto import modeling_auto  # noqa: E402

TINY_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 32,
    "patch_size": 16,
}


def test_tasks_follow_from_the_kind_of_model() -> None:
    kinds = {"yolos": Detection, "segformer": Segmentation}
    for kind, task in kinds.items():
        made = image_task(tiny_model(kind), SIZE, "auto")
        assert made is not None
        assert isinstance(made.task, task)
        assert takes_images_of_any_size(tiny_model(kind))
    assert image_task(hf.ViTModel(hf.ViTConfig(**TINY_VIT)), (32, 32), "auto") is None


@pytest.mark.parametrize("kind", sorted(huggingface_tasks._PROMPTED))
def test_models_with_prompts_are_refused_by_their_configuration(kind: str, tmp_path: Path) -> None:
    hf.CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match=f"\\({kind}\\): \\w+ takes images only") as caught:
        open_source(str(tmp_path), recipe())
    assert "python:FILE:FACTORY --task" in caught.value.hint


@pytest.mark.parametrize(
    "kind", ["DetrForSegmentation", "EomtForUniversalSegmentation", "RfDetrForInstanceSegmentation"]
)
def test_unsupported_segmenters_are_refused(kind: str) -> None:
    model = type(kind, (), {"config": SimpleNamespace(model_type="odd")})()
    with pytest.raises(ConversionError, match=f"{kind} is not supported"):
        image_task(model, SIZE, "auto")


@pytest.mark.parametrize("kind", ["detr", "segformer"])
def test_an_embedding_of_another_model_than_a_backbone_is_refused(kind: str) -> None:
    with pytest.raises(ConversionError, match="is not a vector of the image") as caught:
        image_task(tiny_model(kind), SIZE, "embedding")
    assert "AutoModel" in caught.value.hint


TASKS = ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "INSTANCE_SEGMENTATION",
         "UNIVERSAL_SEGMENTATION", "MASK_GENERATION")  # fmt: skip
# Lists in transformers of models with boxes or masks.


def families(task: str) -> dict[str, str]:
    """Model type -> name of the class."""
    found: dict[str, str] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return found


def test_every_detector_of_transformers_is_supported_or_refused_with_a_reason() -> None:
    known = {*huggingface_tasks._SOFTMAX, *huggingface_tasks._FOCAL}
    refused = {*huggingface_tasks._OTHER_OUTPUTS}
    assert {*families("OBJECT_DETECTION")} == known | refused
    assert not known & refused
    assert known == {*DETECTORS}, "supported detectors are compared with their processors"
    assert {*families("SEMANTIC_SEGMENTATION")} <= {*SEGMENTERS}, "segmenters are compared with their processors"
    assert {*families("ZERO_SHOT_OBJECT_DETECTION"), *families("MASK_GENERATION")} <= {*huggingface_tasks._PROMPTED}


def test_each_family_is_documented(repository: Path) -> None:
    text = (repository / "docs" / "tasks.md").read_text()
    assert not [kind for task in TASKS for kind in families(task) if f"`{kind}`" not in text]
    assert not [name for name in list_detectors() + list_segmenters() if f"`{name}`" not in text]


@pytest.mark.parametrize(("kind", "reason"), [("pp_doclayout_v3", "reading order"), ("pp_ocrv6_small_det", "a map")])
def test_detectors_without_boxes_are_refused_with_their_output(kind: str, reason: str) -> None:
    model = type("OddForObjectDetection", (), {"config": SimpleNamespace(model_type=kind)})()
    with pytest.raises(ConversionError, match=reason) as caught:
        image_task(model, SIZE, "auto")
    assert "python:FILE:FACTORY" in caught.value.hint


def test_an_unknown_detector_is_refused() -> None:
    class OddForObjectDetection:
        config = SimpleNamespace(model_type="odd")

    with pytest.raises(ConversionError, match="is not supported") as caught:
        image_task(OddForObjectDetection(), SIZE, "auto")
    assert "rt_detr" in caught.value.hint


def test_a_backbone_returns_its_pooled_features() -> None:
    model = hf.ViTModel(hf.ViTConfig(**TINY_VIT)).eval()
    made, batch = image_task(model, (32, 32), "embedding"), images(2)[:, :, :32, :32]
    assert made is not None
    assert made.task == Embedding(vectors="vectors")
    with torch.inference_mode():
        torch.testing.assert_close(made.module(batch)["vectors"], model(batch).pooler_output)


@pytest.mark.parametrize("kind", ["ViT", "ResNet"])
def test_the_vectors_of_a_classifier_are_the_input_of_its_last_layer(kind: str) -> None:
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


def test_an_unknown_head_is_refused() -> None:
    class OddForImageClassification(torch.nn.Module):
        config = SimpleNamespace(model_type="odd")

    with pytest.raises(ConversionError, match="the last layer of"):
        image_task(OddForImageClassification(), (32, 32), "embedding")
