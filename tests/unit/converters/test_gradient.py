"""Models with a gradient output, compared with autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_converters.gradient import (
    FrozenNorm,
    GradientModel,
    add_gradient,
    avg_pool2d_backward,
    convolution_backward,
    joint_module,
    max_pool2d_backward,
)
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import InputSpec, open_source
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
    def test_outputs_and_a_gradient(self, keywords: bool) -> None:
        outputs = add_gradient(weighted(keywords=keywords), "product:image").run(FEEDS)
        assert list(outputs) == ["product", "sum", "image_gradient"]
        np.testing.assert_array_equal(outputs["image_gradient"], 2 * FEEDS["image"] * FEEDS["number"])
        np.testing.assert_array_equal(outputs["sum"], FEEDS["image"] + FEEDS["number"])

    def test_each_row_has_its_own_gradient(self) -> None:
        model = add_gradient(weighted(), "product:image")
        rows = [model.run({name: array[i : i + 1] for name, array in FEEDS.items()}) for i in (0, 1)]
        both = model.run(FEEDS)["image_gradient"]
        np.testing.assert_array_equal(both, np.concatenate([row["image_gradient"] for row in rows]))


class TestNoise:
    def kink(self) -> GradientModel:
        model = TorchModel(
            module=freeze(Kink()), description="kink", libraries=(), inputs=(InputSpec(name="image", shape=(1,)),)
        )
        return add_gradient(model, "output:image")

    def test_noise_is_large_at_a_kink(self) -> None:
        assert self.kink().gradient_noise({"image": np.array([[1.0]], "f4")}) > 10

    def test_noise_is_zero_elsewhere(self) -> None:
        assert self.kink().gradient_noise({"image": np.array([[2.0]], "f4")}) == 0


class TestRequests:
    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            ("product", "write OUTPUT:INPUT"),
            ("products:image", "no output 'products'.*did you mean 'product'"),
            ("product:images", "no input 'images'.*did you mean 'image'"),
            ("product:number", "'number' holds integers, which have no derivative"),
        ],
    )
    def test_invalid_requests_are_refused(self, request_: str, message: str) -> None:
        with pytest.raises(ConversionError, match=message):
            add_gradient(weighted(), request_)

    def test_a_gradient_of_a_saved_graph_is_refused(self, digits: object) -> None:
        source = open_source(Recipe(source=f"{digits}/1/model.onnx"))
        with pytest.raises(ConversionError, match="--gradient needs a PyTorch model") as caught:
            add_gradient(source, "OUTPUT_0:INPUT_0")
        source.close()
        assert "no derivatives" in caught.value.hint


# Joint graphs.


def forward(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {"output": module(*inputs)}


def trained(norm: nn.Module) -> nn.Module:
    """Set random statistics and parameters, and evaluation mode."""
    torch.manual_seed(0)
    for tensor in (*norm.parameters(), *norm.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2)
    return norm.eval()


class TestNorms:
    @pytest.mark.parametrize("affine", [True, False])
    @pytest.mark.parametrize(
        ("norm", "shape"),
        [
            (nn.BatchNorm1d, (2, 3)),
            (nn.BatchNorm1d, (2, 3, 7)),
            (nn.BatchNorm2d, (2, 3, 4, 5)),
            (nn.BatchNorm3d, (2, 3, 2, 2, 2)),
        ],
    )
    def test_a_frozen_norm_computes_the_same(
        self, norm: type[nn.BatchNorm2d], shape: tuple[int, ...], affine: bool
    ) -> None:
        original = trained(norm(3, affine=affine, eps=1e-3))
        x = torch.randn(shape)
        torch.testing.assert_close(FrozenNorm(original)(x), original(x))


class TestJointModule:
    def test_a_joint_module_returns_outputs_then_gradients(self) -> None:
        module = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).requires_grad_(requires_grad=False)
        x = torch.randn(2, 4, requires_grad=True)
        joint = joint_module(module, forward, "output", [x], dynamic_shapes=None, description="a test")
        output, gradient = joint(x.detach())
        expected = module(x)
        (reference,) = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(output, expected.detach())
        torch.testing.assert_close(gradient, reference)
        assert joint.differentiated == []
        assert list(joint.parameters()) == []

    def test_gradients_of_parameters_are_named(self) -> None:
        module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False))
        x = torch.randn(1, 4)
        joint = joint_module(module, forward, "output", [x], dynamic_shapes=None, description="a test")
        _, *gradients = joint(x)
        assert joint.differentiated == ["0.weight", "0.bias", "2.weight"]
        module(x).sum().backward()
        for name, gradient in zip(joint.differentiated, gradients, strict=True):
            torch.testing.assert_close(gradient, module.get_parameter(name).grad)

    def test_a_module_that_cannot_be_differentiated_is_refused(self) -> None:
        class Detached(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.detach()

        x = torch.ones(2, 3, requires_grad=True)
        with pytest.raises(ConversionError, match="no gradient graph for a test") as caught:
            joint_module(Detached(), forward, "output", [x], dynamic_shapes=None, description="a test")
        assert "in place" in caught.value.hint


# Backward operators of many geometries.

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Make a random gradient of the output, and return it with those of the inputs."""
    derived = [tensor.clone().requires_grad_() for tensor in inputs]
    output = function(*derived)
    gradient = random(*output.shape)
    return gradient, list(torch.autograd.grad(output, derived, gradient))


