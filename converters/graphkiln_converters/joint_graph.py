"""Forward and backward as one graph: torch.export's joint graph of a model, as a module that can be exported again.

Exporting the joint program directly gives an empty graph; its operators that ONNX has not are decomposed here.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.export.experimental import _export_forward_backward

from graphkiln_backend.graph.errors import ConversionError

_aten = torch.ops.aten

Answer = Callable[[nn.Module, Sequence[torch.Tensor]], Mapping[str, torch.Tensor]]
"""Calls a module with its inputs in order; answers tensors by name."""


def joint_module(
    module: nn.Module, answer: Answer, output: str, example: Sequence[torch.Tensor], *, parameters: bool, what: str
) -> JointModule:
    """The answers of a module, and the gradients of the sum of one of them.

    Args:
        module: In evaluation mode; not changed.
        answer: Calls it.
        output: Which answer is summed up.
        example: Inputs; those that require a gradient get one.
        parameters: Whether the module's parameters get gradients, too. They are sums over the batch, which is that of
            the example then; otherwise it varies, and must be 2 or more in the example.
        what: The model in words, for the error.

    Raises:
        ConversionError: The joint graph cannot be made.
    """
    prepared = _prepared(copy.deepcopy(module), learned=parameters).requires_grad_(parameters)
    batch = torch.export.Dim("batch")
    shapes = None if parameters else (tuple({0: batch} for _ in example),)
    try:
        with plain_attention(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the joint export is experimental, and says so
            program = torch.export.export(_Summed(prepared, answer, output), tuple(example), dynamic_shapes=shapes)
            program = _export_forward_backward(program).run_decompositions(_decompositions())
    except Exception as error:
        raise ConversionError(
            f"no gradient graph for {what}: {(str(error).splitlines() or [''])[0]}",
            hint="replace what changes a tensor in place and explicit padding (F.pad) in the module",
        ) from error
    return JointModule(program)


class _Summed(nn.Module):
    """Answers the sum to derive first, then the answers themselves."""

    def __init__(self, module: nn.Module, answer: Answer, output: str) -> None:
        super().__init__()
        self.module = module
        self._answer = answer
        self._output = output

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answers = self._answer(self.module, inputs)
        return answers[self._output].sum(), *(tensor.detach() for tensor in answers.values())


class JointModule(nn.Module):
    """A joint program as a plain module: its parameters are buffers again, its loss is left out.

    Attributes:
        parameters_derived: Names of the parameters whose gradients are answered, in order, behind those of inputs.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        signature = program.graph_signature
        held = {**program.state_dict, **program.constants}
        self.graph = program.graph_module
        self._order: list[str | None] = []
        for number, spec in enumerate(signature.input_specs):
            if spec.kind.name == "USER_INPUT":
                self._order.append(None)
            else:
                self.register_buffer(f"held_{number}", held[str(spec.target)].detach())
                self._order.append(f"held_{number}")
        specs = list(enumerate(signature.output_specs))
        kinds = ("USER_OUTPUT", "GRADIENT_TO_USER_INPUT", "GRADIENT_TO_PARAMETER")
        self._picked = [index for kind in kinds for index, spec in specs if spec.kind.name == kind]
        self.parameters_derived = [
            str(spec.target).removeprefix("module.") for _, spec in specs if spec.kind.name == kinds[-1]
        ]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The answers, then the gradients."""
        waiting = iter(inputs)
        answers = self.graph(*[next(waiting) if name is None else getattr(self, name) for name in self._order])
        return tuple(answers[index] for index in self._picked)


class _FrozenNorm(nn.Module):
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


class _LearnedNorm(nn.Module):
    """A batch norm in evaluation mode whose weight and bias are parameters still.

    Scale and shift are made of them channel by channel, so that features are touched twice, and not four times.
    """

    factor: torch.Tensor
    mean: torch.Tensor

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("factor", torch.rsqrt(norm.running_var + norm.eps).detach())
        self.register_buffer("mean", norm.running_mean.detach())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """`[batch, channels, ...]`."""
        shape = (1, -1) + (1,) * (features.dim() - 2)
        scale = self.weight * self.factor
        shifted: torch.Tensor = features * scale.view(shape) + (self.bias - self.mean * scale).view(shape)
        return shifted


def _prepared(module: nn.Module, *, learned: bool) -> nn.Module:
    for name, child in module.named_children():
        if type(child) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            setattr(module, name, _LearnedNorm(child) if learned and child.affine else _FrozenNorm(child))
        elif isinstance(child, nn.ReLU):
            setattr(module, name, nn.ReLU())  # not in place
        else:
            _prepared(child, learned=learned)
    return module


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Attention as products and a softmax: fused kernels hide their derivative."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _decompositions() -> dict[Any, Any]:
    """Backward operators that ONNX has not, in terms of those that it has."""
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
    table[_aten.convolution_backward.default] = _convolution_backward
    table[_aten.empty_permuted.default] = _empty_permuted
    table[_aten.avg_pool2d_backward.default] = _average_pool_backward
    table[_aten.max_pool2d_with_indices_backward.default] = _max_pool_backward
    return table


def _empty_permuted(size: Any, _order: Any, **options: Any) -> Any:
    """Memory whose content does not matter."""
    return torch.zeros(size, dtype=options.get("dtype"))


def _convolution_backward(  # noqa: PLR0917 - the operator's signature
    gradient: Any,
    features: Any,
    weight: Any,
    bias_sizes: Any,  # noqa: ARG001 - the operator's signature
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],  # noqa: ARG001
    groups: int,
    output_mask: list[bool],
) -> tuple[Any, Any, Any]:
    """The derivatives of a convolution by its input, its weights and its bias."""
    by_input = by_weight = by_bias = None
    geometry = (stride, padding, dilation, groups)
    if output_mask[0] and transposed:
        by_input = _aten.convolution(
            gradient, weight, None, stride, padding, dilation, False, [0] * len(stride), groups
        )
    elif output_mask[0]:
        by_input = _by_input(gradient, features, weight, *geometry)
    if output_mask[1]:
        small, large = (features, gradient) if transposed else (gradient, features)
        by_weight = _by_weight(small, large, weight.shape, *geometry)
    if output_mask[2]:
        by_bias = gradient.sum([0, *range(2, gradient.dim())])
    return by_input, by_weight, by_bias


def _by_input(  # noqa: PLR0917 - as the operator orders them
    gradient: Any, features: Any, weight: Any, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Any:
    """The transposed convolution with the same weights.

    With strides of one that is a plain convolution with the weights turned around, which runtimes do far better.

    Source: Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", chapter 4.
    """
    axes = range(len(stride))
    reach = [dilation[i] * (weight.shape[2 + i] - 1) for i in axes]
    if all(step == 1 for step in stride) and all(reach[i] >= padding[i] for i in axes):
        grouped = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
        turned = grouped.reshape(-1, *grouped.shape[2:]).flip(list(range(2, weight.dim())))
        around = [reach[i] - padding[i] for i in axes]
        return _aten.convolution(gradient, turned, None, stride, around, dilation, False, [0] * len(stride), groups)
    covered = [(gradient.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + reach[i] + 1 for i in axes]
    rest = [features.shape[2 + i] - covered[i] for i in axes]
    return _aten.convolution(gradient, weight, None, stride, padding, dilation, True, rest, groups)


def _by_weight(  # noqa: PLR0917 - as the operator orders them
    small: Any, large: Any, shape: Any, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Any:
    """For each place of the kernel a matrix product: of the outputs with the inputs that it was laid upon.

    Args:
        small: What the kernel writes to (of a transposed convolution, what it reads), `[batch, out, *size]`.
        large: The other side, `[batch, in, *size]`.
        shape: Of the weights, `[out, in / groups, *kernel]`.
        stride: Of the convolution.
        padding: Of the convolution.
        dilation: Of the convolution.
        groups: Of the convolution.
    """
    axes = range(len(stride))
    kernel = shape[2:]
    if any(padding):
        large = nn.functional.pad(large, [pad for i in reversed(axes) for pad in (padding[i], padding[i])])
    left = small.reshape(small.shape[0], groups, shape[0] // groups, -1)
    products = []
    for place in itertools.product(*map(range, kernel)):
        laid = large
        for i in axes:
            if kernel[i] > 1 or stride[i] > 1:
                begin = place[i] * dilation[i]
                laid = _aten.slice(laid, 2 + i, begin, begin + (small.shape[2 + i] - 1) * stride[i] + 1, stride[i])
        right = laid.reshape(large.shape[0], groups, shape[1], -1)
        product = left @ right.transpose(2, 3)
        summed = product.squeeze(0) if small.shape[0] == 1 else product.sum(0)
        products.append(summed.reshape(shape[0], shape[1]))
    return (products[0] if len(products) == 1 else torch.stack(products, dim=-1)).reshape(shape)


def _max_pool_backward(  # noqa: PLR0917 - the operator's signature
    gradient: Any,
    features: Any,
    kernel: list[int],  # noqa: ARG001 - the operator's signature
    stride: list[int],  # noqa: ARG001
    padding: list[int],  # noqa: ARG001
    dilation: list[int],  # noqa: ARG001
    ceil_mode: bool,  # noqa: ARG001
    indices: Any,
) -> Any:
    """Every maximum hands its gradient to the place that it came from."""
    batch, channels = features.shape[0], features.shape[1]
    flat = torch.zeros_like(features).reshape(batch, channels, -1)
    scattered = flat.scatter_add(2, indices.reshape(batch, channels, -1), gradient.reshape(batch, channels, -1))
    return scattered.reshape(features.shape)


def _average_pool_backward(  # noqa: PLR0917 - the operator's signature
    gradient: Any,
    features: Any,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """Every average hands equal shares of its gradient to what it was made of: a transposed convolution per channel."""
    if ceil_mode or (any(padding) and not count_include_pad):
        return NotImplemented  # windows of different sizes
    channels = features.shape[1]
    share = 1.0 / (divisor_override or kernel[0] * kernel[1])
    weight = torch.full((channels, 1, *kernel), share, dtype=gradient.dtype)
    return _convolution_backward(
        gradient,
        features,
        weight,
        None,
        stride or kernel,
        padding,
        [1, 1],
        False,
        [0, 0],
        channels,
        [True, False, False],
    )[0]
