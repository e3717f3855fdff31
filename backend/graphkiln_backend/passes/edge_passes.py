"""Passes that change a graph's inputs and outputs: selection, names, layout, preprocessing, softmax and top-k."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir
from onnx_ir.passes.common import OutputFixPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, LoweringError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.passes.base import Pass
from graphkiln_backend.passes.edge import Arrays, Edge
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.splicing import append, free_name, inner_values, prepend

NCHW_TO_NHWC, NHWC_TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


@dataclass(frozen=True)
class PruneOutputs(Pass):
    """Remove outputs, and the nodes that only they depend on.

    Attributes:
        outputs: Names of outputs to keep.
    """

    outputs: tuple[str, ...]
    name = "prune-outputs"
    summary = "outputs that are not requested, and what only they need"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph whose outputs are all kept.

        Raises:
            ConversionError: An output to keep does not exist.
        """
        known = [str(value.name) for value in model.graph.outputs]
        for name in self.outputs:
            if name not in known:
                raise ConversionError(f"the graph has no output '{name}'", hint=did_you_mean(name, known))
        return "" if len(self.outputs) < len(known) else "all outputs are kept"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Remove the outputs; inputs stay even if they become unused."""
        kept = [value for value in model.graph.outputs if value.name in self.outputs]
        model.graph.outputs.clear()
        model.graph.outputs.extend(kept)
        names = frozenset(str(value.name) for value in kept)
        return Edge(
            to_graph_outputs=lambda outputs: {name: array for name, array in outputs.items() if name in names},
            kept=names,
        )


def keep_outputs(graph_path: Path, outputs: Collection[str], target: Path) -> float:
    """Write a graph that computes only some outputs.

    Args:
        graph_path: The graph.
        outputs: Names of outputs to keep.
        target: File to write. Weights may be written beside it, so its folder must not contain another graph.

    Returns:
        Fraction of nodes removed.

    Raises:
        LoweringError: The graph cannot be read, or lacks one of the outputs.
    """
    try:
        model = onnx_ir.load(graph_path)
    except Exception as error:
        raise LoweringError(f"cannot read {graph_path}", attempts=(str(error),)) from error
    prune = PruneOutputs(tuple(outputs))
    try:
        prune.why_skip(model)
    except ConversionError as error:
        raise LoweringError(f"cannot cut {graph_path}", attempts=(str(error),)) from error
    before = model.graph.num_nodes()
    prune(model)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    save(model, target)
    return 1 - model.graph.num_nodes() / before


@dataclass(frozen=True)
class Rename(Pass):
    """Rename inputs and outputs.

    Attributes:
        inputs: Old name -> new name.
        outputs: Old name -> new name.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    name = "rename"
    summary = "inputs to INPUT_<i>, outputs to OUTPUT_<i>, where their names are not kept"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph whose names are the new ones already."""
        values = (*model.graph.inputs, *model.graph.outputs)
        new = {**self.inputs, **self.outputs}
        return "" if any(new.get(str(value.name), value.name) != value.name for value in values) else "named so already"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Rename inputs and outputs; an inner value with one of the new names gets another."""
        input_names = [self.inputs.get(str(value.name), str(value.name)) for value in model.graph.inputs]
        output_names = [self.outputs.get(str(value.name), str(value.name)) for value in model.graph.outputs]
        OutputFixPass()(model)  # splits an input that is also an output into two values, and renames the input
        at_edge = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)}
        taken = {*input_names, *output_names}
        for value in list(inner_values(model.graph)):
            if id(value) not in at_edge and value.name in taken:
                value.name = free_name(model.graph, f"{value.name}_inner", taken)
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

    def remark(self, model: onnx_ir.Model) -> str:
        """Report inputs and outputs without the new names."""
        found = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
        missing = {*self.inputs.values(), *self.outputs.values()} - found
        return f"missing: {', '.join(sorted(missing))}" if missing else ""


