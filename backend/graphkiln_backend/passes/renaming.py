"""Inputs and outputs by other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir
from onnx_ir.passes.common import OutputFixPass

from graphkiln_backend.passes.edge import Edge


@dataclass(frozen=True)
class Rename:
    """Rename inputs and outputs.

    Attributes:
        inputs: Old name -> new name.
        outputs: Old name -> new name.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    name: str = "rename"
    summary: str = "inputs to INPUT_<i>, outputs to OUTPUT_<i>"

    def requires(self, model: onnx_ir.Model) -> str:
        """A name that changes."""
        values = (*model.graph.inputs, *model.graph.outputs)
        new = {**self.inputs, **self.outputs}
        return "" if any(new.get(str(value.name), value.name) != value.name for value in values) else "named so already"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Inner values that have one of the new names get another one."""
        input_names = [self.inputs.get(str(value.name), str(value.name)) for value in model.graph.inputs]
        output_names = [self.outputs.get(str(value.name), str(value.name)) for value in model.graph.outputs]
        OutputFixPass()(model)  # an input that is an output, too, becomes two values; it renames the input
        at_edge = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)}
        taken = {*input_names, *output_names}
        for node in model.graph:
            for value in node.outputs:
                if id(value) not in at_edge and value.name in taken:
                    value.name = f"{value.name}_inner"
        for values, names in ((model.graph.inputs, input_names), (model.graph.outputs, output_names)):
            for value, name in zip(values, names, strict=True):
                value.name = name
        sources = {new: old for old, new in self.inputs.items()}
        return Edge(
            to_graph_feeds=lambda feeds: {self.inputs.get(name, name): array for name, array in feeds.items()},
            to_source_feeds=lambda feeds: {sources.get(name, name): array for name, array in feeds.items()},
            to_graph_outputs=lambda outputs: {self.outputs.get(name, name): array for name, array in outputs.items()},
            inputs=self.inputs,
            outputs=self.outputs,
        )

    def ensures(self, model: onnx_ir.Model) -> str:
        """Every new name is there."""
        found = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
        missing = {*self.inputs.values(), *self.outputs.values()} - found
        return f"missing: {', '.join(sorted(missing))}" if missing else ""
