"""Input specs from an example input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.examples import input_specs


class Two(nn.Module):
    def forward(self, image: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return image * scale


class Variable(nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0]


IMAGE, SCALE = torch.zeros(2, 3, 8, 8), torch.zeros(2, 1, dtype=torch.float64)


class TestNames:
    @pytest.mark.parametrize(
        ("example", "names"),
        [
            (IMAGE, ["image"]),
            ((IMAGE,), ["image"]),
            ((IMAGE, SCALE), ["image", "scale"]),
            ([IMAGE, SCALE], ["image", "scale"]),
            ({"scale": SCALE, "image": IMAGE}, ["scale", "image"]),
        ],
    )
    def test_are_those_of_forward_or_of_the_example(self, example: Any, names: list[str]) -> None:
        assert [spec.name for spec in input_specs(Two(), example)] == names

    def test_of_variable_arguments_are_numbered(self) -> None:
        assert [spec.name for spec in input_specs(Variable(), (IMAGE, SCALE))] == ["input_0", "input_1"]


class TestSpecs:
    def test_shapes_are_those_of_one_sample(self) -> None:
        image, scale = input_specs(Two(), (IMAGE, SCALE))
        assert (image.shape, image.dtype) == ((3, 8, 8), DType.FP32)
        assert (scale.shape, scale.dtype) == ((1,), DType.FP64)

    def test_a_batch_of_numbers(self) -> None:
        (spec,) = input_specs(Two(), torch.zeros(4))
        assert spec.shape == ()

    @pytest.mark.parametrize(
        ("tensor", "high"),
        [
            (torch.tensor([[3, 99]]), 100),
            (torch.tensor([[0]], dtype=torch.int32), 1),
            (torch.tensor([[-5]]), 1),
            (torch.zeros(2, 0, dtype=torch.int64), 2),
            (torch.full((1, 1), 7.5), 2),
            (torch.tensor([[True]]), 2),
        ],
    )
    def test_integers_are_drawn_up_to_the_largest_of_the_example(self, tensor: torch.Tensor, high: int) -> None:
        (spec,) = input_specs(Two(), tensor)
        assert spec.high == high


class TestErrors:
    @pytest.mark.parametrize(("example", "kind"), [("text", "str"), (3, "int"), (None, "NoneType"), ({IMAGE}, "set")])
    def test_another_container(self, example: Any, kind: str) -> None:
        with pytest.raises(ConversionError, match=f"the example input is a {kind}, expected tensors"):
            input_specs(Two(), example)

    @pytest.mark.parametrize("value", [torch.tensor(1.0), 3.0, "text", [1, 2]])
    def test_no_tensor_with_a_batch(self, value: Any) -> None:
        with pytest.raises(ConversionError, match="'scale' must be a tensor with a batch dimension"):
            input_specs(Two(), (IMAGE, value))
