"""Which passes a graph goes through, in order."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.spelling import did_you_mean
from graphkiln_backend.passes.addition import AddIntoProducer
from graphkiln_backend.passes.base import Pass
from graphkiln_backend.passes.batch_norm import FoldBatchNorm
from graphkiln_backend.passes.cleanup import CleanUp
from graphkiln_backend.passes.constants import FoldConstants, ShareWeights
from graphkiln_backend.passes.input_embedding import EmbedPreprocess
from graphkiln_backend.passes.layer_norm import FuseLayerNorm
from graphkiln_backend.passes.layout import Nhwc
from graphkiln_backend.passes.outputs import PruneOutputs
from graphkiln_backend.passes.padding import PadIntoConv
from graphkiln_backend.passes.renaming import Rename
from graphkiln_backend.passes.scores import Softmax, TopK

OPTIMIZATIONS: tuple[Pass, ...] = (
    FoldConstants(),
    CleanUp(),
    FuseLayerNorm(),
    FoldBatchNorm(),
    PadIntoConv(),
    AddIntoProducer(),
    ShareWeights(),
)
"""Always run, unless they are skipped; none changes an output."""


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
    """The passes that change what goes in and comes out, as requested.

    Args:
        model: The graph, with the source's names.
        outputs: Outputs to keep; empty for all.
        keep_names: Keep the source's names instead of `INPUT_<i>` and `OUTPUT_<i>`.
        preprocess: Embed this normalization; None to leave it to the client.
        softmax: Return probabilities.
        top_k: Return so many best scores and their indices; 0 for all scores.
        nhwc: Take images and return feature maps as `[batch, height, width, channels]`.
    """
    passes: list[Pass] = []
    names = [str(value.name) for value in model.graph.outputs]
    if outputs:
        passes.append(PruneOutputs(outputs))
        names = [name for name in names if name in outputs]
    if not keep_names:
        inputs = {str(value.name): f"INPUT_{number}" for number, value in enumerate(model.graph.inputs)}
        passes.append(Rename(inputs, {name: f"OUTPUT_{number}" for number, name in enumerate(names)}))
    if softmax:
        passes.append(Softmax())
    if top_k:
        passes.append(TopK(top_k))
    if preprocess:
        passes.append(EmbedPreprocess(preprocess))
    if nhwc:
        passes.append(Nhwc(inputs=preprocess is None, outputs=True))
    return tuple(passes)


def without(passes: Sequence[Pass], skipped: Sequence[str]) -> tuple[Pass, ...]:
    """Leaves passes out by name.

    Raises:
        ConversionError: There is no such pass.
    """
    names = [graph_pass.name for graph_pass in passes]
    for name in skipped:
        if name not in names:
            raise ConversionError(f"there is no pass '{name}' to skip", hint=did_you_mean(name, names))
    return tuple(graph_pass for graph_pass in passes if graph_pass.name not in skipped)