@dataclass(frozen=True)
class Nhwc(Pass):
    """Convert image inputs and outputs to `[batch, height, width, channels]`.

    Attributes:
        inputs: Transpose inputs of rank 4.
        outputs: Transpose outputs of rank 4.
    """

    inputs: bool
    outputs: bool
    name = "nhwc"
    summary = "images in and out as [batch, height, width, channels]"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph without an input or output of rank 4."""
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


def _transpose(arrays: Arrays, names: Iterable[str], perm: tuple[int, ...]) -> dict[str, AnyArray]:
    return {name: array.transpose(perm).copy() if name in names else array for name, array in arrays.items()}


def transposed_shape(value: onnx_ir.Value, perm: tuple[int, ...]) -> onnx_ir.Shape:
    """Return the permuted shape of a value of rank 4."""
    return onnx_ir.Shape([(value.shape or ())[axis] for axis in perm])


def _rank(value: onnx_ir.Value) -> int:
    return len(value.shape) if value.shape is not None else -1


@dataclass(frozen=True)
class EmbedPreprocess(Pass):
    """Take uint8 `[batch, height, width, channels]` pixels instead of normalized `[batch, channels, height, width]`.

    A quarter of the bytes on the wire, and no arithmetic in the client.

    Attributes:
        preprocess: Preprocessing for the input before the pass.
    """

    preprocess: Preprocess
    name = "input-uint8-nhwc"
    summary = "raw image bytes in; cast, normalize and layout inside"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph unless its only input is an FP32 image and the padding can be expressed in pixels."""
        letterbox = self.preprocess.letterbox
        if letterbox and letterbox.padding is None and self.preprocess.mean:
            return "the letterbox pads after the normalization, with values that pixels cannot express"
        value = model.graph.inputs[0]
        fits = len(model.graph.inputs) == 1 and value.shape is not None and len(value.shape) == 4
        return "" if fits and value.dtype == onnx_ir.DataType.FLOAT else "the input is not an FP32 image"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Cast, subtract 255 * mean, divide by 255 * std, transpose.

        The cast comes first because it is the only operation that TensorRT supports on uint8.
        """
        is_chw = self.preprocess.layout == "CHW"
        pixels = model.graph.inputs[0].shape or onnx_ir.Shape([])
        width = pixels[3 if is_chw else 2]
        # Constants of a whole row of pixels, because ONNX Runtime is slow if it repeats three numbers: int8 ResNet-50
        # took 7% longer. Without a fixed width, the arithmetic follows the transpose, channel by channel (in int8
        # graphs, ONNX Runtime moves the transpose behind it again). Nodes are inserted from the last to the first.
        in_rows = isinstance(width, int)
        if is_chw and in_rows:
            self._transpose_pixels(model)
        for op_type, factors in (("Div", self._scale()), ("Sub", self._shift())):
            value = model.graph.inputs[0]
            node = prepend(model, value, op_type, {}, shape=value.shape)
            planes = factors.reshape(-1, 1, 1) if is_chw else factors
            arranged = np.tile(factors, (width, 1)) if isinstance(width, int) else planes
            name = free_name(model.graph, f"{op_type.lower()}_pixels")
            constant = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(arranged))
            model.graph.register_initializer(constant)
            node.resize_inputs(2)
            node.replace_input_with(1, constant)
        if is_chw and not in_rows:
            self._transpose_pixels(model)
        value = model.graph.inputs[0]
        cast = {"to": onnx_ir.DataType.FLOAT}
        prepend(model, value, "Cast", cast, shape=value.shape, dtype=onnx_ir.DataType.UINT8)
        return Edge(
            to_graph_feeds=lambda feeds: {name: self._pixels(samples) for name, samples in feeds.items()},
            to_source_feeds=lambda feeds: {
                name: np.stack([self.preprocess.normalize(image.astype(np.uint8)) for image in images])
                for name, images in feeds.items()
            },
            to_graph_preprocess=_geometry,
        )

    def _transpose_pixels(self, model: onnx_ir.Model) -> None:
        value = model.graph.inputs[0]
        prepend(model, value, "Transpose", {"perm": NHWC_TO_NCHW}, shape=transposed_shape(value, NCHW_TO_NHWC))

    def remark(self, model: onnx_ir.Model) -> str:
        """Report an input that is not uint8."""
        return "" if model.graph.inputs[0].dtype == onnx_ir.DataType.UINT8 else "the input is not uint8"

    def _pixels(self, samples: AnyArray) -> AnyArray:
        """Return the uint8 pixels nearest to normalized samples."""
        arranged = samples.transpose(NCHW_TO_NHWC) if self.preprocess.layout == "CHW" else samples
        pixels: AnyArray = np.add(np.multiply(arranged, self._scale()), self._shift())
        return pixels.round().clip(0, 255).astype(np.uint8)

    def _scale(self) -> AnyArray:
        return np.asarray(self.preprocess.std or (1.0,) * self.preprocess.channels, np.float32) * np.float32(255)

    def _shift(self) -> AnyArray:
        return np.asarray(self.preprocess.mean or (0.0,) * self.preprocess.channels, np.float32) * np.float32(255)


def _geometry(preprocess: Preprocess) -> Preprocess:
    """Return the part of the preprocessing that stays in the client: sizes and colors."""
    return replace(preprocess, mean=(), std=(), layout="HWC", dtype=DType.UINT8)


@dataclass(frozen=True)
class Softmax(Pass):
    """Append a Softmax along the last axis of the first output."""

    name = "softmax"
    summary = "scores to probabilities"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph whose first output already is a Softmax."""
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


