"""A model with a gradient: autograd's numbers, what fp32 cannot know, and requests that make no sense."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_converters.gradient import GradientModel, add_gradient, perturb
from graphkiln_converters.sources.base import FixedBatchSource, GradientSource, InputSpec, SourceOptions, open_source
from graphkiln_converters.sources.pytorch import TorchModel, freeze


class Weighted(nn.Module):
    """Outputs and inputs by name: a product, and a sum with integers."""

    def forward(self, image: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"product": image * image * number, "sum": image + number}


class Kink(nn.Module):
    """A ReLU at its kink, where the smallest change of the input switches the gradient."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.relu(image - 1.0) * 100 + image


def weighted(*, keywords: bool = True) -> TorchModel:
    inputs = (
        InputSpec(name="image", shape=(3,)),
        InputSpec(name="number", dtype=DType.INT64, shape=(3,), high=5),
    )
    return TorchModel(
        module=freeze(Weighted()),
        description="weighted",
        libraries=("torch",),
        inputs=inputs,
        preprocess=Preprocess(resize=8),
        labels=("a", "b"),
        keywords=keywords,
    )


FEEDS = {"image": np.array([[1, 2, 3], [4, 5, 6]], "f4"), "number": np.array([[0, 1, 2], [3, 4, 0]])}


class TestRun:
    @pytest.mark.parametrize("keywords", [True, False])
    def test_outputs_and_the_gradient_of_one(self, keywords: bool) -> None:
        outputs = add_gradient(weighted(keywords=keywords), "product:image").run(FEEDS)
        assert list(outputs) == ["product", "sum", "image_gradient"]
        np.testing.assert_array_equal(outputs["image_gradient"], 2 * FEEDS["image"] * FEEDS["number"])
        np.testing.assert_array_equal(outputs["sum"], FEEDS["image"] + FEEDS["number"])

    def test_each_row_has_its_own(self) -> None:
        model = add_gradient(weighted(), "product:image")
        rows = [model.run({name: array[i : i + 1] for name, array in FEEDS.items()}) for i in (0, 1)]
        both = model.run(FEEDS)["image_gradient"]
        np.testing.assert_array_equal(both, np.concatenate([row["image_gradient"] for row in rows]))

    def test_feeds_are_not_changed(self) -> None:
        before = {name: array.copy() for name, array in FEEDS.items()}
        add_gradient(weighted(), "product:image").run(FEEDS)
        for name, array in before.items():
            np.testing.assert_array_equal(FEEDS[name], array)


class TestNoise:
    def kink(self) -> GradientModel:
        model = TorchModel(
            module=freeze(Kink()), description="kink", libraries=(), inputs=(InputSpec(name="image", shape=(1,)),)
        )
        return add_gradient(model, "output:image")

    def test_at_a_kink_it_is_large(self) -> None:
        assert self.kink().gradient_noise({"image": np.array([[1.0]], "f4")}) > 10

    def test_elsewhere_there_is_none(self) -> None:
        assert self.kink().gradient_noise({"image": np.array([[2.0]], "f4")}) == 0

    def test_a_gradient_of_zero_has_none(self) -> None:
        feeds = {**FEEDS, "number": np.zeros((2, 3), np.int64)}
        assert add_gradient(weighted(), "product:image").gradient_noise(feeds) == 0

    def test_a_smooth_function_has_that_of_its_input(self) -> None:
        noise = add_gradient(weighted(), "product:image").gradient_noise(FEEDS)
        assert 1e-7 < noise < 2e-5

    def test_a_perturbation_is_as_large_as_fp32_errs(self) -> None:
        array = np.linspace(-5, 5, 1001, dtype="f4")
        changed = perturb(array, np.random.default_rng(0))
        assert changed.dtype == np.float32
        relative = np.abs(changed - array)[array != 0] / np.abs(array[array != 0])
        assert 1e-6 < relative.mean() < 5e-6


class TestSource:
    def test_is_that_of_the_model(self) -> None:
        model = add_gradient(weighted(), "sum:image")
        assert model.description == "weighted with the gradient of sum by image"
        assert (model.libraries, model.labels) == (("torch",), ("a", "b"))
        assert model.inputs == weighted().inputs
        assert model.preprocess == Preprocess(resize=8)
        assert model.gradient == "image_gradient"

    def test_is_told_from_others_by_its_protocol(self) -> None:
        assert isinstance(add_gradient(weighted(), "sum:image"), GradientSource)
        assert not isinstance(weighted(), GradientSource)
        assert not isinstance(weighted(), FixedBatchSource)


class TestRequests:
    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            ("product", "write OUTPUT:INPUT"),
            ("", "write OUTPUT:INPUT"),
            ("products:image", "no output 'products'.*did you mean 'product'"),
            ("product:images", "no input 'images'.*did you mean 'image'"),
            (":image", "there is no output ''"),
            ("product:number", "'number' holds integers, which have no derivative"),
        ],
    )
    def test_that_make_no_sense(self, request_: str, message: str) -> None:
        with pytest.raises(ConversionError, match=message):
            add_gradient(weighted(), request_)

    def test_of_a_saved_graph(self, digits: object) -> None:
        source = open_source(f"{digits}/1/model.onnx", SourceOptions())
        with pytest.raises(ConversionError, match="--gradient needs a PyTorch model") as caught:
            add_gradient(source, "OUTPUT_0:INPUT_0")
        source.close()
        assert "no derivatives" in caught.value.hint
