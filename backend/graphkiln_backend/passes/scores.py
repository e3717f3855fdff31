"""Postprocessing of a classifier's scores inside the graph: probabilities, or the best classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.passes.edge import Arrays, Edge
from graphkiln_backend.passes.splicing import append


@dataclass(frozen=True)
class Softmax:
    """Turn scores into probabilities, along the last axis of the first output."""

    name: str = "softmax"
    summary: str = "scores to probabilities"

    def requires(self, model: onnx_ir.Model) -> str:
        """A first output that is not one already."""
        producer = model.graph.outputs[0].producer()
        return "the output is a Softmax already" if producer is not None and producer.op_type == "Softmax" else ""

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Append a Softmax."""
        value = model.graph.outputs[0]
        name = str(value.name)
        append(model, value, "Softmax", {"axis": -1}, shape=value.shape)
        return Edge(
            to_graph_outputs=lambda outputs: {
                key: _softmax(array) if key == name else array for key, array in outputs.items()
            }
        )

    def ensures(self, model: onnx_ir.Model) -> str:  # noqa: ARG002 - by construction
        """Nothing."""
        return ""


@dataclass(frozen=True)
class TopK:
    """Return the k largest scores of the first output and their indices, instead of all scores.

    Attributes:
        k: How many.
        index_name: Name of the new output of indices, INT64 `[batch, k]`.
    """

    k: int
    index_name: str = "INDEX_0"
    name: str = "top-k"
    summary: str = "the k best scores and their indices"

    def requires(self, model: onnx_ir.Model) -> str:  # noqa: ARG002
        """Nothing."""
        return ""

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Replace the first output by two.

        Raises:
            ConversionError: It has fewer scores.
        """
        value = model.graph.outputs[0]
        name = str(value.name)
        classes = value.shape[-1] if value.shape else None
        if isinstance(classes, int) and classes < self.k:
            raise ConversionError(
                f"top-k {self.k}: the output {name} has {classes} scores", hint=f"choose at most {classes}: --top-k"
            )
        size = onnx_ir.Value(name=f"{name}_k", const_value=onnx_ir.tensor(np.array([self.k], np.int64)))
        model.graph.register_initializer(size)
        shape = onnx_ir.Shape([*list(value.shape or ())[:-1], self.k])
        top = append(model, value, "TopK", {"axis": -1}, shape=shape, constants=[size], outputs=2)
        indices = top.outputs[1]
        indices.name, indices.dtype, indices.shape = self.index_name, onnx_ir.DataType.INT64, shape
        model.graph.outputs.insert(1, indices)
        return Edge(
            to_graph_outputs=lambda outputs: self._rank(outputs, name),
            ranking=Ranking(scores=name, indices=self.index_name),
        )

    def ensures(self, model: onnx_ir.Model) -> str:  # noqa: ARG002 - by construction
        """Nothing."""
        return ""

    def _rank(self, outputs: Arrays, name: str) -> dict[str, AnyArray]:
        """The best of an output and where they were, in its place; of equal scores the first, as ONNX says."""
        if name not in outputs:
            return dict(outputs)
        scores = outputs[name]
        order = np.argsort(-scores, axis=-1, kind="stable")[..., : self.k]
        ranked = {name: np.take_along_axis(scores, order, axis=-1), self.index_name: order.astype(np.int64)}
        return {**ranked, **{other: array for other, array in outputs.items() if other != name}}


def _softmax(scores: AnyArray) -> AnyArray:
    exponents = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    probabilities: AnyArray = (exponents / exponents.sum(axis=-1, keepdims=True)).astype(scores.dtype)
    return probabilities
