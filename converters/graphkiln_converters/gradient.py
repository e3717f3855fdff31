"""Forward and backward in one static graph: a model's outputs, and the gradient of one with respect to an input.

The gradient is that of the sum of an output over all its elements; rows of a batch do not affect each other, so each
row gets its own. The exported graph comes from torch.export's joint graph; the reference is plain autograd on the
module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir
import torch
from torch import nn

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_converters.joint_graph import differentiable, joint_module, plain_attention
from graphkiln_converters.sources.base import EXPORT_BATCH, InputSpec, SourceModel, synthetic_samples
from graphkiln_converters.sources.pytorch import TorchModel, named_outputs

_NOISE = 3e-6
"""Relative error of an fp32 graph's values after some fifty layers, as seen in proofs of exports."""
_NOISE_DRAWS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientModel:
    """A `SourceModel` that returns what a model returns, and a gradient.

    Attributes:
        model: The model.
        output: Which of its outputs is summed up.
        input: The input that the gradient is with respect to.
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
        """See `GradientSource`."""
        return f"{self.input}_gradient"

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; by autograd."""
        outputs, gradient = self._differentiate(feeds)
        return {**{name: tensor.detach().numpy() for name, tensor in outputs.items()}, self.gradient: gradient.numpy()}

    def gradient_noise(self, feeds: Mapping[str, AnyArray]) -> float:
        """See `GradientSource.gradient_noise`.

        Where an input of a ReLU is that near to its kink, the gradient jumps, and no fp32 graph can know which way. On
        random ResNets that is seen in one of three samples, and makes up to 0.8% of the gradient.
        """
        generator = np.random.default_rng(0)
        exact = self._differentiate(feeds)[1]
        changes = [0.0]
        for _ in range(_NOISE_DRAWS if exact.any() else 0):
            perturbed = self._differentiate({**feeds, self.input: perturb(feeds[self.input], generator)})[1]
            changes.append(float((perturbed - exact).norm() / exact.norm()))
        return max(changes)

    def export(self, dynamic: Mapping[str, Mapping[int, tuple[int, int]]]) -> onnx_ir.Model:
        """See `SourceModel.export`.

        Raises:
            ConversionError: The joint graph cannot be made.
        """
        outputs = self.model.run(synthetic_samples(self.inputs, 1, {}, seed=0))
        joint = replace(self.model, module=self._joint(), keywords=False, outputs=(*outputs, self.gradient))
        return joint.export(dynamic)

    def close(self) -> None:
        """See `SourceModel.close`."""

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
    """The array, changed by as much as fp32 computation errs by at the end of a network."""
    return np.multiply(array, 1 + _NOISE * generator.standard_normal(array.shape).astype(np.float32))


def add_gradient(source: SourceModel, gradient: str) -> GradientModel:
    """Adds a gradient to a PyTorch model.

    Args:
        source: The model.
        gradient: `OUTPUT:INPUT`, by the source's names.

    Raises:
        ConversionError: The source is no PyTorch model, or has no such output or input.
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
    return GradientModel(model=source, output=output, input=name)