# stride, padding, dilation, groups
GEOMETRIES = [
    (1, 0, 1, 1),
    (1, 1, 1, 2),
    (1, 2, 2, 1),
    (2, 1, 1, 1),
    (3, 0, 2, 4),
    (1, 4, 1, 1),  # more padding than the kernel reaches
    (2, 3, 1, 2),
]


class TestConvolution:
    @pytest.mark.parametrize("geometry", GEOMETRIES)
    @pytest.mark.parametrize("axes", [1, 2, 3])
    @pytest.mark.parametrize("batch", [1, 3])
    def test_gradients_of_convolutions(self, batch: int, axes: int, geometry: tuple[int, int, int, int]) -> None:
        stride, padding, dilation = ([number] * axes for number in geometry[:3])
        groups = geometry[3]
        x, weight, bias = random(batch, 4, *[8] * axes), random(8, 4 // groups, *[3] * axes), random(8)
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        gradient, expected = gradients(lambda *inputs: CONVOLUTIONS[axes](*inputs, **options), x, weight, bias)
        rest = ([8], stride, padding, dilation, False, [0] * axes, groups, [True, True, True])
        for found, reference in zip(convolution_backward(gradient, x, weight, *rest), expected, strict=True):
            torch.testing.assert_close(found, reference)

    @pytest.mark.parametrize(
        ("stride", "padding", "output_padding", "groups"), [(1, 0, 0, 1), (2, 1, 1, 1), (2, 0, 0, 2), (3, 1, 2, 4)]
    )
    @pytest.mark.parametrize("axes", [1, 2])
    def test_gradients_of_transposed_convolutions(
        self, axes: int, stride: int, padding: int, output_padding: int, groups: int
    ) -> None:
        x, weight, bias = random(2, 4, *[5] * axes), random(4, 8 // groups, *[3] * axes), random(8)
        options = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups}
        gradient, expected = gradients(lambda *inputs: TRANSPOSED[axes](*inputs, **options), x, weight, bias)
        lists = [[number] * axes for number in (stride, padding, 1)]
        rest = ([8], *lists, True, [output_padding] * axes, groups, [True, True, True])
        for found, reference in zip(convolution_backward(gradient, x, weight, *rest), expected, strict=True):
            torch.testing.assert_close(found, reference)

    def test_elements_outside_of_all_windows_have_no_gradient(self) -> None:
        """A stride of 2 over 8 elements leaves the last one out: its gradient is zero."""
        x, weight = random(1, 1, 8), random(1, 1, 3)
        gradient, (expected, _) = gradients(lambda *inputs: functional.conv1d(*inputs, stride=2), x, weight)
        found, *_ = convolution_backward(gradient, x, weight, [0], [2], [0], [1], False, [0], 1, [True, False, False])
        torch.testing.assert_close(found, expected)
        assert found[0, 0, -1] == 0


class TestPooling:
    @pytest.mark.parametrize(
        "arguments",
        [
            ([2, 2], [2, 2], [0, 0], [1, 1], False),
            ([3, 3], [1, 1], [1, 1], [1, 1], False),  # an element may be the maximum of several windows
            ([3, 2], [2, 1], [1, 0], [1, 2], False),
            ([3, 3], [2, 2], [0, 0], [1, 1], True),
        ],
    )
    def test_gradients_of_max_pooling(self, arguments: tuple[Any, ...]) -> None:
        """Kernel, stride, padding, dilation, ceil_mode."""
        x = random(2, 3, 8, 8)
        gradient, (expected,) = gradients(lambda x: functional.max_pool2d(x, *arguments), x)
        indices = functional.max_pool2d(x, *arguments, return_indices=True)[1]
        torch.testing.assert_close(max_pool2d_backward(gradient, x, *arguments, indices), expected)

    @pytest.mark.parametrize(
        "arguments",
        [
            ([2, 2], [2, 2], [0, 0], True, None),
            ([3, 2], [1, 2], [1, 0], True, None),
            ([3, 3], [2, 2], [0, 0], False, None),
            ([3, 3], [2, 1], [1, 1], True, 4),
            ([2, 2], [], [0, 0], True, None),  # no stride is that of the kernel
        ],
    )
    def test_gradients_of_average_pooling(self, arguments: tuple[Any, ...]) -> None:
        x = random(2, 3, 8, 9)
        kernel, stride, padding, counted, divisor = arguments
        gradient, (expected,) = gradients(
            lambda x: functional.avg_pool2d(x, kernel, stride or None, padding, False, counted, divisor), x
        )
        found = avg_pool2d_backward(gradient, x, kernel, stride, padding, False, counted, divisor)
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(("ceil_mode", "padding", "counted"), [(True, [0, 0], True), (False, [1, 0], False)])
    def test_windows_of_several_sizes_are_left_to_pytorch(
        self, ceil_mode: bool, padding: list[int], counted: bool
    ) -> None:
        x = random(1, 1, 4, 4)
        found = avg_pool2d_backward(x, x, [2, 2], [2, 2], padding, ceil_mode, counted, None)
        assert found is NotImplemented
