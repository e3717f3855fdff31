"""From a source model to a version that is proven to answer the same, or to nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import onnx_ir

from graphkiln_backend.graph.decoding import decode
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.manifest import Conversion, PassRecord
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.passes.base import EdgePass, Pass, PassReport, run_passes
from graphkiln_backend.passes.edges import Nhwc, Rename, TopK
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.input_embedding import EmbedPreprocess
from graphkiln_backend.passes.outputs import PruneOutputs
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS, edge_passes, without
from graphkiln_backend.repository.version import GRAPH_FILE
from graphkiln_converters.precision import limits_of, lower_and_prove
from graphkiln_converters.proving import (
    EXPORT_BATCH,
    Arrays,
    Sampled,
    other_batch_sizes,
    prove_graph,
    run_in_batches,
)
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.samples import (
    SEED,
    read_reference,
    read_samples,
    read_targets,
    sizes_to_try,
    synthetic_images,
)
from graphkiln_converters.sources.base import (
    FixedBatchSource,
    GradientSource,
    InputSpec,
    SourceModel,
    SourceOptions,
    open_source,
    synthetic_samples,
)
from graphkiln_converters.writer import Proven, Source, check_free, next_number, write_proven

_log = logging.getLogger("graphkiln.converters")

_SYNTHETIC_SAMPLES = 6
_MOST_READ = 256
_REFERENCE_BATCH = 4


def convert(recipe: Recipe, *, command: str = "") -> Path:
    """Converts, proves, and writes a version.

    Args:
        recipe: What to do.
        command: The command line, for the manifest.

    Returns:
        Folder of the new version.

    Raises:
        ConversionError: The source cannot be converted. Nothing is written.
        VerificationError: The answers changed. Nothing is written.
    """
    begun = time.perf_counter()
    folder = recipe.model_store / recipe.name
    number = recipe.version or next_number(folder)
    check_free(folder, number)
    _log.info("opening %s", recipe.source)
    with closing(_open(recipe)) as source, TemporaryDirectory() as temporary:
        _log.info("exporting the graph")
        inputs = _with_dynamic(source.inputs, recipe.dynamic_axes)
        model = source.export({spec.name: spec.dynamic for spec in inputs})
        recorded = _recorded(recipe, inputs, model)
        _log.info("rewriting the graph")
        preprocess = _preprocess(recipe, source)
        passes = _passes(model, recipe, preprocess)
        reports = run_passes(model, passes)
        _check_embedded(passes, reports)
        graph = Path(temporary) / GRAPH_FILE
        save(model, graph)
        _log.info("proving the answers")
        edges = [
            each
            for each, report in zip(passes, reports, strict=True)
            if report.ran and isinstance(each, EdgePass)  # one that had nothing to do left the edge as it was
        ]
        remaining = _remaining(preprocess, edges)
        published = _published(recipe, remaining)
        own = partial(_read, recipe.samples, remaining) if recipe.samples else None
        labels = _labels(recipe, source)
        ranking = _ranking(model, passes, labels)
        targets = read_targets(recipe.samples, labels, _MOST_READ) if recipe.samples else None
        samples = list(_samples(source, inputs, edges, remaining, own, ranking=ranking, targets=targets))
        if recorded:
            samples.insert(0, _sampled_before(recorded, inputs, edges, ranking))
        sizes = other_batch_sizes(source.batch_size if isinstance(source, FixedBatchSource) else EXPORT_BATCH)
        proof = prove_graph(graph, samples, limits_of(recipe, Precision.FP32), batch_sizes=sizes)
        verification, notes = proof.verification, tuple[str, ...]()
        if recipe.precision is not Precision.FP32:
            _log.info("lowering to %s", recipe.precision)
            calibration = partial(_calibration, recipe, inputs, edges, remaining)
            lowered = lower_and_prove(graph, recipe, samples, proof, calibration=calibration)
            graph, proof, notes = lowered.graph, lowered.proof, lowered.notes
            reports, verification = (*reports, *lowered.reports), (*verification, *proof.verification)
        conversion = Conversion(
            recipe=recipe.model_copy(update={"version": number}).frozen(),
            precision=recipe.precision,
            passes=tuple(_record(report) for report in reports),
            output_errors=proof.errors,
            graph_bytes=sum(path.stat().st_size for path in graph.parent.iterdir() if path.is_file()),
            seconds=round(time.perf_counter() - begun, 2),
            notes=notes,
        )
        facts = Source(
            description=source.description,
            command=command,
            libraries=(*source.libraries, "onnx", "onnxruntime"),
            metrics={},
            preprocess=published,
            labels=() if recipe.top_k else labels,
            ranking=ranking,
        )
        proven = Proven(
            graph=graph,
            source=facts,
            signature=proof.signature,
            verification=verification,
            golden=proof.golden,
            conversion=conversion,
            max_batch_size=recipe.max_batch_size,
        )
        write_proven(proven, folder, number)
    return folder / str(number)


def _open(recipe: Recipe) -> SourceModel:
    source = open_source(recipe.source, source_options(recipe))
    if not recipe.gradient:
        return source
    from graphkiln_converters.gradient import add_gradient

    return add_gradient(source, recipe.gradient)


def source_options(recipe: Recipe) -> SourceOptions:
    """What a recipe says about its source."""
    return SourceOptions(
        weights=recipe.weights,
        pretrained=recipe.pretrained,
        features_only=recipe.features_only,
        out_indices=recipe.out_indices,
        shapes=recipe.shapes,
    )


def _preprocess(recipe: Recipe, source: SourceModel) -> Preprocess | None:
    if recipe.preprocess is None:
        return source.preprocess
    return decode(Preprocess, recipe.preprocess, path="preprocess")


def _published(recipe: Recipe, preprocess: Preprocess | None) -> Preprocess | None:
    """What the server tells its clients, where the input takes the lowered type."""
    if preprocess is None or not recipe.lower_edges or preprocess.dtype is DType.UINT8:
        return preprocess
    if recipe.precision is Precision.BF16:
        raise ConversionError("--lower-edges: clients make no bf16 images", hint="use --input uint8-nhwc or fp16")
    return replace(preprocess, dtype=DType.FP16) if recipe.precision is Precision.FP16 else preprocess


def _check_embedded(passes: Sequence[Pass], reports: Sequence[PassReport]) -> None:
    for each, report in zip(passes, reports, strict=True):
        if isinstance(each, EmbedPreprocess) and not report.ran:
            raise ConversionError(
                f"--input uint8-nhwc: {report.note}", hint="it is for models with one FP32 image as their input"
            )


def _remaining(preprocess: Preprocess | None, passes: Sequence[EdgePass]) -> Preprocess | None:
    """What the client still has to do."""
    for each in passes:
        if isinstance(each, EmbedPreprocess):
            return each.remaining
        if isinstance(each, Nhwc) and each.inputs and preprocess:
            return replace(preprocess, layout="HWC")
    return preprocess


def _ranking(model: onnx_ir.Model, passes: Sequence[Pass], labels: tuple[str, ...]) -> Ranking | None:
    """The first output and that behind it, where the pass was among them."""
    if not any(isinstance(each, TopK) for each in passes):
        return None
    scores, indices = (str(value.name) for value in model.graph.outputs[:2])
    return Ranking(scores=scores, indices=indices, labels=labels)


def _labels(recipe: Recipe, source: SourceModel) -> tuple[str, ...]:
    if recipe.labels is None:
        return () if recipe.features_only else source.labels
    try:
        return tuple(recipe.labels.read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"cannot read labels from {recipe.labels}: {error}") from error


def _with_dynamic(
    inputs: tuple[InputSpec, ...], asked: Mapping[str, Mapping[int, tuple[int, int]]]
) -> tuple[InputSpec, ...]:
    names = [spec.name for spec in inputs]
    for name, axes in asked.items():
        if name not in names:
            raise ConversionError(f"--dynamic: there is no input '{name}'", hint=f"inputs: {', '.join(names)}")
        spec = inputs[names.index(name)]
        for axis, (least, most) in axes.items():
            if not 1 <= axis <= len(spec.shape) or not 0 < least <= most:
                raise ConversionError(
                    f"--dynamic: {name}:{axis}={least}..{most} does not fit {name} [batch, "
                    f"{', '.join(map(str, spec.shape))}]",
                    hint="axis 0 is the batch and varies always",
                )
    return tuple(
        replace(
            spec,
            dynamic={**spec.dynamic, **{axis - 1: ends for axis, ends in asked.get(spec.name, {}).items()}},
        )
        for spec in inputs
    )


def _passes(model: onnx_ir.Model, recipe: Recipe, preprocess: Preprocess | None) -> tuple[Pass, ...]:
    embedded = recipe.input == "uint8-nhwc"
    if embedded and preprocess is None:
        raise ConversionError(
            "--input uint8-nhwc: nobody says how an image becomes the input",
            hint='give --preprocess \'{"mean": [...], "std": [...]}\'',
        )
    edges = edge_passes(
        model,
        outputs=recipe.outputs,
        keep_names=recipe.keep_names,
        preprocess=preprocess if embedded else None,
        softmax=recipe.softmax,
        top_k=recipe.top_k,
        nhwc=recipe.layout == "nhwc",
    )
    return without((*OPTIMIZATIONS, *edges), recipe.skip)


ReadSamples = Callable[[Mapping[str, InputSpec]], Arrays]
"""Reads a user's own samples for inputs by the names of the saved graph."""


