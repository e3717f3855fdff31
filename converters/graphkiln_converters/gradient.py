"""Forward and backward in one static graph: a model's answers, and the gradient of one with respect to an input.

The gradient is that of the sum of an output over all its elements; rows of a batch do not touch each other, so each row
gets its own. The exported graph comes from torch.export's joint graph; the reference is plain autograd on the module.
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
from graphkiln_backend.graph.spelling import did_you_mean
from graphkiln_converters.joint_graph import joint_module, plain_attention
from graphkiln_converters.proving import EXPORT_BATCH
from graphkiln_converters.pytorch import TorchModel, named_outputs
from graphkiln_converters.sources.base import InputSpec, SourceModel, synthetic_samples

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
            found = self._derive({**feeds, self.input: nudged(feeds[self.input], generator)})[1]
            changes.append(float((found - steady).norm() / steady.norm()))
        return max(changes)

    def _derive(self, feeds: Mapping[str, AnyArray]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors = {spec.name: torch.from_numpy(feeds[spec.name].copy()) for spec in self.inputs}
        tensors[self.input].requires_grad_()
        with plain_attention():
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
        feeds = synthetic_samples(self.inputs, 1, {}, seed=0)
        return list(self.model.run(feeds))

    def _joint(self) -> nn.Module:
        feeds = synthetic_samples(self.inputs, EXPORT_BATCH, {}, seed=0)
        example = {name: torch.from_numpy(array) for name, array in feeds.items()}
        example[self.input].requires_grad_()
        return joint_module(
            self.model.module,
            lambda module, inputs: self._answer(module, dict(zip(example, inputs, strict=True))),
            self.output,
            list(example.values()),
            parameters=False,
            what=self.model.description,
        )


def nudged(array: AnyArray, generator: np.random.Generator) -> AnyArray:
    """The array, changed by as little as fp32 can hardly tell at the end of a network."""
    return np.multiply(array, 1 + _NOISE * generator.standard_normal(array.shape).astype(np.float32))


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
    outputs = list(source.run(synthetic_samples(source.inputs, 1, {}, seed=0)))
    for word, known, kind in ((output, outputs, "output"), (name, list(inputs), "input")):
        if word not in known:
            raise ConversionError(f"--gradient {asked}: there is no {kind} '{word}'", hint=did_you_mean(word, known))
    if not inputs[name].dtype.is_float:
        raise ConversionError(f"--gradient {asked}: input '{name}' holds integers, which have no derivative")
    return GradientModel(model=source, output=output, input=name)
