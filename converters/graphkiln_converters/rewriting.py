"""Runs the passes that a recipe requests."""

from __future__ import annotations

import onnx_ir

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.passes.base import Pass, Rewritten, run_passes
from graphkiln_backend.passes.input_embedding import EmbedPreprocess
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS, edge_passes, without
from graphkiln_converters.recipe import Recipe


def rewrite(model: onnx_ir.Model, recipe: Recipe, preprocess: Preprocess | None) -> Rewritten:
    """Rewrites an exported graph in place, as the recipe says.

    Args:
        model: The graph, with the source's names.
        recipe: What the graph takes and returns, and which passes are skipped.
        preprocess: How an image becomes the source's input, or None.

    Raises:
        ConversionError: A pass to skip does not exist, a pass failed, or the graph takes no image to embed the
            preprocessing of.
    """
    rewritten = run_passes(model, _passes(model, recipe, preprocess))
    for report in rewritten.reports:
        if report.name == EmbedPreprocess.name and not report.ran:
            raise ConversionError(
                f"--input {recipe.input}: {report.note}", hint="it is for models with one FP32 image as their input"
            )
    return rewritten


def _passes(model: onnx_ir.Model, recipe: Recipe, preprocess: Preprocess | None) -> tuple[Pass, ...]:
    embedded = recipe.input != "source"
    if embedded and preprocess is None:
        raise ConversionError(
            f"--input {recipe.input}: it is not known how an image becomes the input",
            hint='give --preprocess \'{"mean": [...], "std": [...]}\'',
        )
    at_edge = edge_passes(
        model,
        outputs=recipe.outputs,
        keep_names=recipe.keep_names,
        preprocess=preprocess if embedded else None,
        softmax=recipe.softmax,
        top_k=recipe.top_k,
        nhwc=recipe.layout == "nhwc",
    )
    return without((*OPTIMIZATIONS, *at_edge), recipe.skip)