@dataclass(frozen=True)
class TopK(Pass):
    """Return the k largest scores of the first output and their indices, instead of all scores.

    Attributes:
        k: Number of scores.
        index_name: Name of the index output, INT64 `[batch, k]`, unless the graph has it.
    """

    k: int
    index_name: str = "INDEX_0"
    name = "top-k"
    summary = "the k best scores and their indices"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Replace the first output with scores and indices.

        Raises:
            ConversionError: The output has fewer than k scores.
        """
        value = model.graph.outputs[0]
        name = str(value.name)
        classes = value.shape[-1] if value.shape else None
        if isinstance(classes, int) and classes < self.k:
            raise ConversionError(
                f"top-k {self.k}: the output {name} has {classes} scores", hint=f"choose at most {classes}: --top-k"
            )
        index_name = free_name(model.graph, self.index_name)
        size = onnx_ir.Value(
            name=free_name(model.graph, f"{name}_k"), const_value=onnx_ir.tensor(np.array([self.k], np.int64))
        )
        model.graph.register_initializer(size)
        shape = onnx_ir.Shape([*list(value.shape or ())[:-1], self.k])
        top = append(model, value, "TopK", {"axis": -1}, shape=shape, constants=[size], outputs=2)
        indices = top.outputs[1]
        indices.name, indices.dtype, indices.shape = index_name, onnx_ir.DataType.INT64, shape
        model.graph.outputs.insert(1, indices)
        return Edge(
            to_graph_outputs=lambda outputs: self._rank(outputs, name, index_name),
            ranking=Ranking(scores=name, indices=index_name),
        )

    def _rank(self, outputs: Arrays, name: str, index_name: str) -> dict[str, AnyArray]:
        """Replace an output with its top k and their indices; ties go to the lower index, as in ONNX's TopK."""
        if name not in outputs:
            return dict(outputs)
        scores = outputs[name]
        order = np.argsort(-scores, axis=-1, kind="stable")[..., : self.k]
        ranked = {name: np.take_along_axis(scores, order, axis=-1), index_name: order.astype(np.int64)}
        return {**ranked, **{other: array for other, array in outputs.items() if other != name}}


def _softmax(scores: AnyArray) -> AnyArray:
    exponents = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    probabilities: AnyArray = (exponents / exponents.sum(axis=-1, keepdims=True)).astype(scores.dtype)
    return probabilities