def _read(path: Path, preprocess: Preprocess | None, inputs: Mapping[str, InputSpec]) -> Arrays:
    return read_samples(path, inputs, preprocess, _MOST_READ)


def _recorded(recipe: Recipe, inputs: tuple[InputSpec, ...], model: onnx_ir.Model) -> tuple[Arrays, Arrays] | None:
    """The source's own answers, recorded where it ran."""
    if recipe.reference is None:
        return None
    if recipe.gradient or recipe.input != "source":
        raise ConversionError(
            "--reference holds inputs and outputs of the source as it is",
            hint="leave out --gradient and --input, or prove with --samples",
        )
    return read_reference(recipe.reference, inputs, [str(value.name) for value in model.graph.outputs])


def _sampled_before(
    recorded: tuple[Arrays, Arrays], inputs: tuple[InputSpec, ...], edges: Sequence[EdgePass], ranking: Ranking | None
) -> Sampled:
    """What was recorded, as the graph after all passes takes and answers it."""
    feeds, outputs = recorded
    names = dict(zip([spec.name for spec in inputs], _graph_names(inputs, edges), strict=True))
    for each in edges:
        outputs = each.from_source(outputs)
    renamed = {names[name]: array for name, array in feeds.items()}
    return Sampled(feeds=_backwards(edges, renamed), outputs=outputs, ranking=ranking)


