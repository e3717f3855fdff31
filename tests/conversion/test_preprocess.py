"""The client's preprocessing compared with torchvision's, timm's and transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample
from graphkiln_converters.sources.huggingface import preprocess_from_processor
from graphkiln_converters.sources.timm import preprocess_from_config
from graphkiln_converters.torch_libraries import import_torchvision

pytestmark = pytest.mark.train

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
MODES = ("RGB", "L", "RGBA", "LA", "P", "CMYK", "1", "YCbCr")


@st.composite
def images(draw: st.DrawFn, modes: tuple[str, ...] = MODES) -> Image.Image:
    width, height = draw(st.integers(1, 160)), draw(st.integers(1, 160))
    seed = draw(st.integers(0, 2**32 - 1))
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    if draw(st.booleans()):  # smooth ones, too: noise hides errors of half a pixel
        pixels = (
            (np.add.outer(np.arange(height) * 3, np.arange(width) * 5) % 256)[..., None].repeat(3, 2).astype(np.uint8)
        )
    return Image.fromarray(pixels).convert(draw(st.sampled_from(modes)))


class TestTorchvision:
    @settings(max_examples=150, deadline=None)
    @given(
        image=images(),
        resize=st.none() | st.integers(1, 90) | st.tuples(st.integers(1, 90), st.integers(1, 90)),
        crop=st.none() | st.tuples(st.integers(1, 90), st.integers(1, 90)),
        interpolation=st.sampled_from(FILTERS),
    )
    def test_pixels_are_the_same_and_normalized_ones_within_a_millionth(
        self, image: Image.Image, resize: Any, crop: Any, interpolation: Any
    ) -> None:
        transforms = import_torchvision().transforms
        mode = transforms.InterpolationMode(interpolation)
        steps = [transforms.Resize(resize, mode)] if resize else []
        steps += [transforms.CenterCrop(crop)] if crop else []
        geometry = transforms.Compose(steps)
        spec = Preprocess(resize=resize, crop=crop, interpolation=interpolation, dtype=DType.UINT8, layout="HWC")
        expected = geometry(image.convert("RGB"))
        np.testing.assert_array_equal(load_sample(image, spec), np.asarray(expected))
        spec = Preprocess(resize=resize, crop=crop, interpolation=interpolation, mean=MEAN, std=STD)
        numbers = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])(expected)
        np.testing.assert_allclose(load_sample(image, spec), numbers.numpy(), rtol=0, atol=1e-6)

    def test_the_published_transforms_of_torchvision(self) -> None:
        """The spec of the torchvision source beside the transform that comes with the weights."""
        from graphkiln_converters.recipe import Recipe
        from graphkiln_converters.sources.base import open_source

        torchvision = import_torchvision()
        spec = open_source(Recipe(source="torchvision:resnet18")).preprocess
        assert spec is not None
        weights = torchvision.models.ResNet18_Weights.DEFAULT.transforms
        image = Image.effect_noise((333, 251), 90).convert("RGB")
        np.testing.assert_allclose(load_sample(image, spec), weights()(image).numpy(), rtol=0, atol=1e-6)


class TestTimm:
    def configurations(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """One set of facts for each way of preprocessing among all of timm's pretrained models."""
        import timm
        from timm.data import resolve_data_config

        found = {}
        for name in timm.list_models(pretrained=True):
            facts = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
            if max(facts["input_size"]) <= 300:
                kinds = ("input_size", "interpolation", "crop_pct", "crop_mode")
                found[tuple(facts.get(kind) for kind in kinds)] = facts
        return found

    @pytest.mark.slow
    def test_every_configuration_is_the_same_or_not_expressible(self) -> None:
        from timm.data import create_transform

        claimed = 0
        found = self.configurations()
        assert len(found) > 30
        for facts in found.values():
            spec = preprocess_from_config(facts, facts["input_size"])
            if spec is None:
                continue
            claimed += 1
            options = {
                name: facts[name] for name in ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
            }
            transform: Any = create_transform(**options, is_training=False)
            for size in ((301, 203), (97, 160), (224, 224)):
                image = Image.effect_noise(size, 90).convert("RGB")
                expected = transform(image).numpy()
                np.testing.assert_allclose(load_sample(image, spec), expected, rtol=0, atol=1e-6, err_msg=str(facts))
        assert claimed > 0.9 * len(found), f"{claimed} of {len(found)}"

    @pytest.mark.parametrize(
        "facts",
        [
            {"crop_mode": "border"},
            {"input_size": (3, 64, 48)},
            {"interpolation": "random"},
        ],
    )
    def test_other_configurations_are_not_expressible(self, facts: dict[str, Any]) -> None:
        usual = {"input_size": (3, 64, 64), "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"}
        merged = {**usual, "mean": MEAN, "std": STD, **facts}
        assert preprocess_from_config(merged, merged["input_size"]) is None


PROCESSORS = {
    "ViT": {},
    "CLIP": {},
    "Bit": {"resample": 1},
    "DeiT": {},
    "Siglip": {"size": {"height": 60, "width": 70}},
    "Blip": {"size": {"height": 60, "width": 70}},
    "Pvt": {"do_normalize": False},
    "Beit": {"do_center_crop": True, "size": {"height": 64, "width": 64}, "crop_size": {"height": 49, "width": 50}},
    "MobileNetV1": {},
    "MobileNetV2": {},
    "ConvNext": {"size": {"shortest_edge": 100}},
    "ConvNext ": {"size": {"shortest_edge": 384}},
}


class TestTransformers:
    def processor(self, folder: Path, kind: str, facts: dict[str, Any]) -> Any:
        import_torchvision()
        import transformers

        document = {"image_processor_type": f"{kind.strip()}ImageProcessor", **facts}
        (folder / "preprocessor_config.json").write_text(json.dumps(document))
        automatic: Any = transformers.AutoImageProcessor
        return automatic.from_pretrained(folder, backend="pil")

    @pytest.mark.parametrize("kind", PROCESSORS)
    def test_samples_are_the_same(self, kind: str, tmp_path: Path) -> None:
        processor = self.processor(tmp_path, kind, PROCESSORS[kind])
        spec = preprocess_from_processor(processor)
        assert spec is not None
        # Sizes whose crops lie between pixels, and images that are smaller than the crop.
        for size in ((301, 203), (203, 301), (227, 225), (226, 229), (50, 40), (224, 224)):
            image = Image.effect_noise(size, 90).convert("RGB")
            expected = processor(image, return_tensors="np")["pixel_values"][0]
            np.testing.assert_allclose(load_sample(image, spec), expected, rtol=0, atol=1e-6, err_msg=f"{size}")

    @pytest.mark.parametrize(
        ("kind", "facts"),
        [
            ("Levit", {}),
            ("PoolFormer", {}),
            ("EfficientNet", {}),
            ("MobileViT", {}),
            ("ViT", {"rescale_factor": 1 / 127.5}),
            ("ViT", {"do_rescale": False}),
            ("CLIP", {"size": {"shortest_edge": 224, "longest_edge": 448}}),
        ],
    )
    def test_other_configurations_are_not_expressible(self, kind: str, facts: dict[str, Any], tmp_path: Path) -> None:
        assert preprocess_from_processor(self.processor(tmp_path, kind, facts)) is None
