"""Forward and backward pass in one static graph: the outputs of a model and a gradient with respect to an input.

The gradient is that of the sum over all elements of an output; rows of a batch are independent, so each row has its own
gradient. The exported graph comes from torch.export's joint graph; the reference is plain autograd on the
module.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir
import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.export.experimental import _export_forward_backward

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_converters.recipe import first_line
from graphkiln_converters.sources.base import EXPORT_BATCH, SourceModel, synthetic_samples
from graphkiln_converters.sources.pytorch import TorchModel, named_outputs

# Relative error of an fp32 graph's values after some fifty layers, as seen in proofs of exports.
_NOISE = 3e-6
_NOISE_DRAWS = 4


@dataclass(frozen=True, kw_only=True)
class GradientModel(SourceModel):
    """A model with an additional gradient output.

    Attributes:
        model: The model.
        output: The summed output.
        input: The input of the gradient.
    """

    model: TorchModel
    output: str
    input: str

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; by autograd."""
        outputs, gradient = self._differentiate(feeds)
        return {**{name: tensor.detach().numpy() for name, tensor in outputs.items()}, self.gradient: gradient.numpy()}

    def gradient_noise(self, feeds: Mapping[str, AnyArray]) -> float:
        """See `SourceModel.gradient_noise`.

        If an input of a ReLU is within fp32 error of its kink, the gradient is ambiguous in fp32. With random ResNets
        this affects one of three samples, by up to 0.8% of the gradient.
        """
        generator = np.random.default_rng(0)
        exact = self._differentiate(feeds)[1]
        changes = [0.0]
        for _ in range(_NOISE_DRAWS if exact.any() else 0):
            perturbed = self._differentiate({**feeds, self.input: perturb(feeds[self.input], generator)})[1]
            changes.append(float((perturbed - exact).norm() / exact.norm()))
        return max(changes)

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`.

        Raises:
            ConversionError: The joint graph cannot be made.
        """
        outputs = self.model.run(synthetic_samples(self.inputs, 1, {}, seed=0))
        joint = replace(
            self.model,
            inputs=self.inputs,
            module=self._joint(),
            keywords=False,
            outputs=(*outputs, self.gradient),
        )
        return joint.export()

    def _differentiate(self, feeds: Mapping[str, AnyArray]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors = {spec.name: torch.from_numpy(feeds[spec.name].copy()) for spec in self.inputs}
        tensors[self.input].requires_grad_()
        with plain_attention():
            outputs = self._forward(self.model.module, tensors)
            (gradient,) = torch.autograd.grad(outputs[self.output].sum(), tensors[self.input])
        return outputs, gradient

    def _forward(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return named_outputs(module(**tensors) if self.model.keywords else module(*tensors.values()))

    def _joint(self) -> nn.Module:
        feeds = synthetic_samples(self.inputs, EXPORT_BATCH, {}, seed=0)
        example = {name: torch.from_numpy(array) for name, array in feeds.items()}
        example[self.input].requires_grad_()
        batch = torch.export.Dim("batch")
        return joint_module(
            differentiable(self.model.module).requires_grad_(requires_grad=False),
            lambda module, inputs: self._forward(module, dict(zip(example, inputs, strict=True))),
            self.output,
            list(example.values()),
            dynamic_shapes=(tuple({0: batch} for _ in example),),
            description=self.model.description,
        )


def perturb(array: AnyArray, generator: np.random.Generator) -> AnyArray:
    """Perturb an array by the typical fp32 error at the end of a network."""
    return np.multiply(array, 1 + _NOISE * generator.standard_normal(array.shape).astype(np.float32))


def add_gradient(source: SourceModel, gradient: str) -> GradientModel:
    """Add the gradient `OUTPUT:INPUT`, by the source's names, to a PyTorch model.

    Raises:
        ConversionError: The source is not a PyTorch model, or lacks the output or input.
    """
    output, separator, name = gradient.partition(":")
    if not separator:
        raise ConversionError(f"--gradient {gradient}: write OUTPUT:INPUT")
    if not isinstance(source, TorchModel):
        raise ConversionError("--gradient needs a PyTorch model", hint="a saved graph holds no derivatives")
    inputs = {spec.name: spec for spec in source.inputs}
    outputs = list(source.run(synthetic_samples(source.inputs, 1, {}, seed=0)))
    for word, known, kind in ((output, outputs, "output"), (name, list(inputs), "input")):
        if word not in known:
            raise ConversionError(f"--gradient {gradient}: there is no {kind} '{word}'", hint=did_you_mean(word, known))
    if not inputs[name].dtype.is_float:
        raise ConversionError(f"--gradient {gradient}: input '{name}' holds integers, which have no derivative")
    return GradientModel(
        description=f"{source.description} with the gradient of {output} by {name}",
        libraries=source.libraries,
        inputs=source.inputs,
        preprocess=source.preprocess,
        labels=source.labels,
        gradient=f"{name}_gradient",
        random_weights=source.random_weights,
        named=source.named,
        model=source,
        output=output,
        input=name,
    )


# Forward and backward as one graph: torch.export's joint graph of a model, as a module that can be exported again.
#
# Exporting the joint program directly gives an empty graph; `decompositions` replaces its operators that ONNX lacks.

# Calls a module with its inputs in order; returns its outputs by name.
Forward = Callable[[nn.Module, Sequence[torch.Tensor]], Mapping[str, torch.Tensor]]


def joint_module(
    module: nn.Module,
    forward: Forward,
    output: str,
    example: Sequence[torch.Tensor],
    *,
    dynamic_shapes: Any,
    description: str,
) -> JointModule:
    """Make a module that returns the outputs, and the gradients of the sum of one of them.

    Args:
        module: A result of `differentiable`; parameters that require a gradient get one.
        forward: Calls the module.
        output: The summed output.
        example: Inputs; those that require a gradient get one.
        dynamic_shapes: As for `torch.export.export`; None for fixed sizes.
        description: Description of the model, for the error.

    Raises:
        ConversionError: The joint graph cannot be made.
    """
    try:
        with plain_attention(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # suppress the warning that the joint export is experimental
            summed = _Summed(module, forward, output)
            program = torch.export.export(summed, tuple(example), dynamic_shapes=dynamic_shapes)
            program = _export_forward_backward(program).run_decompositions(backward_decompositions())
    except Exception as error:
        raise ConversionError(
            f"no gradient graph for {description}: {first_line(error)}",
            hint="replace what changes a tensor in place and explicit padding (F.pad) in the module",
        ) from error
    return JointModule(program)


class _Summed(nn.Module):
    """Return the sum to differentiate first, then the outputs."""

    def __init__(self, module: nn.Module, forward: Forward, output: str) -> None:
        super().__init__()
        self.module = module
        self._forward = forward
        self._output = output

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self._forward(self.module, inputs)
        return outputs[self._output].sum(), *(tensor.detach() for tensor in outputs.values())


class JointModule(nn.Module):
    """A joint program as a module: parameters become buffers, the loss is dropped.

    Attributes:
        differentiated: Names of the parameters whose gradients are returned, in order, after those of inputs.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        signature = program.graph_signature
        state = {**program.state_dict, **program.constants}
        self.graph = program.graph_module
        self._buffers_in_order: list[str | None] = []
        for number, spec in enumerate(signature.input_specs):
            if spec.kind.name == "USER_INPUT":
                self._buffers_in_order.append(None)
            else:
                self.register_buffer(f"state_{number}", state[str(spec.target)].detach())
                self._buffers_in_order.append(f"state_{number}")
        specs = list(enumerate(signature.output_specs))
        kinds = ("USER_OUTPUT", "GRADIENT_TO_USER_INPUT", "GRADIENT_TO_PARAMETER")
        self._returned = [index for kind in kinds for index, spec in specs if spec.kind.name == kind]
        self.differentiated = [
            str(spec.target).removeprefix("module.") for _, spec in specs if spec.kind.name == kinds[-1]
        ]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs, then the gradients."""
        remaining = iter(inputs)
        arguments = [next(remaining) if name is None else getattr(self, name) for name in self._buffers_in_order]
        results = self.graph(*arguments)
        return tuple(results[index] for index in self._returned)


class FrozenNorm(nn.Module):
    """A batch norm in evaluation mode as a scale and a shift: its running statistics cannot be updated."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, norm: Any) -> None:
        super().__init__()
        mean, variance = norm.running_mean, norm.running_var
        scale = torch.rsqrt(variance + norm.eps) * (norm.weight if norm.affine else 1.0)
        self.register_buffer("scale", scale.detach())
        self.register_buffer("shift", ((norm.bias if norm.affine else 0.0) - mean * scale).detach())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """`[batch, channels, ...]`."""
        shape = (1, -1) + (1,) * (features.dim() - 2)
        return features * self.scale.view(shape) + self.shift.view(shape)


def differentiable(module: nn.Module, norm: Callable[[Any], nn.Module] = FrozenNorm) -> nn.Module:
    """Copy a module without parts that a joint graph does not support: batch norms that update buffers, in-place ReLUs.

    Args:
        module: Module in evaluation mode; not changed.
        norm: Makes the replacement of a batch norm.
    """
    return _replace_layers(copy.deepcopy(module), norm)


def _replace_layers(module: nn.Module, norm: Callable[[Any], nn.Module]) -> nn.Module:
    for name, child in module.named_children():
        if type(child) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            setattr(module, name, norm(child))
        elif isinstance(child, nn.ReLU):
            setattr(module, name, nn.ReLU())  # not in place
        else:
            _replace_layers(child, norm)
    return module


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Attention as products and a softmax, because fused kernels have no differentiable decomposition."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


# Backward operators that ONNX lacks, in terms of operators that it has.
#
# Table for `ExportedProgram.run_decompositions`. PyTorch has most of the decompositions; those here are missing, or
# slow in PyTorch.

_aten = torch.ops.aten


def backward_decompositions() -> dict[Any, Any]:
    """Operator -> its decomposition."""
    table: dict[Any, Any] = dict(
        get_decompositions(
            [
                _aten.threshold_backward,
                _aten.native_layer_norm_backward,
                _aten.native_group_norm_backward,
                _aten.gelu_backward,
                _aten._softmax_backward_data,  # noqa: SLF001 - the operator's name
                _aten._log_softmax_backward_data,  # noqa: SLF001
                _aten.silu_backward,
                _aten.hardswish_backward,
                _aten.hardsigmoid_backward,
                _aten.sigmoid_backward,
                _aten.tanh_backward,
                _aten.elu_backward,
                _aten.leaky_relu_backward,
                _aten.hardtanh_backward,
                _aten.select_backward,
                _aten.slice_backward,
            ]
        )
    )
    table[_aten.convolution_backward.default] = convolution_backward
    table[_aten.empty_permuted.default] = empty_permuted
    table[_aten.avg_pool2d_backward.default] = avg_pool2d_backward
    table[_aten.max_pool2d_with_indices_backward.default] = max_pool2d_backward
    return table


def empty_permuted(size: Any, _layout: Any, **options: Any) -> Any:
    """Replace uninitialized memory, which is written before it is read, by zeros."""
    return torch.zeros(size, dtype=options.get("dtype"))


@dataclass(frozen=True, slots=True)
class _Convolution:
    """The geometry of a convolution.

    Attributes:
        stride: One number for each spatial axis, as all lists here.
        padding: On both sides.
        dilation: Distance between the kernel's elements.
        groups: Groups of channels.
    """

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def axes(self) -> range:
        """The spatial axes, from 0."""
        return range(len(self.stride))

    def apply(self, features: Any, weight: Any, output_padding: list[int] | None = None) -> Any:
        """Apply the convolution without bias; transposed if there is an output padding."""
        transposed, rest = output_padding is not None, output_padding or [0] * len(self.stride)
        return _aten.convolution(
            features, weight, None, self.stride, self.padding, self.dilation, transposed, rest, self.groups
        )


def convolution_backward(gradient: Any, features: Any, weight: Any, *arguments: Any) -> tuple[Any, Any, Any]:
    """Gradients of a convolution with respect to input, weight and bias.

    Args:
        gradient: Gradient of the output, `[batch, out, *size]`.
        features: The input, `[batch, in, *size]`.
        weight: `[out, in / groups, *kernel]`; of a transposed convolution `[in, out / groups, *kernel]`.
        *arguments: Further arguments: bias_sizes, stride, padding, dilation, transposed, output_padding, groups, and
            output_mask, which selects the needed gradients; the others are None.
    """
    _bias_sizes, stride, padding, dilation, transposed, _output_padding, groups, output_mask = arguments
    convolution = _Convolution(stride, padding, dilation, groups)
    by_input = by_weight = by_bias = None
    if output_mask[0]:
        by_input = (
            convolution.apply(gradient, weight) if transposed else _by_input(gradient, features, weight, convolution)
        )
    if output_mask[1]:
        written, read = (features, gradient) if transposed else (gradient, features)
        by_weight = _by_weight(written, read, weight.shape, convolution)
    if output_mask[2]:
        by_bias = gradient.sum([0, *range(2, gradient.dim())])
    return by_input, by_weight, by_bias


def _by_input(gradient: Any, features: Any, weight: Any, convolution: _Convolution) -> Any:
    """Transposed convolution with the same weight.

    With strides of one it is a plain convolution with the flipped weight, which is much faster in runtimes.

    Source: Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", chapter 4.
    """
    stride, padding, axes = convolution.stride, convolution.padding, convolution.axes
    reach = [convolution.dilation[i] * (weight.shape[2 + i] - 1) for i in axes]
    if all(step == 1 for step in stride) and all(reach[i] >= padding[i] for i in axes):
        grouped = weight.reshape(convolution.groups, -1, *weight.shape[1:]).transpose(1, 2)
        flipped = grouped.reshape(-1, *grouped.shape[2:]).flip(list(range(2, weight.dim())))
        around = [reach[i] - padding[i] for i in axes]
        return _Convolution(stride, around, convolution.dilation, convolution.groups).apply(gradient, flipped)
    covered = [(gradient.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + reach[i] + 1 for i in axes]
    return convolution.apply(gradient, weight, [features.shape[2 + i] - covered[i] for i in axes])


def _by_weight(written: Any, read: Any, shape: Any, convolution: _Convolution) -> Any:
    """One matrix product for each kernel position: output gradients with the corresponding inputs."""
    stride, padding, axes, kernel = convolution.stride, convolution.padding, convolution.axes, shape[2:]
    if any(padding):
        read = nn.functional.pad(read, [pad for i in reversed(axes) for pad in (padding[i], padding[i])])
    left = written.reshape(written.shape[0], convolution.groups, shape[0] // convolution.groups, -1)
    products = []
    for position in itertools.product(*map(range, kernel)):
        window = read
        for i in axes:
            if kernel[i] > 1 or stride[i] > 1:
                begin = position[i] * convolution.dilation[i]
                end = begin + (written.shape[2 + i] - 1) * stride[i] + 1
                window = _aten.slice(window, 2 + i, begin, end, stride[i])
        right = window.reshape(read.shape[0], convolution.groups, shape[1], -1)
        product = left @ right.transpose(2, 3)
        summed = product.squeeze(0) if written.shape[0] == 1 else product.sum(0)
        products.append(summed.reshape(shape[0], shape[1]))
    return (products[0] if len(products) == 1 else torch.stack(products, dim=-1)).reshape(shape)


def max_pool2d_backward(gradient: Any, features: Any, *arguments: Any) -> Any:
    """Pass the gradient of each maximum to its element.

    Args:
        gradient: Gradient of the output, `[batch, channels, *size]`.
        features: The input, `[batch, channels, *size]`.
        *arguments: Further arguments; the last one has the indices of the maxima in their channel.
    """
    indices = arguments[-1]
    batch, channels = features.shape[0], features.shape[1]
    flat = torch.zeros_like(features).reshape(batch, channels, -1)
    scattered = flat.scatter_add(2, indices.reshape(batch, channels, -1), gradient.reshape(batch, channels, -1))
    return scattered.reshape(features.shape)


def avg_pool2d_backward(gradient: Any, features: Any, *arguments: Any) -> Any:
    """Distribute the gradient of each average equally: a transposed convolution for each channel.

    Args:
        gradient: Gradient of the output, `[batch, channels, *size]`.
        features: The input, `[batch, channels, *size]`.
        *arguments: Further arguments: kernel_size, stride, padding, ceil_mode, count_include_pad and
            divisor_override.

    Returns:
        NotImplemented for windows of different sizes.
    """
    kernel, stride, padding, ceil_mode, count_include_pad, divisor_override = arguments
    if ceil_mode or (any(padding) and not count_include_pad):
        return NotImplemented
    channels = features.shape[1]
    share = 1.0 / (divisor_override or kernel[0] * kernel[1])
    weight = torch.full((channels, 1, *kernel), share, dtype=gradient.dtype)
    convolution = (None, stride or kernel, padding, [1, 1], False, [0, 0], channels, [True, False, False])
    return convolution_backward(gradient, features, weight, *convolution)[0]
