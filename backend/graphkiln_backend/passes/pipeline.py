"""Pass pipeline: the passes of a conversion in order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.passes.base import Pass
from graphkiln_backend.passes.constants import ShareWeights
from graphkiln_backend.passes.edge_passes import EmbedPreprocess, Nhwc, PruneOutputs, Rename, Softmax, TopK
from graphkiln_backend.passes.folding import FoldConstants
from graphkiln_backend.passes.fusions import AddIntoProducer, CleanUp, FoldBatchNorm, FuseLayerNorm, PadIntoConv

# Passes that run by default. None changes an output.
OPTIMIZATIONS: tuple[Pass, ...] = (
    FoldConstants(),
    CleanUp(),
    FuseLayerNorm(),
    FoldBatchNorm(),
    PadIntoConv(),
    AddIntoProducer(),
    ShareWeights(),
)


def edge_passes(
    model: onnx_ir.Model,
    *,
    outputs: tuple[str, ...] = (),
    keep_names: bool = False,
    preprocess: Preprocess | None = None,
    softmax: bool = False,
    top_k: int = 0,
    nhwc: bool = False,
) -> tuple[Pass, ...]:
    """Return the requested passes that change inputs and outputs.

    Args:
        model: The graph, with the names of its source.
        outputs: Outputs to keep; empty for all.
        keep_names: Keep the source's names instead of `INPUT_<i>` and `OUTPUT_<i>`, except those that Triton cannot
            hold.
        preprocess: Normalization to embed, or None to leave it to the client.
        softmax: Return probabilities.
        top_k: Number of best scores to return with their indices; 0 for all scores.
        nhwc: Convert images and feature maps to `[batch, height, width, channels]`.
    """
    passes: list[Pass] = []
    names = [str(value.name) for value in model.graph.outputs]
    if outputs:
        passes.append(PruneOutputs(outputs))
        names = [name for name in names if name in outputs]
    of_inputs = [str(value.name) for value in model.graph.inputs]
    taken = (*of_inputs, *names) if keep_names else ()
    rename = Rename(
        _new_names(of_inputs, "INPUT", () if keep_names else of_inputs, taken),
        # An output with the name of an input is the same value in the graph, and would be two tensors in a request.
        _new_names(names, "OUTPUT", of_inputs if keep_names else names, taken),
    )
    if rename.inputs or rename.outputs:
        passes.append(rename)
    if softmax:
        passes.append(Softmax())
    if top_k:
        passes.append(TopK(top_k))
    if preprocess:
        passes.append(EmbedPreprocess(preprocess))
    if nhwc:
        passes.append(Nhwc(inputs=preprocess is None, outputs=True))
    return tuple(passes)


def _new_names(names: Sequence[str], prefix: str, replaced: Collection[str], taken: Collection[str]) -> dict[str, str]:
    """Number tensors: those whose names are replaced, and those with characters that end a name in Triton.

    Args:
        names: Names of the inputs, or of the outputs.
        prefix: Prefix of the new names.
        replaced: Names that are not kept.
        taken: Names that no tensor may get.
    """
    new: dict[str, str] = {}
    for number, name in enumerate(names):
        if name in replaced or not name.isprintable():
            new[name] = f"{prefix}_{number}"
            while new[name] in taken:
                new[name] += "_"
    return new


def without(passes: Sequence[Pass], skipped: Sequence[str]) -> tuple[Pass, ...]:
    """Remove passes by name.

    Raises:
        ConversionError: No pass has the name.
    """
    names = [graph_pass.name for graph_pass in passes]
    for name in skipped:
        if name not in names:
            raise ConversionError(f"there is no pass '{name}' to skip", hint=did_you_mean(name, names))
    return tuple(graph_pass for graph_pass in passes if graph_pass.name not in skipped)


def catalog() -> tuple[tuple[Pass, str], ...]:
    """Return every pass with the condition under which it runs, in order, for `graphkiln convert --explain`."""
    return (
        *((graph_pass, "always") for graph_pass in OPTIMIZATIONS),
        (PruneOutputs(()), "--outputs"),
        (Rename(), "--no-keep-names, and for PyTorch models with one input"),
        (Softmax(), "--softmax"),
        (TopK(1), "--top-k"),
        (EmbedPreprocess(Preprocess()), "--input uint8-nhwc"),
        (Nhwc(inputs=True, outputs=True), "--layout nhwc"),
    )
