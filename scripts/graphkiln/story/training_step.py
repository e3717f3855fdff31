"""A training step, eager and as one static graph: outputs, and the gradients of one output by every parameter.

The graph is not served. It is the starting point of the acceleration story.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir
import torch
from torch import nn

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_converters.gradient import FrozenNorm, differentiable, joint_module
from graphkiln_converters.sources.base import synthetic_samples
from graphkiln_converters.sources.pytorch import TorchModel, export_module, named_outputs

_BATCH = 1  # gradients by parameters would be sums over a batch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStep:
    """Forward and backward of a model with one input.

    Attributes:
        model: The model. The sum of its first output is differentiated.
    """

    model: TorchModel

    def run(self, feeds: Mapping[str, AnyArray]) -> tuple[dict[str, AnyArray], dict[str, AnyArray]]:
        """Compute outputs by name and gradients by parameter name with autograd."""
        module = self.model.module.requires_grad_(requires_grad=True)
        try:
            outputs = _forward(module, [torch.from_numpy(feeds[spec.name]) for spec in self.model.inputs])
            module.zero_grad()
            next(iter(outputs.values())).sum().backward()  # type: ignore[no-untyped-call]
            gradients = {
                name: parameter.grad.numpy()
                for name, parameter in module.named_parameters()
                if parameter.grad is not None
            }
            module.zero_grad()
        finally:
            module.requires_grad_(requires_grad=False)
        return {name: tensor.detach().numpy() for name, tensor in outputs.items()}, gradients

    def repeat(self, feeds: Mapping[str, AnyArray], *, by_input: bool = False) -> None:
        """Run forward, backward by every parameter, and a second forward, on a GPU if there is one."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        module = self.model.module.to(device).requires_grad_(requires_grad=True)
        inputs = [torch.from_numpy(feeds[spec.name]).to(device) for spec in self.model.inputs]
        for tensor in inputs:
            tensor.requires_grad_(by_input)
        module.zero_grad()
        next(iter(_forward(module, inputs).values())).sum().backward()  # type: ignore[no-untyped-call]
        for output in _forward(module, inputs).values():
            output.detach().cpu()  # waits for the GPU

    def export(self) -> tuple[onnx_ir.Model, tuple[str, ...]]:
        """Export the graph for one sample.

        Returns:
            The graph, and the names of the parameters whose gradients are its last outputs, in order.

        Raises:
            ConversionError: The joint graph cannot be exported.
        """
        feeds = synthetic_samples(self.model.inputs, _BATCH, {}, seed=0)
        outputs = tuple(self.model.run(feeds))
        example = tuple(torch.from_numpy(array) for array in feeds.values())
        joint = joint_module(
            differentiable(self.model.module, _trainable_norm).requires_grad_(requires_grad=True),
            _forward,
            outputs[0],
            example,
            dynamic_shapes=None,
            description=self.model.description,
        )
        graph = export_module(
            joint,
            example,
            {},
            dynamic_shapes=None,
            input_names=list(feeds),
            output_names=[*outputs, *(f"{name}_gradient" for name in joint.differentiated)],
            description=self.model.description,
        )
        return graph, tuple(joint.differentiated)


class _TrainableNorm(nn.Module):
    """A batch norm in evaluation mode with trainable weight and bias.

    Scale and shift are computed per channel, so that features are read twice instead of four times.
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


def _trainable_norm(norm: Any) -> nn.Module:
    return _TrainableNorm(norm) if norm.affine else FrozenNorm(norm)


def _forward(module: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return named_outputs(module(*inputs))
