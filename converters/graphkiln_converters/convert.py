"""From a source model to a version that is proven to compute the same, or to nothing."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_ir

from graphkiln_backend.graph.errors import ConversionError, UndecidedError, VerificationError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Classification, Detection, Embedding, Segmentation, Task, output_names
from graphkiln_backend.passes.base import Pass, Rewritten, run_passes
from graphkiln_backend.passes.input_embedding import EmbedPreprocess
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS, edge_passes, without
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
from graphkiln_converters.sampling import Sampler, recorded_samples
from graphkiln_converters.sources.base import EXPORT_BATCH, FixedBatchSource, TaskSource
from graphkiln_converters.version_number import check_free
from graphkiln_converters.writer import check_name, write_next_version, write_version

# Runs the passes that a recipe requests.


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


# Which task a conversion is for: the source's own, or the one that was requested and that the outputs fit.

_FLOATS = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
_DETECTION_OUTPUTS = ("boxes", "scores", "classes", "counts")


def with_task(model: OpenModel, recipe: Recipe, graph: onnx_ir.Model) -> OpenModel:
    """The model with the task that its version will publish, by the source's names of outputs.

    Args:
        model: The source.
        recipe: Requests a task, or leaves that to the source.
        graph: As exported.

    Raises:
        ConversionError: The outputs do not fit the task, or the recipe changes what the task needs.
    """
    values = {str(value.name): value for value in graph.graph.outputs}
    kept = {name: value for name, value in values.items() if not recipe.outputs or name in recipe.outputs}
    task = _task(recipe, model.source.task if isinstance(model.source, TaskSource) else None, kept)
    if task is not None and not isinstance(task, Classification):
        _check_edges(recipe, task)
    return replace(model, task=_with_length(_with_threshold(task, recipe.score_threshold), normalize=recipe.normalize))


def _with_threshold(task: Task | None, threshold: float | None) -> Task | None:
    if threshold is None:
        return task
    if not isinstance(task, Detection):
        raise ConversionError("--score-threshold is for detectors", hint="--task detection, or leave it out")
    return replace(task, score_threshold=threshold)


def _with_length(task: Task | None, *, normalize: bool) -> Task | None:
    if not normalize:
        return task
    if not isinstance(task, Embedding):
        raise ConversionError("--normalize is for vectors", hint="--task embedding, or leave it out")
    return replace(task, normalize=True)


def _task(recipe: Recipe, own: Task | None, outputs: dict[str, onnx_ir.Value]) -> Task | None:
    if recipe.task == "auto":
        return own if own is not None and set(output_names(own)) <= outputs.keys() else None
    if own is not None and own.kind == recipe.task and set(output_names(own)) <= outputs.keys():
        return own
    return _FITTING[recipe.task](outputs)


def _classification(outputs: dict[str, onnx_ir.Value]) -> Task:  # noqa: ARG001 - any scores will do
    return Classification()


def _detection(outputs: dict[str, onnx_ir.Value]) -> Task:
    if not set(_DETECTION_OUTPUTS) <= outputs.keys():
        raise _misfit("detection", f"outputs named {', '.join(_DETECTION_OUTPUTS)}", outputs)
    masks, keypoints = (name if name in outputs else None for name in ("masks", "keypoints"))
    boxes, scores, classes, counts = _DETECTION_OUTPUTS
    return Detection(boxes=boxes, scores=scores, classes=classes, counts=counts, masks=masks, keypoints=keypoints)


def _segmentation(outputs: dict[str, onnx_ir.Value]) -> Task:
    scores = [name for name, value in outputs.items() if value.dtype in _FLOATS and _rank(value) == 4]
    maps = [name for name, value in outputs.items() if value.dtype not in _FLOATS and _rank(value) == 3]
    if len(scores) == 1:
        return Segmentation(scores=scores[0])
    if len(maps) == 1:
        return Segmentation(classes=maps[0])
    raise _misfit("segmentation", "scores [batch, classes, height, width] or classes [batch, height, width]", outputs)


def _embedding(outputs: dict[str, onnx_ir.Value]) -> Task:
    vectors = [name for name, value in outputs.items() if value.dtype in _FLOATS and _rank(value) == 2]
    if len(vectors) != 1:
        raise _misfit("embedding", "one output of vectors [batch, features]", outputs)
    return Embedding(vectors=vectors[0])


_FITTING = {
    "classification": _classification,
    "detection": _detection,
    "segmentation": _segmentation,
    "embedding": _embedding,
}


def _rank(value: onnx_ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _misfit(task: str, wanted: str, outputs: dict[str, onnx_ir.Value]) -> ConversionError:
    found = ", ".join(f"{name} {value.dtype} {list(value.shape or ())}" for name, value in outputs.items())
    return ConversionError(f"--task {task} needs {wanted}; the graph has {found}", hint="choose with --outputs")


def _check_edges(recipe: Recipe, task: Task) -> None:
    flags = {"--top-k": bool(recipe.top_k), "--softmax": recipe.softmax, "--layout nhwc": recipe.layout == "nhwc"}
    for flag, given in flags.items():
        if given:
            raise ConversionError(f"{flag} is for classifiers, and this is a {task.kind} model", hint="leave it out")


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
