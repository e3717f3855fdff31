"""All passes, for people who want to know what there is."""

from __future__ import annotations

from graphkiln.graph.preprocess import Preprocess
from graphkiln.passes.base import Pass
from graphkiln.passes.edges import Nhwc, Rename, Softmax, TopK
from graphkiln.passes.input_embedding import EmbedPreprocess
from graphkiln.passes.outputs import PruneOutputs
from graphkiln.passes.pipeline import OPTIMISATIONS


def catalogue() -> tuple[tuple[Pass, str], ...]:
    """Every pass in the order in which they run, and when it does."""
    return (
        *((each, "always") for each in OPTIMISATIONS),
        (PruneOutputs(()), "--outputs"),
        (Rename(), "without --keep-names"),
        (Softmax(), "--softmax"),
        (TopK(1), "--top-k"),
        (EmbedPreprocess(Preprocess()), "--input uint8-nhwc"),
        (Nhwc(inputs=True, outputs=True), "--layout nhwc"),
    )
