"""All passes, for `graphkiln convert --explain`."""

from __future__ import annotations

from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.passes.base import Pass
from graphkiln_backend.passes.input_embedding import EmbedPreprocess
from graphkiln_backend.passes.layout import Nhwc
from graphkiln_backend.passes.outputs import PruneOutputs
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS
from graphkiln_backend.passes.renaming import Rename
from graphkiln_backend.passes.scores import Softmax, TopK


def catalog() -> tuple[tuple[Pass, str], ...]:
    """Every pass in the order in which they run, and when it does."""
    return (
        *((graph_pass, "always") for graph_pass in OPTIMIZATIONS),
        (PruneOutputs(()), "--outputs"),
        (Rename(), "without --keep-names"),
        (Softmax(), "--softmax"),
        (TopK(1), "--top-k"),
        (EmbedPreprocess(Preprocess()), "--input uint8-nhwc"),
        (Nhwc(inputs=True, outputs=True), "--layout nhwc"),
    )
