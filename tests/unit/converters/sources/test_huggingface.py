"""Encoders of transformers: inputs, labels, weights, preprocessing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from recipes import recipe

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Letterbox
from graphkiln_backend.images.decoding import load_sample
from graphkiln_converters.sources.huggingface import (
    create,
    fitted_preprocess,
    fitted_size,
    open_source,
    opened,
)
from graphkiln_converters.sources.pytorch import TorchModel
from graphkiln_converters.torch_libraries import import_torchvision

OPTIONS = recipe()


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "patch_size": 16, **TINY}
BERT = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 99, **TINY}


def open_config(folder: Path, config: dict[str, Any]) -> TorchModel:
    """Open a folder with a configuration and no weights."""
    (folder / "config.json").write_text(json.dumps(config))
    return open_source(str(folder), OPTIONS)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({}, (3, 224, 224)),
        ({"image_size": 32, "num_channels": 1}, (1, 32, 32)),
        ({"image_size": [64, 32]}, (3, 64, 32)),
    ],
)
def test_inputs_of_image_encoders(config: dict[str, Any], shape: tuple[int, ...], tmp_path: Path) -> None:
    (spec,) = open_config(tmp_path, {**VIT, **config}).inputs
    assert (spec.name, spec.shape) == ("pixel_values", shape)


@pytest.mark.parametrize(
    ("config", "tokens", "dynamic"),
    [
        ({"max_position_embeddings": 4096}, 32, (8, 512)),
        ({"max_position_embeddings": 5}, 5, (5, 5)),
        ({"model_type": "gpt2", "architectures": ["GPT2Model"], "n_embd": 16, "n_positions": 20}, 20, (8, 20)),
        # Positions start after the padding index.
        ({"model_type": "roberta", "architectures": ["RobertaModel"], "max_position_embeddings": 66}, 32, (8, 64)),
    ],
)
def test_inputs_of_text_encoders(config: dict[str, Any], tokens: int, dynamic: tuple[int, int], tmp_path: Path) -> None:
    ids, mask = open_config(tmp_path, {**BERT, **config}).inputs
    assert (ids.name, ids.dtype, ids.shape, ids.high) == ("input_ids", DType.INT64, (tokens,), 99)
    assert (mask.name, mask.mask, mask.shape) == ("attention_mask", True, (tokens,))
    assert ids.dynamic == mask.dynamic == {0: dynamic}


def test_other_inputs_are_refused(tmp_path: Path) -> None:
    audio = {"model_type": "audio-spectrogram-transformer", "architectures": ["ASTModel"], **TINY}
    with pytest.raises(ConversionError, match=r"'input_values' of .* is neither") as caught:
        open_config(tmp_path, audio)
    assert "python:FILE:FACTORY" in caught.value.hint


def test_unknown_outputs_are_refused(tmp_path: Path) -> None:
    model = open_config(tmp_path, VIT)
    model.module.get_submodule("model").forward = lambda **_: {"heatmaps": torch.zeros(1)}
    with pytest.raises(ConversionError, match="the model returns heatmaps") as caught:
        model.run({"pixel_values": np.zeros((1, 3, 224, 224), np.float32)})
    assert "python:FILE:FACTORY" in caught.value.hint


@pytest.mark.parametrize(
    ("names", "labels"),
    [({0: "LABEL_0", 1: "LABEL_1"}, ()), ({1: "person", 2: "bicycle"}, ("LABEL_0", "person"))],
    ids=["placeholders", "numbers from 1"],
)
def test_labels_of_a_classifier(names: dict[int, str], labels: tuple[str, ...], tmp_path: Path) -> None:
    assert open_config(tmp_path, {**VIT, "id2label": names}).labels == labels


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=f"transformers cannot open '{tmp_path}'") as caught:
        open_source(str(tmp_path), OPTIONS)
    assert "config.json" in caught.value.hint


def test_a_folder_without_weights_gets_the_same_random_ones(tmp_path: Path) -> None:
    first, second = (open_config(tmp_path, BERT).module.state_dict() for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    automatic = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": automatic}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    with pytest.raises(ConversionError, match=r"contains code, which is not run \(wrap the model: python:"):
        open_source(str(tmp_path), OPTIONS)
    assert not (tmp_path / "owned").exists()


# Errors of transformers, and weights.


class TestOpened:
    @pytest.mark.parametrize(
        ("error", "message", "hint"),
        [
            (OSError("no file\nand more"), "transformers cannot open 'x': no file", "name a folder with config.json"),
            (ValueError("set trust_remote_code=True"), "'x' contains code, which is not run", "python:FILE"),
            (
                ImportError("\nTimmBackbone requires the timm library. You can install it with pip:\n`pip ...`"),
                "transformers cannot open 'x': TimmBackbone requires the timm library.",
                "graphkiln[timm]",
            ),
            (ImportError("needs natten"), "transformers cannot open 'x': needs natten", "install the library"),
        ],
    )
    def test_errors_of_transformers_are_translated(self, error: Exception, message: str, hint: str) -> None:
        with pytest.raises(ConversionError) as caught, opened("x"):
            raise error
        assert caught.value.message == message
        assert hint in caught.value.hint


class Factory:
    """Return the arguments."""

    @classmethod
    def from_pretrained(cls, location: str, **options: Any) -> Any:
        return ("its weights", location, options), {"missing_keys": {"b", "a"}}


class Class(Factory):
    @classmethod
    def _from_config(cls, config: Any) -> Any:
        return ("random", config)


class Automatic(Factory):
    @classmethod
    def from_config(cls, config: Any) -> Any:
        return ("random", config)


@pytest.mark.parametrize("factory", [Class, Automatic])
def test_weights_are_those_of_the_folder_or_random(tmp_path: Path, factory: type[Factory]) -> None:
    config = SimpleNamespace()
    assert create(str(tmp_path), config, factory) == ("random", config)
    assert config._attn_implementation == "eager"
    (tmp_path / "model.safetensors").touch()
    found, location, options = create(str(tmp_path), config, factory)
    assert (found, location) == ("its weights", str(tmp_path))
    assert (options["trust_remote_code"], options["weights_only"]) == (False, True)


def test_missing_weights_are_refused_if_all_are_needed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConversionError, match=r"lacks 2 of the model's weights") as caught:
        create(str(tmp_path), SimpleNamespace(), Automatic, complete=True)
    assert "would be random" in caught.value.hint


# Preprocessing for detectors, segmenters and depth estimators, compared with transformers' image processors.

import_torchvision()


def fitting(**changes: Any) -> Any:
    size = SimpleNamespace(height=None, width=None, shortest_edge=None, longest_edge=None)
    options: dict[str, Any] = {
        "size": size, "do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3,
        "resample": 2,
    }  # fmt: skip
    return SimpleNamespace(**{**options, **changes})


def sized(**sizes: int) -> Any:
    return SimpleNamespace(**{"height": None, "width": None, "shortest_edge": None, "longest_edge": None, **sizes})


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ({"image_size": [64, 96]}, {}, (64, 96)),
        ({"image_size": None}, {"size": sized(height=640, width=600)}, (640, 600)),
        ({"image_size": 224}, {"do_center_crop": True, "crop_size": sized(height=513, width=510)}, (513, 510)),
        ({}, {"size": sized(shortest_edge=790)}, (800, 800)),
        ({"image_size": 224}, {}, (224, 224)),
        ({}, {}, (800, 800)),
    ],
)
def test_the_default_size(config: dict[str, Any], options: dict[str, Any], expected: tuple[int, int]) -> None:
    assert fitted_size(SimpleNamespace(**config), fitting(**options)) == expected


def test_images_are_resized_or_padded_like_the_processor() -> None:
    exact = fitted_preprocess(fitting(size=sized(height=64, width=96)), (64, 96))
    assert exact is not None
    assert (exact.resize, exact.letterbox, exact.mean) == ((64, 96), None, (0.5,) * 3)
    for options in ({"size": sized(shortest_edge=64)}, {"size": sized(height=64, width=64), "keep_aspect_ratio": True}):
        padded = fitted_preprocess(fitting(do_normalize=False, **options), (64, 64))
        assert padded is not None
        assert padded.letterbox == Letterbox(size=(64, 64), padding=None, position="top-left", rounding="down")
        assert padded.mean == ()


@pytest.mark.parametrize("options", [{"do_rescale": False}, {"rescale_factor": 1 / 127.5}, {"resample": 9}])
def test_a_processor_that_a_spec_cannot_express(options: dict[str, Any]) -> None:
    assert fitted_preprocess(fitting(**options), (64, 64)) is None


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("Segformer", {"size": {"height": 48, "width": 64}}, (48, 64)),
        ("Beit", {"size": {"height": 48, "width": 48}}, (48, 48)),  # bicubic
        ("Beit", {"size": {"height": 60, "width": 60}, "do_center_crop": True}, (224, 224)),
        ("DPT", {"size": {"height": 48, "width": 64}}, (48, 64)),
        ("MobileViT", {"size": {"shortest_edge": 60}, "crop_size": {"height": 48, "width": 48}}, (48, 48)),  # BGR
        ("MobileNetV2", {"size": {"shortest_edge": 60}, "crop_size": {"height": 48, "width": 48}}, (48, 48)),
        ("RTDetr", {"size": {"height": 64, "width": 64}}, (64, 64)),
    ],
)
def test_samples_are_those_of_the_library(name: str, options: dict[str, Any], size: tuple[int, int]) -> None:
    made = getattr(hf, f"{name}ImageProcessorPil")(**options)
    pixels = np.random.default_rng(3).integers(0, 256, (70, 90, 3), np.uint8)
    image = Image.fromarray(pixels)
    spec = fitted_preprocess(made, size)
    assert spec is not None
    (expected,) = made(image, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(load_sample(image, spec), expected, rtol=0, atol=1e-5)
