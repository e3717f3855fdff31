"""Forward and backward as one graph: torch.export's joint graph of a model, as a module that can be exported again.

Exporting the joint program directly gives an empty graph; `decompositions` replaces its operators that ONNX lacks.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export.experimental import _export_forward_backward

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.decompositions import backward_decompositions

Forward = Callable[[nn.Module, Sequence[torch.Tensor]], Mapping[str, torch.Tensor]]
"""Calls a module with its inputs in order; returns its outputs by name."""


def joint_module(
    module: nn.Module,
    forward: Forward,
    output: str,
    example: Sequence[torch.Tensor],
    *,
    dynamic_shapes: Any,
    description: str,
) -> JointModule:
    """The outputs of a module, and the gradients of the sum of one of them.

    Args:
        module: As `differentiable` returns it; its parameters get a gradient where they require one.
        forward: Calls it.
        output: Which output is summed up.
        example: Inputs; those that require a gradient get one.
        dynamic_shapes: As for `torch.export.export`; None where all sizes are those of the example.
        description: The model in words, for the error.

    Raises:
        ConversionError: The joint graph cannot be made.
    """
    try:
        with plain_attention(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the joint export is experimental, and says so
            summed = _Summed(module, forward, output)
            program = torch.export.export(summed, tuple(example), dynamic_shapes=dynamic_shapes)
            program = _export_forward_backward(program).run_decompositions(backward_decompositions())
    except Exception as error:
        raise ConversionError(
            f"no gradient graph for {description}: {(str(error).splitlines() or [''])[0]}",
            hint="replace what changes a tensor in place and explicit padding (F.pad) in the module",
        ) from error
    return JointModule(program)


class _Summed(nn.Module):
    """Returns the sum to differentiate first, then the outputs themselves."""

    def __init__(self, module: nn.Module, forward: Forward, output: str) -> None:
        super().__init__()
        self.module = module
        self._forward = forward
        self._output = output

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self._forward(self.module, inputs)
        return outputs[self._output].sum(), *(tensor.detach() for tensor in outputs.values())


class JointModule(nn.Module):
    """A joint program as a plain module: its parameters are buffers again, its loss is left out.

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
    """A copy of a module without what a joint graph cannot hold: batch norms that update buffers, in-place ReLUs.

    Args:
        module: In evaluation mode; not changed.
        norm: Makes what replaces a batch norm.
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
    """Attention as products and a softmax: fused kernels hide their derivative."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
