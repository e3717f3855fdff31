"""From a source model to a version that is proven to compute the same, or to nothing."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_ir

from graphkiln_backend.graph.errors import UndecidedError, VerificationError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.base import Rewritten
from graphkiln_backend.passes.rounding import Rounding
from graphkiln_backend.proof.policy import Limits, export_limits, fp64_may_tell, limits_beside_fp64
from graphkiln_backend.repository.version import GRAPH_FILE
from graphkiln_converters.given_files import check_given_files
from graphkiln_converters.kernels import save_runnable
from graphkiln_converters.opening import OpenModel, open_model
from graphkiln_converters.precision import check_lowers, check_quantizer, loosened, lower_and_prove
from graphkiln_converters.proving import ProvenGraph, ReferenceSamples, other_batch_sizes, prove_graph
from graphkiln_converters.publishing import (
    check_edges,
    new_version,
    notes_of,
    remaining_preprocess,
    warn_without_preprocess,
    with_fitting_labels,
)
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.remote_source import local_source
from graphkiln_converters.rewriting import rewrite
from graphkiln_converters.sampling import Sampler, recorded_samples
from graphkiln_converters.sources.base import EXPORT_BATCH, FixedBatchSource
from graphkiln_converters.tasks import with_task
from graphkiln_converters.version_number import check_free
from graphkiln_converters.writer import check_name, write_next_version, write_version

_log = logging.getLogger("graphkiln.converters")


def convert(recipe: Recipe, *, command: str = "") -> Path:
    """Converts a model, proves the graph, and writes a version.

    Args:
        recipe: What to do.
        command: The command line, for the manifest.

    Returns:
        Folder of the new version.

    Raises:
        ConversionError: The source cannot be converted. Nothing is written.
        EngineUnavailable: What the recipe names is not installed. Nothing is written.
        VerificationError: The outputs changed. Nothing is written.
    """
    begun = time.perf_counter()
    folder = recipe.model_store / recipe.name
    check_name(recipe.name)
    check_given_files(recipe)
    check_quantizer(recipe)
    if recipe.version is not None:
        check_free(folder, recipe.version)
    _log.info("opening %s", recipe.source)
    with (
        local_source(recipe.source) as source,
        open_model(recipe.model_copy(update={"source": source})) as opened,
        TemporaryDirectory() as temporary,
    ):
        for note in notes_of(opened.source):
            _log.warning("%s", note)
        _log.info("exporting the graph")
        graph = opened.source.export({spec.name: spec.dynamic for spec in opened.inputs})
        model = with_fitting_labels(with_task(opened, recipe, graph), recipe, graph)
        warn_without_preprocess(model)
        proven = _convert(recipe, model, graph, Path(temporary) / GRAPH_FILE)
        version = new_version(recipe, model, proven, command=command, seconds=time.perf_counter() - begun)
        if recipe.version is None:
            return write_next_version(version, folder)
        write_version(version, folder, recipe.version)
    return folder / str(recipe.version)


def _convert(recipe: Recipe, model: OpenModel, graph: onnx_ir.Model, target: Path) -> ProvenGraph:
    names = [str(value.name) for value in graph.graph.outputs]
    recorded = recorded_samples(recipe, model.inputs, names, whole=bool(model.whole), task=model.task)
    _log.info("rewriting the graph")
    rewritten = rewrite(graph, recipe, model.preprocess)
    edge, preprocess = rewritten.edge, remaining_preprocess(model, rewritten.edge)
    check_edges(recipe, preprocess)
    rounding = Rounding.of(graph)
    check_lowers(recipe, rounding.precision)
    notes = save_runnable(graph, target)
    _log.info("proving the outputs")
    sampler = Sampler(model=model, edge=edge, preprocess=preprocess)
    samples = [*(sample.at(edge) for sample in recorded), *sampler.samples(recipe)]
    limits = loosened(export_limits(rounding.precision, rounding.depth), recipe)
    try:
        fp32 = _prove(model, target, rewritten, samples, limits)
    except VerificationError as error:
        if isinstance(error, UndecidedError) or not fp64_may_tell(error.relative_l2):
            raise
        precise, noise = sampler.beside_fp64([] if recorded else samples)  # its own fp32 may be what is off
        looser = limits_beside_fp64(limits, noise)
        if looser is None:
            raise
        fp32 = _prove(model, target, rewritten, precise, looser)
    if recipe.precision in (Precision.FP32, rounding.precision):
        return replace(fp32, precision=rounding.precision, notes=notes)
    _log.info("lowering to %s", recipe.precision)
    calibration = sampler.calibration(recipe) if recipe.precision is Precision.INT8 else {}
    return lower_and_prove(replace(fp32, notes=notes), recipe, samples, calibration)


def _prove(
    model: OpenModel, graph: Path, rewritten: Rewritten, samples: list[ReferenceSamples], limits: Limits
) -> ProvenGraph:
    """Proves a graph in the source's own precision, in batches of other sizes than it was exported with."""
    exported = model.source.batch_size if isinstance(model.source, FixedBatchSource) else EXPORT_BATCH
    proof = prove_graph(graph, samples, limits, batch_sizes=other_batch_sizes(exported))
    return ProvenGraph(graph=graph, proof=proof, rewritten=rewritten, verification=proof.verification)
