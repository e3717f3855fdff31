"""The spec of transformers' image processors, inputs of encoders, and labels."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources import huggingface as source
from graphkiln_converters.sources.base import SourceOptions
from graphkiln_converters.sources.huggingface import open_source, preprocess_from_processor

MEAN, STD = (0.5, 0.4, 0.3), (0.1, 0.2, 0.3)
OPTIONS = SourceOptions()


def size(**sides: int) -> SimpleNamespace:
    names = ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width")
    return SimpleNamespace(**{**dict.fromkeys(names), **sides})


def processor(name: str = "ViTImageProcessorPil", base: type = source.PilBackend, **changes: Any) -> Any:
    """An image processor of this class, with the methods that a subclass of Pillow's backend inherits."""
    made = object.__new__(type(name, (base,), {}))
    attributes = {
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_pad": False,
        "do_resize": True,
        "size": size(shortest_edge=256),
        "do_center_crop": True,
        "crop_size": size(height=224, width=220),
        "do_normalize": True,
        "image_mean": list(MEAN),
        "image_std": list(STD),
        "crop_pct": 0.875,
    }
    for key, value in {**attributes, **changes}.items():
        object.__setattr__(made, key, value)
    return made


class Resizing(source.PilBackend):  # type: ignore[misc]
    """One that does something of its own."""

    def resize(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


class TestSpec:
    def test_is_that_of_the_processor(self) -> None:
        spec = preprocess_from_processor(processor())
        assert spec is not None
        assert (spec.resize, spec.crop, spec.interpolation) == (256, (224, 220), "bicubic")
        assert (spec.mean, spec.std, spec.crop_rounding) == (MEAN, STD, "down")

    def test_both_sides(self) -> None:
        spec = preprocess_from_processor(processor(size=size(height=60, width=70), do_center_crop=False))
        assert spec is not None
        assert (spec.resize, spec.crop) == ((60, 70), None)

    def test_without_resizing_and_normalizing(self) -> None:
        spec = preprocess_from_processor(processor(do_resize=False, do_normalize=False))
        assert spec is not None
        assert (spec.resize, spec.mean, spec.std) == (None, (), ())

    @pytest.mark.parametrize(("resample", "name"), [(0, "nearest"), (1, "lanczos"), (2, "bilinear"), (4, "box")])
    def test_filters(self, resample: int, name: str) -> None:
        spec = preprocess_from_processor(processor(resample=resample))
        assert spec is not None
        assert spec.interpolation == name

    @pytest.mark.parametrize(
        "changes",
        [
            {"resample": 9},
            {"do_rescale": False},
            {"rescale_factor": 1 / 127.5},
            {"do_pad": True},
            {"size": size(shortest_edge=224, longest_edge=448)},
            {"size": size(max_height=100, max_width=100)},
            {"size": size(height=224)},
            {"base": Resizing},
        ],
    )
    def test_what_it_cannot_express(self, changes: dict[str, Any]) -> None:
        assert preprocess_from_processor(processor(**changes)) is None

    @pytest.mark.parametrize("name", ["BeitImageProcessorPil", "MobileNetV2ImageProcessorPil"])
    def test_own_code_for_segmentation_maps_does_not_matter(self, name: str) -> None:
        assert preprocess_from_processor(processor(name, Resizing)) is not None


class TestConvNext:
    NAME = "ConvNextImageProcessorPil"

    @pytest.mark.parametrize(
        ("side", "resize", "crop"), [(224, 256, (224, 224)), (383, 437, (383, 383)), (384, (384, 384), None)]
    )
    def test_crops_small_images_and_warps_large_ones(self, side: int, resize: Any, crop: Any) -> None:
        made = processor(self.NAME, Resizing, size=size(shortest_edge=side), do_center_crop=False)
        spec = preprocess_from_processor(made)
        assert spec is not None
        assert (spec.resize, spec.crop) == (resize, crop)

    @pytest.mark.parametrize(
        "changes", [{"do_center_crop": True}, {"do_resize": False}, {"size": size(height=224, width=224)}]
    )
    def test_what_it_cannot_express(self, changes: dict[str, Any]) -> None:
        options = {"do_center_crop": False, **changes}
        assert preprocess_from_processor(processor(self.NAME, Resizing, **options)) is None


class TestInputs:
    def inputs(self, name: str, options: SourceOptions = OPTIONS, **config: Any) -> Any:
        return self.inputs_of(torch.nn.Module(), name, options, **config)

    def inputs_of(
        self, model: torch.nn.Module, name: str = "input_ids", options: SourceOptions = OPTIONS, **config: Any
    ) -> Any:
        module: Any = model
        module.main_input_name = name
        return source._inputs(module, SimpleNamespace(**config), "/nowhere", options)[0]

    @pytest.fixture(autouse=True)
    def _no_processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(source, "_preprocess", lambda _: None)

    @pytest.mark.parametrize(
        ("config", "shape"),
        [
            ({}, (3, 224, 224)),
            ({"image_size": 32, "num_channels": 1}, (1, 32, 32)),
            ({"image_size": [64, 32]}, (3, 64, 32)),
            ({"image_size": (8, 16)}, (3, 8, 16)),
        ],
    )
    def test_images(self, config: dict[str, Any], shape: tuple[int, ...]) -> None:
        (spec,) = self.inputs("pixel_values", **config)
        assert (spec.name, spec.shape) == ("pixel_values", shape)

    def test_a_given_shape(self) -> None:
        (spec,) = self.inputs("pixel_values", SourceOptions(shapes={"": (3, 48, 48)}), image_size=224)
        assert spec.shape == (3, 48, 48)

    @pytest.mark.parametrize(
        ("config", "tokens", "dynamic"),
        [
            ({"max_position_embeddings": 512}, 32, (8, 512)),
            ({"max_position_embeddings": 64}, 32, (8, 64)),
            ({"max_position_embeddings": 4096}, 32, (8, 512)),
            ({"max_position_embeddings": 5}, 5, (5, 5)),
            ({"n_positions": 20}, 20, (8, 20)),
            ({}, 32, (8, 512)),
        ],
    )
    def test_texts(self, config: dict[str, Any], tokens: int, dynamic: tuple[int, int]) -> None:
        ids, mask = self.inputs("input_ids", vocab_size=99, **config)
        assert (ids.name, ids.dtype, ids.shape, ids.high) == ("input_ids", DType.INT64, (tokens,), 99)
        assert (mask.name, mask.mask, mask.shape) == ("attention_mask", True, (tokens,))
        assert ids.dynamic == mask.dynamic == {0: dynamic}

    @pytest.mark.parametrize(("padding", "most"), [(None, 66), (1, 64)])
    def test_positions_that_begin_behind_that_of_the_padding(self, padding: int | None, most: int) -> None:
        model = torch.nn.ModuleDict({"position_embeddings": torch.nn.Embedding(66, 4, padding_idx=padding)})
        ids, _ = self.inputs_of(model, vocab_size=99, max_position_embeddings=66)
        assert ids.dynamic == {0: (8, most)}

    def test_neither(self) -> None:
        with pytest.raises(ConversionError, match="takes 'input_features', which is neither") as caught:
            self.inputs("input_features")
        assert "python:FILE:FACTORY" in caught.value.hint


class TestOutputs:
    def test_only_those_worth_serving(self) -> None:
        one = torch.zeros(1)
        outputs = {"loss": one, "logits": one, "past_key_values": one, "pooler_output": None, "text_embeds": one}
        assert list(source._tensors(outputs)) == ["logits", "text_embeds"]

    def test_none_of_them_is_refused(self) -> None:
        with pytest.raises(ConversionError, match="the model returns heatmaps: what is served") as caught:
            source._tensors({"heatmaps": torch.zeros(1)})
        assert "python:FILE:FACTORY" in caught.value.hint


class TestLabels:
    def labels(self, kind: str, names: dict[int, str]) -> tuple[str, ...]:
        return source._labels(names, type(kind, (), {})())

    def test_of_a_classifier_in_the_order_of_its_classes(self) -> None:
        assert self.labels("ViTForImageClassification", {1: "dog", 0: "cat"}) == ("cat", "dog")

    def test_placeholders_are_none(self) -> None:
        assert self.labels("ViTForImageClassification", {0: "LABEL_0", 1: "LABEL_1"}) == ()

    def test_names_stay_with_their_numbers(self) -> None:
        """Those of COCO's files begin at one: the first class has none."""
        assert self.labels("ViTForImageClassification", {1: "person", 2: "bicycle"}) == ("LABEL_0", "person")

    def test_others_have_none(self) -> None:
        assert self.labels("ViTModel", {0: "cat", 1: "dog"}) == ()


class TestFolders:
    def test_without_a_processor_there_is_no_spec(self, tmp_path: Path) -> None:
        assert source._preprocess(str(tmp_path)) is None

    def test_without_a_configuration(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match=f"transformers cannot open '{tmp_path}'") as caught:
            open_source(str(tmp_path), OPTIONS)
        assert "config.json" in caught.value.hint

    @pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "no_such_model"}'])
    def test_a_damaged_configuration(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConversionError, match="transformers cannot open"):
            open_source(str(tmp_path), OPTIONS)

    def test_a_folder_without_weights_gets_random_ones_that_repeat(self, tmp_path: Path) -> None:
        config = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 16, "num_hidden_layers": 1}
        config |= {"num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20, "max_position_embeddings": 16}
        (tmp_path / "config.json").write_text(json.dumps(config))
        first, second = (open_source(str(tmp_path), OPTIONS) for _ in range(2))
        assert [spec.name for spec in first.inputs] == ["input_ids", "attention_mask"]
        for name, tensor in first.module.state_dict().items():
            assert torch.equal(tensor, second.module.state_dict()[name]), name


def test_code_that_a_folder_brings_is_not_run(tmp_path: Path) -> None:
    automatic = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": automatic}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    with pytest.raises(ConversionError, match=r"brings code of its own, which is not run \(wrap the model: python:"):
        open_source(str(tmp_path), OPTIONS)
    assert not (tmp_path / "owned").exists()
