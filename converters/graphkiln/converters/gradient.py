"""Forward and backward in one static graph: a model's answers, and the gradient of one with respect to an input.

The gradient is that of the sum of an output over all its elements; rows of a batch do not touch each other, so each row
gets its own. The exported graph comes from torch.export's joint graph; the reference is plain autograd on the module.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir
import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.export.experimental import _export_forward_backward

from graphkiln.converters.pytorch import TorchModel, named_outputs
from graphkiln.converters.sources.base import InputSpec, SourceModel, made_up
from graphkiln.graph.dtypes import AnyArray
from graphkiln.graph.errors import ConversionError
from graphkiln.graph.preprocess import Preprocess
from graphkiln.graph.spelling import did_you_mean

_aten = torch.ops.aten
_EXPORT_BATCH = 2
_NOISE = 3e-6
"""Relative error of an fp32 graph's values after some fifty layers, as seen in proofs of exports."""
_NOISE_DRAWS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientModel:
    """A `SourceModel` that answers what a model answers, and a gradient.

    Attributes:
        model: The model.
        output: Which of its outputs is summed up.
        input: With respect to which of its inputs.
    """

    model: TorchModel
    output: str
    input: str

    @property
    def description(self) -> str:
        """See `SourceModel`."""
        return f"{self.model.description} with the gradient of {self.output} by {self.input}"

    @property
    def libraries(self) -> tuple[str, ...]:
        """See `SourceModel`."""
        return self.model.libraries

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """See `SourceModel`."""
        return self.model.inputs

    @property
    def preprocess(self) -> Preprocess | None:
        """See `SourceModel`."""
        return self.model.preprocess

    @property
    def labels(self) -> tuple[str, ...]:
        """See `SourceModel`."""
        return self.model.labels

    @property
    def gradient(self) -> str:
        """Name of the additional output."""
        return f"{self.input}_gradient"

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; by autograd."""
        answers, gradient = self._derive(feeds)
        return {**{name: tensor.detach().numpy() for name, tensor in answers.items()}, self.gradient: gradient.numpy()}

    def noise(self, feeds: Mapping[str, AnyArray]) -> float:
        """How much the gradient changes when the input changes by as little as fp32 can tell, as a share of its length.

        Where a ReLU stands that near to its kink, the gradient jumps, and no fp32 graph can know which way. On random
        ResNets that is seen in one of three samples, and makes up to 0.8% of the gradient.
        """
        generator = np.random.default_rng(0)
        steady = self._derive(feeds)[1]
        changes = [0.0]
        for _ in range(_NOISE_DRAWS if steady.any() else 0):
            factors = 1 + _NOISE * generator.standard_normal(feeds[self.input].shape).astype(np.float32)
            nudged = {**feeds, self.input: np.multiply(feeds[self.input], factors)}
            found = self._derive(nudged)[1]
            changes.append(float((found - steady).norm() / steady.norm()))
        return max(changes)

    def _derive(self, feeds: Mapping[str, AnyArray]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors = {spec.name: torch.from_numpy(feeds[spec.name].copy()) for spec in self.inputs}
        tensors[self.input].requires_grad_()
        with _plain_attention():
            answers = self._answer(self.model.module, tensors)
            (gradient,) = torch.autograd.grad(answers[self.output].sum(), tensors[self.input])
        return answers, gradient

    def export(self, dynamic: Mapping[str, Mapping[int, tuple[int, int]]]) -> onnx_ir.Model:
        """See `SourceModel.export`.

        Raises:
            ConversionError: The joint graph cannot be made.
        """
        joint = replace(self.model, module=self._joint(), keywords=False, returns=(*self._names(), self.gradient))
        return joint.export(dynamic)

    def close(self) -> None:
        """See `SourceModel.close`."""

    def _answer(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return named_outputs(module(**tensors) if self.model.keywords else module(*tensors.values()))

    def _names(self) -> list[str]:
        feeds = made_up(self.inputs, 1, {}, seed=0)
        return list(self.model.run(feeds))

    def _joint(self) -> nn.Module:
        example = [torch.from_numpy(array) for array in made_up(self.inputs, _EXPORT_BATCH, {}, seed=0).values()]
        names = [spec.name for spec in self.inputs]
        example[names.index(self.input)].requires_grad_()
        module = _Summed(_frozen(copy.deepcopy(self.model.module)), self)
        batch = torch.export.Dim("batch")
        shapes = (tuple({0: batch} for _ in example),)
        try:
            with _plain_attention(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the joint export is experimental, and says so
                program = torch.export.export(module, tuple(example), dynamic_shapes=shapes)
                program = _export_forward_backward(program).run_decompositions(_decompositions())
        except Exception as error:
            raise ConversionError(
                f"no gradient graph for {self.model.description}: {(str(error).splitlines() or [''])[0]}",
                hint="replace what changes a tensor in place and explicit padding (F.pad) in the module",
            ) from error
        return _Lifted(program)


def with_gradient(source: SourceModel, asked: str) -> GradientModel:
    """Adds a gradient to a PyTorch model.

    Args:
        source: The model.
        asked: `OUTPUT:INPUT`, by the source's names.

    Raises:
        ConversionError: The source is no PyTorch model, or has no such output or input.
    """
    output, separator, name = asked.partition(":")
    if not separator:
        raise ConversionError(f"--gradient {asked}: write OUTPUT:INPUT")
    if not isinstance(source, TorchModel):
        raise ConversionError("--gradient needs a PyTorch model", hint="a saved graph holds no derivatives")
    inputs = {spec.name: spec for spec in source.inputs}
    outputs = list(source.run(made_up(source.inputs, 1, {}, seed=0)))
    for word, known, kind in ((output, outputs, "output"), (name, list(inputs), "input")):
        if word not in known:
            raise ConversionError(f"--gradient {asked}: there is no {kind} '{word}'", hint=did_you_mean(word, known))
    if not inputs[name].dtype.is_float:
        raise ConversionError(f"--gradient {asked}: input '{name}' holds integers, which have no derivative")
    return GradientModel(model=source, output=output, input=name)


class _Summed(nn.Module):
    """Answers the sum to derive first, then the answers themselves."""

    def __init__(self, module: nn.Module, asked: GradientModel) -> None:
        super().__init__()
        self.module = module
        self._asked = asked

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = dict(zip([spec.name for spec in self._asked.inputs], inputs, strict=True))
        answers = self._asked._answer(self.module, tensors)  # noqa: SLF001 - its own helper
        return answers[self._asked.output].sum(), *(tensor.detach() for tensor in answers.values())


class _Lifted(nn.Module):
    """A joint program as a plain module: its parameters are buffers again, its loss is left out."""

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
        wanted = ("USER_OUTPUT", "GRADIENT_TO_USER_INPUT")
        self._picked = [index for index, spec in enumerate(signature.output_specs) if spec.kind.name in wanted]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The answers, then the gradient."""
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


def _frozen(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if type(child) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            setattr(module, name, _FrozenNorm(child))
        elif isinstance(child, nn.ReLU):
            setattr(module, name, nn.ReLU())  # not in place
        else:
            _frozen(child)
    return module


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
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
) -> tuple[Any, None, None]:
    """The derivative of a convolution by its input is the transposed convolution with the same weights.

    Source: Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", chapter 4.
    """
    if not output_mask[0]:
        return None, None, None
    axes = range(len(stride))
    if transposed:
        plain = _aten.convolution(gradient, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)
        return plain, None, None
    covered = [
        (gradient.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1
        for i in axes
    ]
    rest = [features.shape[2 + i] - covered[i] for i in axes]
    return _aten.convolution(gradient, weight, None, stride, padding, dilation, True, rest, groups), None, None


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
        gradient, features, weight, None, stride or kernel, padding, [1, 1], False, [0, 0], channels, [True]
    )[0]
