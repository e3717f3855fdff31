"""All passes, for people who want to know what there is."""

from __future__ import annotations

from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.passes.base import Pass
from graphkiln_backend.passes.edges import Nhwc, Rename, Softmax, TopK
from graphkiln_backend.passes.input_embedding import EmbedPreprocess
from graphkiln_backend.passes.outputs import PruneOutputs
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS


def catalog() -> tuple[tuple[Pass, str], ...]:
    """Every pass in the order in which they run, and when it does."""
    return (
        *((each, "always") for each in OPTIMIZATIONS),
        (PruneOutputs(()), "--outputs"),
        (Rename(), "without --keep-names"),
        (Softmax(), "--softmax"),
        (TopK(1), "--top-k"),
        (EmbedPreprocess(Preprocess()), "--input uint8-nhwc"),
        (Nhwc(inputs=True, outputs=True), "--layout nhwc"),
    )
