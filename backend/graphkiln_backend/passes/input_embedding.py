"""Input embedding: raw image bytes go in, cast, normalization and layout happen inside the graph.

A quarter of the bytes on the wire, and no arithmetic in the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.passes.edges import prepend

_NHWC_TO_NCHW = (0, 3, 1, 2)


@dataclass(frozen=True)
class EmbedPreprocess:
    """Takes uint8 `[batch, height, width, channels]` pixels instead of normalized `[batch, channels, height, width]`.

    Attributes:
        preprocess: What the graph asks of its client so far.
    """

    preprocess: Preprocess
    name: str = "input-uint8-nhwc"
    summary: str = "raw image bytes in; cast, normalize and layout inside"

    @property
    def remaining(self) -> Preprocess:
        """What is left for the client: geometry and color."""
        return replace(self.preprocess, mean=(), std=(), layout="HWC", dtype=DType.UINT8)

    def requires(self, model: onnx_ir.Model) -> str:
        """One input, of rank 4 and floating-point."""
        value = model.graph.inputs[0]
        fits = len(model.graph.inputs) == 1 and value.shape is not None and len(value.shape) == 4
        return "" if fits and value.dtype == onnx_ir.DataType.FLOAT else "the input is no FP32 image"

    def __call__(self, model: onnx_ir.Model) -> None:
        """Cast, subtract 255 * mean, divide by 255 * std, transpose."""
        value = model.graph.inputs[0]
        if self.preprocess.layout == "CHW":
            sizes = list(value.shape or ())
            shape = onnx_ir.Shape([sizes[0], sizes[2], sizes[3], sizes[1]])
            prepend(model, value, "Transpose", {"perm": _NHWC_TO_NCHW}, shape=shape)
        for op_type, factors in (("Div", self._scale()), ("Sub", self._shift())):
            node = prepend(model, model.graph.inputs[0], op_type, {}, shape=model.graph.inputs[0].shape)
            constant = onnx_ir.Value(name=f"{op_type.lower()}_pixels", const_value=onnx_ir.tensor(factors))
            model.graph.register_initializer(constant)
            node.resize_inputs(2)
            node.replace_input_with(1, constant)
        value = model.graph.inputs[0]
        cast = {"to": onnx_ir.DataType.FLOAT}
        prepend(model, value, "Cast", cast, shape=value.shape, dtype=onnx_ir.DataType.UINT8)

    def ensures(self, model: onnx_ir.Model) -> str:
        """The input takes bytes."""
        return "" if model.graph.inputs[0].dtype == onnx_ir.DataType.UINT8 else "the input does not take bytes"

    def to_source(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """The client's own normalization, image by image."""
        return {
            name: np.stack([self.preprocess.normalize(image.astype(np.uint8)) for image in images])
            for name, images in feeds.items()
        }

    def from_source(self, outputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """The same."""
        return dict(outputs)

    def _scale(self) -> AnyArray:
        return np.asarray(self.preprocess.std or (1.0,) * self.preprocess.channels, np.float32) * np.float32(255)

    def _shift(self) -> AnyArray:
        return np.asarray(self.preprocess.mean or (0.0,) * self.preprocess.channels, np.float32) * np.float32(255)
