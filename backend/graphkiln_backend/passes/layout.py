"""Images and feature maps in another layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import onnx_ir

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.passes.edge import Arrays, Edge
from graphkiln_backend.passes.splicing import append, prepend

NCHW_TO_NHWC, NHWC_TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


@dataclass(frozen=True)
class Nhwc:
    """Take and return images as `[batch, height, width, channels]`.

    Attributes:
        inputs: Whether inputs of rank 4 are transposed.
        outputs: Whether outputs of rank 4 are transposed.
    """

    inputs: bool
    outputs: bool
    name: str = "nhwc"
    summary: str = "images in and out as [batch, height, width, channels]"

    def requires(self, model: onnx_ir.Model) -> str:
        """A tensor of rank 4 at the edge."""
        ranks = [_rank(value) for value in (*model.graph.inputs, *model.graph.outputs)]
        return "" if 4 in ranks else "no input or output of rank 4"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Insert transposes at the edge; runtimes move them inwards."""
        inputs = [value for value in model.graph.inputs if self.inputs and _rank(value) == 4]
        outputs = [value for value in model.graph.outputs if self.outputs and _rank(value) == 4]
        input_names, output_names = ([str(value.name) for value in values] for values in (inputs, outputs))
        for value in inputs:
            shape = transposed_shape(value, NCHW_TO_NHWC)
            prepend(model, value, "Transpose", {"perm": NHWC_TO_NCHW}, shape=shape)
        for value in outputs:
            shape = transposed_shape(value, NCHW_TO_NHWC)
            append(model, value, "Transpose", {"perm": NCHW_TO_NHWC}, shape=shape)
        return Edge(
            to_graph_feeds=lambda feeds: _transpose(feeds, input_names, NCHW_TO_NHWC),
            to_source_feeds=lambda feeds: _transpose(feeds, input_names, NHWC_TO_NCHW),
            to_graph_outputs=lambda arrays: _transpose(arrays, output_names, NCHW_TO_NHWC),
            to_graph_preprocess=lambda spec: replace(spec, layout="HWC") if inputs else spec,
        )

    def ensures(self, model: onnx_ir.Model) -> str:  # noqa: ARG002 - by construction
        """Nothing."""
        return ""


def _transpose(arrays: Arrays, names: Iterable[str], perm: tuple[int, ...]) -> dict[str, AnyArray]:
    return {name: array.transpose(perm).copy() if name in names else array for name, array in arrays.items()}


def transposed_shape(value: onnx_ir.Value, perm: tuple[int, ...]) -> onnx_ir.Shape:
    """The shape of a value of rank 4 once its axes are permuted."""
    return onnx_ir.Shape([(value.shape or ())[axis] for axis in perm])


def _rank(value: onnx_ir.Value) -> int:
    return len(value.shape) if value.shape is not None else -1