def _samples(
    source: SourceModel,
    inputs: tuple[InputSpec, ...],
    edges: Sequence[EdgePass],
    preprocess: Preprocess | None,
    own: ReadSamples | None,
    *,
    ranking: Ranking | None,
    targets: npt.NDArray[np.int64] | None,
) -> Iterable[Sampled]:
    """Samples at the usual sizes (the user's own where given), then made-up ones at the smallest and largest."""
    names = dict(zip([spec.name for spec in inputs], _graph_names(inputs, edges), strict=True))
    for number, sizes in enumerate(sizes_to_try(inputs)):
        if own and number == 0:
            feeds = own({names[spec.name]: spec for spec in inputs})
        elif preprocess and not sizes and len(inputs) == 1 and len(inputs[0].shape) == 3:
            channels, height, width = inputs[0].shape
            images = synthetic_images((height, width, channels), _SYNTHETIC_SAMPLES)
            feeds = {names[inputs[0].name]: np.stack([preprocess.normalize(image) for image in images])}
        else:
            made = synthetic_samples(inputs, _SYNTHETIC_SAMPLES, sizes, seed=SEED + number)
            feeds = _backwards(edges, {names[name]: array for name, array in made.items()})
        yield Sampled(
            feeds=feeds,
            outputs=_reference(source, feeds, edges),
            gradients=_gradients(source, edges),
            gradient_noise=source.gradient_noise(_source_feeds(feeds, edges))
            if isinstance(source, GradientSource)
            else 0.0,
            ranking=ranking,
            targets=targets if own and number == 0 else None,
        )


def _graph_names(inputs: tuple[InputSpec, ...], edges: Sequence[EdgePass]) -> list[str]:
    """The inputs' names in the saved graph."""
    renames = [each.inputs for each in edges if isinstance(each, Rename)]
    return [renames[0].get(spec.name, spec.name) if renames else spec.name for spec in inputs]


def _gradients(source: SourceModel, edges: Sequence[EdgePass]) -> frozenset[str]:
    """The gradient's name in the saved graph, if there is one."""
    name = source.gradient if isinstance(source, GradientSource) else ""
    renames = [each.outputs for each in edges if isinstance(each, Rename)]
    return frozenset({renames[0].get(name, name) if renames else name}) if name else frozenset()


def _backwards(edges: Sequence[EdgePass], feeds: Arrays) -> Arrays:
    """Samples made for the source, as the saved graph takes them; only a layout can differ."""
    turned = any(isinstance(each, Nhwc) and each.inputs for each in edges)
    return {name: a.transpose(0, 2, 3, 1).copy() if turned and a.ndim == 4 else a for name, a in feeds.items()}


def _reference(source: SourceModel, feeds: Arrays, edges: Sequence[EdgePass]) -> Arrays:
    """The source's answers in small batches, through what the passes say that they do to the edge."""
    pruned = [each for each in edges if isinstance(each, PruneOutputs)]

    def run(feeds: Arrays) -> Arrays:
        """Outputs that are left out need no batch."""
        outputs: Arrays = source.run(feeds)
        return pruned[0].from_source(outputs) if pruned else outputs

    outputs: Arrays = run_in_batches(run, _source_feeds(feeds, edges), _REFERENCE_BATCH)
    for each in edges:
        outputs = each.from_source(outputs)
    return outputs


def _calibration(
    recipe: Recipe,
    inputs: tuple[InputSpec, ...],
    edges: Sequence[EdgePass],
    preprocess: Preprocess | None,
) -> Arrays:
    if recipe.calibration is None:
        raise ConversionError(
            "--precision int8 needs samples to calibrate on",
            hint="give real ones: --calibration DIR or NPZ, not those of --samples",
        )
    if recipe.samples and recipe.samples.resolve() == recipe.calibration.resolve():
        raise ConversionError("--calibration and --samples are the same: a proof on calibrated samples proves nothing")
    specs = dict(zip(_graph_names(inputs, edges), inputs, strict=True))
    return _read(recipe.calibration, preprocess, specs)


def _source_feeds(feeds: Arrays, edges: Sequence[EdgePass]) -> Arrays:
    for each in reversed(edges):
        feeds = each.to_source(feeds)
    return feeds


def _record(report: PassReport) -> PassRecord:
    return PassRecord(
        name=report.name, nodes_before=report.nodes_before, nodes_after=report.nodes_after, note=report.note
    )
