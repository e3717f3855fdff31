"""A training step, eager and as one static graph: a model's answers, and the gradients of one by every parameter.

Nobody serves such a graph. It is where the acceleration story begins: the work that a team did in PyTorch, and saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir
import torch
from torch import nn

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_converters.joint_graph import joint_module
from graphkiln_converters.pytorch import TorchModel, named_outputs
from graphkiln_converters.sources.base import synthetic_samples

_BATCH = 1
"""The work is done image by image; gradients by parameters would be sums over a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStep:
    """Forward and backward of a model with one input.

    Attributes:
        model: The model; its first answer is summed up and derived.
    """

    model: TorchModel

    def run(self, feeds: Mapping[str, AnyArray]) -> tuple[dict[str, AnyArray], dict[str, AnyArray]]:
        """The reference, by autograd: answers by name, and gradients by the parameter's name."""
        module = self.model.module.requires_grad_(requires_grad=True)
        try:
            answers = _answer(module, [torch.from_numpy(feeds[spec.name]) for spec in self.model.inputs])
            module.zero_grad()
            next(iter(answers.values())).sum().backward()  # type: ignore[no-untyped-call]
            derived = {
                name: parameter.grad.numpy()
                for name, parameter in module.named_parameters()
                if parameter.grad is not None
            }
            module.zero_grad()
        finally:
            module.requires_grad_(requires_grad=False)
        return {name: tensor.detach().numpy() for name, tensor in answers.items()}, derived

    def repeat(self, feeds: Mapping[str, AnyArray], *, by_input: bool = False) -> None:
        """The work as a team found it: forward, backward by every parameter, a second forward; nothing is answered.

        On the GPU where PyTorch has one.

        Args:
            feeds: The inputs.
            by_input: Whether the gradient by the inputs is made, too.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        module = self.model.module.to(device).requires_grad_(requires_grad=True)
        inputs = [torch.from_numpy(feeds[spec.name]).to(device) for spec in self.model.inputs]
        for tensor in inputs:
            tensor.requires_grad_(by_input)
        module.zero_grad()
        next(iter(_answer(module, inputs).values())).sum().backward()  # type: ignore[no-untyped-call]
        for answer in _answer(module, inputs).values():
            answer.detach().cpu()  # waits for it

    def export(self) -> tuple[onnx_ir.Model, tuple[str, ...]]:
        """The graph for one sample, and the names of the parameters whose gradients are its last outputs, in order.

        Raises:
            ConversionError: The joint graph cannot be made.
        """
        example = synthetic_samples(self.model.inputs, _BATCH, {}, seed=0)
        names = tuple(self.model.run(example))
        joint = joint_module(
            self.model.module,
            _answer,
            names[0],
            [torch.from_numpy(array) for array in example.values()],
            parameters=True,
            what=self.model.description,
        )
        returns = (*names, *(f"{name}_gradient" for name in joint.parameters_derived))
        graph = replace(self.model, module=joint, keywords=False, returns=returns).export_fixed(_BATCH)
        return graph, tuple(joint.parameters_derived)


def _answer(module: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return named_outputs(module(*inputs))
