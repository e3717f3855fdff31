"""Input embedding: raw image bytes go in; cast, normalization and layout happen inside the graph.

A quarter of the bytes on the wire, and no arithmetic in the client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.passes.layout import NCHW_TO_NHWC, NHWC_TO_NCHW, transposed_shape
from graphkiln_backend.passes.splicing import prepend


@dataclass(frozen=True)
class EmbedPreprocess:
    """Take uint8 `[batch, height, width, channels]` pixels instead of normalized `[batch, channels, height, width]`.

    Attributes:
        preprocess: How an image becomes the input before the pass.
    """

    preprocess: Preprocess
    name: str = "input-uint8-nhwc"
    summary: str = "raw image bytes in; cast, normalize and layout inside"

    def requires(self, model: onnx_ir.Model) -> str:
        """One input, of rank 4 and floating-point; and no padding that pixels cannot hold."""
        letterbox = self.preprocess.letterbox
        if letterbox and letterbox.padding is None and self.preprocess.mean:
            return "the letterbox pads with zeros after the normalization, which are no pixels"
        value = model.graph.inputs[0]
        fits = len(model.graph.inputs) == 1 and value.shape is not None and len(value.shape) == 4
        return "" if fits and value.dtype == onnx_ir.DataType.FLOAT else "the input is no FP32 image"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Cast, transpose, subtract 255 * mean, divide by 255 * std.

        Transposed first: a channel then lies in one piece. Pixel by pixel, ONNX Runtime computes in strides of three
        numbers: with 224 by 224 pixels, MobileNetV3 took a third more of the processor. The cast comes before it:
        TensorRT does nothing else with bytes.
        """
        is_chw = self.preprocess.layout == "CHW"
        for op_type, factors in (("Div", self._scale()), ("Sub", self._shift())):
            node = prepend(model, model.graph.inputs[0], op_type, {}, shape=model.graph.inputs[0].shape)
            arranged = factors.reshape(-1, 1, 1) if is_chw else factors
            constant = onnx_ir.Value(name=f"{op_type.lower()}_pixels", const_value=onnx_ir.tensor(arranged))
            model.graph.register_initializer(constant)
            node.resize_inputs(2)
            node.replace_input_with(1, constant)
        if is_chw:
            value = model.graph.inputs[0]
            pixels = transposed_shape(value, NCHW_TO_NHWC)
            prepend(model, value, "Transpose", {"perm": NHWC_TO_NCHW}, shape=pixels)
        value = model.graph.inputs[0]
        cast = {"to": onnx_ir.DataType.FLOAT}
        prepend(model, value, "Cast", cast, shape=value.shape, dtype=onnx_ir.DataType.UINT8)
        return Edge(
            to_graph_feeds=lambda feeds: {name: self._pixels(samples) for name, samples in feeds.items()},
            to_source_feeds=lambda feeds: {name: self._normalized(images) for name, images in feeds.items()},
            to_graph_preprocess=_geometry,
        )

    def ensures(self, model: onnx_ir.Model) -> str:
        """The input takes bytes."""
        return "" if model.graph.inputs[0].dtype == onnx_ir.DataType.UINT8 else "the input does not take bytes"

    def _normalized(self, images: AnyArray) -> AnyArray:
        """Compute the client's preprocessing, image by image."""
        return np.stack([self.preprocess.normalize(image.astype(np.uint8)) for image in images])

    def _pixels(self, samples: AnyArray) -> AnyArray:
        """The nearest pixels to samples that were normalized, or made at random."""
        arranged = samples.transpose(NCHW_TO_NHWC) if self.preprocess.layout == "CHW" else samples
        pixels: AnyArray = np.add(np.multiply(arranged, self._scale()), self._shift())
        return pixels.round().clip(0, 255).astype(np.uint8)

    def _scale(self) -> AnyArray:
        return np.asarray(self.preprocess.std or (1.0,) * self.preprocess.channels, np.float32) * np.float32(255)

    def _shift(self) -> AnyArray:
        return np.asarray(self.preprocess.mean or (0.0,) * self.preprocess.channels, np.float32) * np.float32(255)


def _geometry(preprocess: Preprocess) -> Preprocess:
    """Return the part that is left for the client: sizes and colors."""
    return replace(preprocess, mean=(), std=(), layout="HWC", dtype=DType.UINT8)
