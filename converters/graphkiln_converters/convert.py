"""Convert a source model to a proven version; write nothing if the proof fails.

From top to bottom: check the recipe, open the source, export its graph, choose the task, run the passes, make samples,
prove, lower to another precision and prove again, describe the version, write it. The edge of a graph is its inputs and
outputs: an `Edge` records how the passes changed them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import onnx_ir

from graphkiln_backend.graph.decoding import decode
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import (
    ConversionError,
    GraphkilnError,
    ManifestError,
    UndecidedError,
    VerificationError,
)
from graphkiln_backend.graph.manifest import Conversion, PassRecord, digest_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import (
    Classification,
    Detection,
    Embedding,
    Segmentation,
    Task,
    is_classification,
    labels_text,
    output_names,
    read_labels,
)
from graphkiln_backend.passes.base import PassError, Rewritten, run_passes
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.passes.edge_passes import EmbedPreprocess
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS, edge_passes, without
from graphkiln_backend.passes.rounding import Rounding, has_quantized_activations
from graphkiln_backend.proof.policy import Limits, beside_reference, export_limits, fp64_can_decide, limits_beside_fp64
from graphkiln_backend.repository.onnx_file import external_files
from graphkiln_backend.repository.remote_model import fetch_file
from graphkiln_backend.repository.version import GRAPH_FILE
from graphkiln_backend.storage.address import RemoteAddress, is_remote
from graphkiln_converters.precision import check_lowers, check_precision_options, lower_and_prove, pinned, smallest_kept
from graphkiln_converters.prove import (
    Proof,
    ProvenGraph,
    ReferenceSamples,
    other_batch_sizes,
    prove_graph,
    prove_served,
    with_own_limit,
)
from graphkiln_converters.recipe import Recipe, check_file
from graphkiln_converters.runnable import save_runnable
from graphkiln_converters.samples import (
    MOST_READ,
    SEED,
    Answers,
    Sampler,
    read_samples,
    recorded_samples,
    sizes_to_try,
    with_index_ranges,
)
from graphkiln_converters.source_kinds import FILE_SUFFIXES, KINDS
from graphkiln_converters.sources.base import (
    InputSpec,
    SourceModel,
    import_source,
    open_source,
    synthetic_samples,
)
from graphkiln_converters.write import (
    NewVersion,
    SourceInfo,
    check_free,
    check_name,
    write_version,
)

_log = logging.getLogger("graphkiln.converters")
# Fields of a recipe that do not change how a given graph is proven in the precision of its source.
_NOT_PROVEN = {"name", "model_store", "version", "skip", "precision", "calibration", "calibration_method", "int8_by"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedSource:
    """An open source with its exported graph, from which several versions can be converted.

    Attributes:
        model: The source.
        graph: Its graph, which conversions copy.
        digest: `digest_of` its files; empty if they are not on this machine.
        answers: Its outputs for the samples of earlier conversions.
        proofs: Proofs of rewritten graphs by earlier conversions, by content and recipe.
    """

    model: SourceModel
    graph: onnx_ir.Model
    digest: str = ""
    answers: Answers = field(default_factory=dict)
    proofs: dict[str, Proof] = field(default_factory=dict)

    def proof(self, graph: Path, recipe: Recipe, prove: Callable[[], Proof]) -> Proof:
        """Prove a rewritten graph, or return the proof of an earlier conversion to the same graph."""
        key = f"{_digest(graph)} {recipe.model_dump_json(exclude=_NOT_PROVEN)}"
        if key not in self.proofs:
            self.proofs[key] = prove()
        return self.proofs[key]


@contextmanager
def export_source(recipe: Recipe) -> Iterator[ExportedSource]:
    """Open and export the source of a recipe; closed with the context.

    Raises:
        ConversionError: The source cannot be opened or exported.
        EngineUnavailable: A library that it needs is not installed.
    """
    _log.info("opening %s", recipe.source)
    with (
        local_source(recipe.source) as source,
        open_model(recipe.model_copy(update={"source": source})) as opened,
    ):
        for note in notes_of(opened):
            _log.warning("%s", note)
        check_given_labels(opened, recipe)
        _log.info("exporting the graph")
        yield ExportedSource(model=opened, graph=opened.export(), digest=digest_source(source))


def convert(recipe: Recipe, *, command: str = "", exported: ExportedSource | None = None) -> Path:
    """Convert a model, prove the graph, and write a version.

    Args:
        recipe: Source and options.
        command: Command line, for the manifest.
        exported: The recipe's source, if it is open already.

    Returns:
        Folder of the new version.

    Raises:
        ConversionError: The source cannot be converted. No version is written.
        EngineUnavailable: A library that the recipe needs is not installed. No version is written.
        VerificationError: The outputs changed. No version is written.
    """
    begun = time.perf_counter()
    folder = recipe.model_store / recipe.name
    check_name(recipe.name)
    check_given_files(recipe)
    check_precision_options(recipe)
    if recipe.version is not None:
        check_free(folder, recipe.version)
    with nullcontext(exported) if exported else export_source(recipe) as source, TemporaryDirectory() as temporary:
        graph = source.graph
        recipe = recipe.model_copy(update={"keep_names": keeps_names(source.model, recipe)})
        model = with_index_ranges(with_fitting_labels(with_task(source.model, recipe, graph), recipe, graph), graph)
        warn_without_preprocess(model)
        proven = _rewrite_and_prove(recipe, model, graph, Path(temporary) / GRAPH_FILE, exported)
        if proven.quantizer:  # a repeated conversion makes the same graph, on other machines, too
            recipe = pinned(recipe, proven.quantizer)
        digests = digest_files(recipe, source.digest)
        seconds = time.perf_counter() - begun
        version = new_version(recipe, model, proven, command=command, seconds=seconds, digests=digests)
        return write_version(version, folder, recipe.version)


_NUMBERED = re.compile(r"input_\d+")  # of PyTorch code that does not name its inputs


def keeps_names(model: SourceModel, recipe: Recipe) -> bool:
    """Return true if a version has the source's names, which tell inputs of one type apart."""
    if recipe.keep_names is not None:
        return recipe.keep_names
    return model.named or (len(model.inputs) > 1 and not all(_NUMBERED.fullmatch(spec.name) for spec in model.inputs))


_KEEP_QUANTIZED = (
    "ONNX Runtime computes its integers otherwise than the graph says, and the graph magnifies that: convert the fp32 "
    "graph with --precision int8 --search-keep, or serve this file as it is, with fp32 products, from "
    "STORE/NAME/1/model.onnx beside a config.pbtxt with optimization { graph { level: -1 } }"
)


def _rewrite_and_prove(
    recipe: Recipe, model: SourceModel, graph: onnx_ir.Model, target: Path, exported: ExportedSource | None
) -> ProvenGraph:
    """Run the passes, prove the graph in its own precision, then in the requested one.

    A pass that fails or changes the outputs is left out by a further try.
    """
    recorded = recorded_samples(recipe, model, graph.graph.outputs)  # by the source's names, before passes change them
    _log.info("rewriting the graph")
    rewrite_without = partial(rewrite_or_leave_out, graph, recipe, model.preprocess)
    candidate = rewrite_without({})
    edge, preprocess = candidate.rewritten.edge, remaining_preprocess(model, candidate.rewritten.edge)
    for kind, names in (("inputs", edge.inputs), ("outputs", edge.outputs)):  # of one type, they are easily swapped
        if renamed := ", ".join(f"{old} -> {new}" for old, new in names.items() if old != new):
            reason = (
                "an input has that name, or it has characters that cannot be printed"
                if recipe.keep_names
                else "--keep-names keeps those of the source"
            )
            _log.info("%s: %s (%s)", kind, renamed, reason)
    rounding = candidate.rounding
    precision = Precision.INT8 if has_quantized_activations(candidate.graph) else rounding.precision
    check_lowers(recipe, precision, preprocess)
    lowers = recipe.precision not in (Precision.FP32, precision)  # the default fp32 keeps the precision

    sampler = Sampler(model=model, edge=edge, preprocess=preprocess, answers=exported.answers if exported else None)
    samples = [*(group.at(edge) for group in recorded), *sampler.samples(recipe)]
    limits = with_own_limit(export_limits(rounding.precision, rounding.depth), recipe.relative_l2)
    source = with_own_limit(beside_reference(precision), recipe.relative_l2)
    reading = samples[0].ranking or samples[0].task
    batch_sizes = other_batch_sizes(model.batch_size)

    def prove_candidate(candidate: Candidate) -> ProvenGraph:
        notes = save_runnable(candidate.graph, target)
        prove = partial(_prove_export, target, samples, limits, batch_sizes, None if recorded else sampler)
        proof = exported.proof(target, recipe, prove) if exported else prove()
        if not lowers:
            prove_served(
                target,
                proof.golden,
                precision,
                source,
                reading=reading,
                largest_batch=recipe.max_batch_size,
                way_out=_KEEP_QUANTIZED if precision is Precision.INT8 else "",
            )
        return ProvenGraph(
            graph=target,
            proof=proof,
            rewritten=candidate.rewritten,
            verification=proof.verification,
            notes=(*candidate.notes, *notes),
            precision=precision,
        )

    _log.info("proving the outputs")
    try:
        proven = prove_candidate(candidate)
    except UndecidedError:
        raise
    except VerificationError as error:
        error.hint = error.hint or model.advice
        proven = _prove_with_fewer_passes(candidate, rewrite_without, prove_candidate, error)
    if not lowers:
        return proven
    _log.info("lowering to %s", recipe.precision)
    return lower_and_prove(proven, recipe, samples, sampler.calibration(recipe), batch_sizes)


def _prove_with_fewer_passes(
    refused: Candidate,
    rewrite_without: Callable[[Mapping[str, str]], Candidate],
    prove_candidate: Callable[[Candidate], ProvenGraph],
    error: VerificationError,
) -> ProvenGraph:
    """Leave out the fewest optimizations with which the proof passes, and name them.

    Raises:
        VerificationError: The outputs differ without any optimization, too.
    """
    optional = {each.name for each in OPTIMIZATIONS}
    ran = [report.name for report in refused.rewritten.reports if report.ran and report.name in optional]

    def without_passes(names: Sequence[str]) -> ProvenGraph:
        left_out = {**refused.left_out, **dict.fromkeys(names, f"with it, {error.message}")}
        return prove_candidate(rewrite_without(left_out))

    def passes_proof(names: Sequence[str]) -> bool:
        try:
            without_passes(names)
        except VerificationError:
            return False
        return True

    _log.info("proving the outputs without optimizations")
    if not ran or not passes_proof(ran):
        raise error
    guilty = smallest_kept(ran, passes_proof)
    for name in guilty:
        _log.warning("the pass '%s' is left out: with it, %s", name, error.message)
    return without_passes(guilty)


def _prove_export(
    file: Path,
    samples: list[ReferenceSamples],
    limits: Limits,
    batch_sizes: tuple[int, ...],
    sampler: Sampler | None,
) -> Proof:
    """Prove a graph against its source; if that fails narrowly, against the source in fp64.

    Raises:
        VerificationError: The outputs changed.
    """
    try:
        return prove_graph(file, samples, limits, batch_sizes=batch_sizes)
    except VerificationError as error:
        # Recorded outputs have no sampler, and cannot be recomputed.
        if sampler is None or isinstance(error, UndecidedError) or not fp64_can_decide(error.relative_l2):
            raise
        # The error may be that of the source's fp32.
        exact = sampler.beside_fp64(samples)
        if exact is None:
            raise
        samples_in_fp64, source_error = exact
        looser = limits_beside_fp64(limits, source_error)
        if looser is None:
            raise
        return prove_graph(file, samples_in_fp64, looser, batch_sizes=batch_sizes)


# Files of the recipe: checked first, because they may be read minutes later.

_ARRAYS_OR_IMAGES = "an .npz of arrays by name, or a folder of images"
_EXPECTED_FILES = {
    "weights": "a .pth, .pt or .safetensors file",
    "labels": "a text file with one class per line",
    "calibration": _ARRAYS_OR_IMAGES,
    "samples": _ARRAYS_OR_IMAGES,
    "reference": "an .npz of INPUT_<i> and OUTPUT_<i>",
}
_MAY_BE_FOLDERS = {"calibration", "samples"}


def check_given_files(recipe: Recipe) -> None:
    """Check that the files of a recipe exist, and that its model store can be written.

    Raises:
        ConversionError: A file is missing, or the store is not a writable folder.
    """
    check_files_exist(recipe)
    _check_store(recipe.model_store, recipe.name)


def check_files_exist(recipe: Recipe) -> None:
    """Check that the files that a recipe names exist.

    Raises:
        ConversionError: A file is missing.
    """
    for option, expected in _EXPECTED_FILES.items():
        path: Path | None = getattr(recipe, option)
        if path is not None and not (option in _MAY_BE_FOLDERS and path.is_dir()):
            check_file(path, what=option, expected=expected)


def _check_store(store: Path, name: str) -> None:
    if is_remote(str(store)) or ":/" in str(store):  # a path has lost one of the slashes
        raise ConversionError(
            f"--model-store {store}: versions are written into folders",
            hint="name a folder, then copy the version: aws s3 cp --recursive, gcloud storage cp -r, ...",
        )
    folder = store / name
    try:
        existing = next((each for each in (folder, *folder.absolute().parents) if each.exists()), folder)
    except PermissionError as error:
        raise ConversionError(f"--model-store {store} cannot be accessed", hint="choose another folder") from error
    if not existing.is_dir():
        raise ConversionError(f"--model-store {store}: {existing} is not a folder", hint="name a folder of models")
    try:  # permissions alone do not tell: of root, and of file systems that cannot be written
        with TemporaryDirectory(prefix=".graphkiln-", dir=existing):
            pass
    except OSError as error:
        raise ConversionError(
            f"--model-store {store}: {existing} is not writable: {error.strerror or error}",
            hint="choose another folder",
        ) from error


# The source: fetched if it is remote, opened, completed by the recipe.

_MLFLOW = "mlflow"


def remote_part(source: str) -> tuple[str, str]:
    """Split a source into its kind with colon (or empty) and its address (empty if local)."""
    kind, colon, location = source.partition(":")
    if colon and kind in KINDS and KINDS[kind].files and is_remote(location):
        return f"{kind}:", location
    if kind == _MLFLOW and location and not Path(location).exists():
        return f"{kind}:", location
    return "", source if is_remote(source) else ""


@contextmanager
def local_source(source: str) -> Iterator[str]:
    """Fetch a remote source for the duration of the context; yield the local source.

    Raises:
        ConversionError: The address is not of a file of a known kind, or MLflow does not give the model.
        EngineUnavailable: MLflow is not installed.
        RemoteStoreError: The file cannot be read.
    """
    kind, text = remote_part(source)
    if not text:
        yield source
        return
    if kind == f"{_MLFLOW}:":
        fetch = import_source(_MLFLOW).fetch
        with TemporaryDirectory(prefix="graphkiln-") as folder:
            found = fetch(text, Path(folder))
            try:
                yield f"{kind}{found}"
            except GraphkilnError as error:  # the folder is gone when a user reads of it
                error.message = error.message.replace(f"{kind}{found}", source).replace(str(found), source)
                raise
        return
    if text.startswith(("http://", "https://")):
        raise ConversionError(f"{text} is a web page", hint="download the file, and convert that")
    if PurePosixPath(text).suffix not in FILE_SUFFIXES:
        raise ConversionError(f"{text} is not a model file", hint=f"expected one of *{', *'.join(FILE_SUFFIXES)}")
    address = RemoteAddress.parse(text)
    if address is None:
        raise ConversionError(f"{text} is not an address of a file")
    with TemporaryDirectory(prefix="graphkiln-") as folder:
        yield f"{kind}{fetch_file(address, Path(folder))}"


def open_model(recipe: Recipe) -> SourceModel:
    """Open the recipe's source, with the recipe's preprocessing, labels and varying dimensions.

    Raises:
        ConversionError: The source cannot be opened, or an option of the recipe does not apply to it.
        EngineUnavailable: The source's library is not installed.
        ManifestError: The recipe's preprocess is invalid.
    """
    source = open_source(recipe)
    if recipe.batch == "fixed" and not source.takes_fixed_batch:
        source.close()
        raise ConversionError(
            "--batch fixed is for sources saved with a fixed batch: FILE.onnx, FILE.pt2, torchscript:FILE",
            hint="leave it out",
        )
    try:
        if recipe.gradient:
            from graphkiln_converters.gradient import add_gradient

            source = add_gradient(source, recipe.gradient)
        if recipe.samples and source.fits_samples:
            inputs = {spec.name: spec for spec in source.inputs}
            source = source.fitting(read_samples(recipe.samples, inputs, None, MOST_READ, keep_types=True))
        source = replace(source, inputs=with_dynamic_axes(source.inputs, recipe.dynamic_axes, whole=bool(source.whole)))
        return replace(
            source,
            preprocess=_preprocess(recipe, source),
            labels=_labels(recipe, source),
        )
    except BaseException:
        source.close()
        raise


def _preprocess(recipe: Recipe, source: SourceModel) -> Preprocess | None:
    """The recipe's preprocessing, or else the source's."""
    if recipe.preprocess is None:
        return source.preprocess
    given = decode(Preprocess, recipe.preprocess, path="preprocess")
    if max(given.mean, default=0) > 1:
        raise ManifestError(
            f"preprocess.mean is {list(given.mean)}, expected pixels in units of 0..1",
            hint="divide mean and std by 255",
        )
    if len(source.inputs) == 1:
        (spec,) = source.inputs
        shape = ["any" if axis in spec.dynamic else size for axis, size in enumerate(spec.shape)]
        if sample := given.misfit(shape):
            raise ManifestError(
                f"the preprocess spec makes {sample}, but input '{spec.name}' takes {list(spec.shape)}",
                hint="let resize, crop and layout fit the input: --preprocess '{\"resize\": [HEIGHT, WIDTH]}'",
            )
    return given


def with_dynamic_axes(
    inputs: Sequence[InputSpec], requested: Mapping[str, Mapping[int, tuple[int, int]]], *, whole: bool = False
) -> tuple[InputSpec, ...]:
    """Make further dimensions of inputs dynamic.

    Args:
        inputs: Inputs of the source.
        requested: Input -> axis (0 is the batch) -> smallest and largest size.
        whole: There is no batch: axis 0 is an axis of the sample.

    Raises:
        ConversionError: There is no such input or axis, or a range is empty.
    """
    specs, batch_axes = {spec.name: spec for spec in inputs}, 0 if whole else 1
    for name, axes in requested.items():
        if name not in specs:
            raise ConversionError(f"--dynamic: there is no input '{name}'", hint=f"inputs: {', '.join(specs)}")
        sizes = specs[name].shape
        for axis, (least, most) in axes.items():
            if not batch_axes <= axis < len(sizes) + batch_axes or not 0 < least <= most:
                shape = ", ".join(["batch"] * batch_axes + [str(size) for size in sizes])
                raise ConversionError(
                    f"--dynamic: {name}:{axis}={least}..{most} does not fit {name} [{shape}]",
                    hint="the source has no batch" if whole else "axis 0 is the batch, which always varies",
                )
        of_sample = {axis - batch_axes: ends for axis, ends in axes.items()}
        specs[name] = replace(specs[name], dynamic={**specs[name].dynamic, **of_sample})
    return tuple(specs.values())


def _labels(recipe: Recipe, source: SourceModel) -> tuple[str, ...]:
    if recipe.labels is None:
        return () if recipe.features_only else source.labels
    return read_given_labels(recipe.labels)


def read_given_labels(path: Path) -> tuple[str, ...]:
    """Read a user's labels, without empty lines at the end.

    Raises:
        ConversionError: The file cannot be read, or is no labels file.
    """
    try:
        labels = read_labels(path)
        labels_text(labels)
    except ManifestError as error:
        raise ConversionError(error.message, hint=error.hint) from error
    while labels and not labels[-1].strip():
        labels = labels[:-1]
    return labels


def notes_of(model: SourceModel) -> tuple[str, ...]:
    """Remarks about a source, for the log and the manifest."""
    notes = model.notes
    if model.whole:
        notes = (*notes, f"served whole, with max_batch_size 0: {model.whole}")
    if model.random_weights:
        notes = (*notes, "the weights are random, so the outputs are meaningless (--weights FILE or --pretrained)")
    return notes


# The task: that of the source, or a requested one that the outputs support; and matching labels.

_FLOATS = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
_DETECTION_OUTPUTS = ("boxes", "scores", "classes", "counts")


def with_task(model: SourceModel, recipe: Recipe, graph: onnx_ir.Model) -> SourceModel:
    """Add the task of the version, with the source's output names.

    Raises:
        ConversionError: The outputs do not match the task, or the recipe changes an output of the task.
    """
    outputs = {
        str(value.name): value for value in graph.graph.outputs if not recipe.outputs or value.name in recipe.outputs
    }
    task = model.task if model.task is not None and set(output_names(model.task)) <= outputs.keys() else None
    if recipe.task != "auto" and (task is None or task.kind != recipe.task):
        task = _fitting_task(recipe.task, outputs)
    if task is not None and not isinstance(task, Classification):
        flags = {"--top-k": bool(recipe.top_k), "--softmax": recipe.softmax, "--layout nhwc": recipe.layout == "nhwc"}
        for flag in (flag for flag, given in flags.items() if given):
            raise ConversionError(f"{flag} is for classifiers, and this is a {task.kind} model", hint="leave it out")
    if recipe.score_threshold is not None:
        if not isinstance(task, Detection):
            raise ConversionError("--score-threshold is for detectors", hint="--task detection, or leave it out")
        task = replace(task, score_threshold=recipe.score_threshold)
    if recipe.normalize:
        if not isinstance(task, Embedding):
            raise ConversionError("--normalize is for vectors", hint="--task embedding, or leave it out")
        task = replace(task, normalize=True)
    return replace(model, task=task)


def _fitting_task(kind: str, outputs: Mapping[str, onnx_ir.Value]) -> Task:
    """Find the outputs of a requested task by their names, types and ranks."""
    ranks = {name: None if value.shape is None else len(value.shape) for name, value in outputs.items()}
    floats = {name for name, value in outputs.items() if value.dtype in _FLOATS}
    match kind:
        case "classification":
            return Classification()
        case "detection":
            wanted = f"outputs named {', '.join(_DETECTION_OUTPUTS)}"
            if set(_DETECTION_OUTPUTS) <= outputs.keys():
                masks, keypoints = (name if name in outputs else None for name in ("masks", "keypoints"))
                boxes, scores, classes, counts = _DETECTION_OUTPUTS
                return Detection(
                    boxes=boxes, scores=scores, classes=classes, counts=counts, masks=masks, keypoints=keypoints
                )
        case "segmentation":
            wanted = "scores [batch, classes, height, width] or classes [batch, height, width]"
            score_maps = [name for name in outputs if name in floats and ranks[name] == 4]
            class_maps = [name for name in outputs if name not in floats and ranks[name] == 3]
            if len(score_maps) == 1:
                return Segmentation(scores=score_maps[0])
            if len(class_maps) == 1:
                return Segmentation(classes=class_maps[0])
        case _:
            wanted = "one output of vectors [batch, features]"
            vectors = [name for name in outputs if name in floats and ranks[name] == 2]
            if len(vectors) == 1:
                return Embedding(vectors=vectors[0])
    found = ", ".join(f"{name} {value.dtype} {list(value.shape or ())}" for name, value in outputs.items())
    raise ConversionError(f"--task {kind} needs {wanted}; the graph has {found}", hint="choose with --outputs")


def check_given_labels(model: SourceModel, recipe: Recipe) -> None:
    """Compare the number of a recipe's labels with the source's own outputs, before it is exported.

    Raises:
        ConversionError: They differ.
    """
    own_task = model.task.kind if model.task else "classification"
    if not recipe.labels or model.whole or recipe.task not in ("auto", own_task):
        return
    answers: list[dict[str, AnyArray]] = []
    # A source that does not run with made-up samples is compared when it is exported.
    with suppress(GraphkilnError):
        samples = [
            synthetic_samples(model.inputs, model.batch_size, sizes, seed=SEED)
            for sizes in islice(sizes_to_try(model.inputs), 2)
        ]
        answers = [model.run(feeds) for feeds in samples]
    if not answers:
        return
    outputs = {}
    for name, array in answers[0].items():
        shapes = zip(*(found[name].shape for found in answers), strict=False)
        fixed = tuple(sizes[0] if len({*sizes}) == 1 else None for sizes in shapes)  # others follow those of the inputs
        outputs[name] = (array.dtype.kind == "f", fixed)
    _fit_labels(model, recipe, outputs)


def with_fitting_labels(model: SourceModel, recipe: Recipe, graph: onnx_ir.Model) -> SourceModel:
    """Keep the source's labels if their number matches the classes of the output; those of the recipe must match.

    Raises:
        ConversionError: The recipe's labels do not match.
    """
    outputs = {str(value.name): (value.dtype in _FLOATS, tuple(value.shape or ())) for value in graph.graph.outputs}
    return _fit_labels(model, recipe, outputs)


def _fit_labels(
    model: SourceModel, recipe: Recipe, outputs: Mapping[str, tuple[bool, tuple[object, ...]]]
) -> SourceModel:
    """Compare labels with outputs, given as whether they are floats, and their sizes with the batch."""
    if isinstance(model.task, Detection):
        # Classes of detections are numbers: no output has a dimension of classes.
        if recipe.labels and model.classes and len(model.labels) != model.classes:
            raise ConversionError(
                f"{recipe.labels} has {len(model.labels)} labels for the {model.classes} classes of {recipe.source}",
                hint="one line for each class, in their order; torchvision's first one is the background",
            )
        return model
    kept = [outputs[name] for name in recipe.outputs if name in outputs] or list(outputs.values())
    scores = [sizes for is_float, sizes in kept if is_float and len(sizes) == 2]
    classes: object = None
    if isinstance(model.task, Segmentation):
        _, sizes = outputs.get(model.task.scores or "", (False, ()))
        classes = sizes[1] if len(sizes) == 4 else None
    elif kept:
        # A class of each row may come first, as scikit-learn's classifiers answer; see `task.class_output`.
        is_float, sizes = kept[0]
        sizes = scores[0] if scores and not is_float else sizes
        classes = sizes[-1] if len(sizes) == 2 else None
    if not model.labels or not isinstance(classes, int) or len(model.labels) == classes:
        return model
    problem = f"{len(model.labels)} labels for the {classes} classes of {recipe.source}"
    if recipe.labels:
        raise ConversionError(f"{recipe.labels} has {problem}", hint="one line for each class, in their order")
    _log.warning("%s: left out; give others with --labels FILE", problem)
    return replace(model, labels=())


def warn_without_preprocess(model: SourceModel) -> None:
    """Warn about an image task without a preprocess, to which clients cannot send images."""
    if not is_classification(model.task) and model.preprocess is None:
        _log.warning(
            "the preprocessing of images is unknown, so clients that send images are refused: give --preprocess, for "
            "example '{\"resize\": [640, 640]}' (docs/tasks.md)"
        )


# The passes.


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A rewritten graph to prove.

    Attributes:
        graph: The graph.
        rewritten: What the passes changed.
        rounding: Its rounding type, which determines the limits.
        left_out: Passes that were left out, with the reason.
    """

    graph: onnx_ir.Model
    rewritten: Rewritten
    rounding: Rounding
    left_out: Mapping[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """A remark for each pass that was left out."""
        return tuple(f"the pass '{name}' was left out: {reason}" for name, reason in self.left_out.items())


def rewrite_or_leave_out(
    graph: onnx_ir.Model, recipe: Recipe, preprocess: Preprocess | None, left_out: Mapping[str, str]
) -> Candidate:
    """Rewrite a copy of an exported graph; an optimization that fails is left out.

    Args:
        graph: The exported graph.
        recipe: Passes to skip, and the edge.
        preprocess: Preprocessing of images, or None.
        left_out: Passes to leave out, with the reason.

    Raises:
        ConversionError: As `rewrite`.
    """
    left_out = dict(left_out)
    while True:
        copy = graph.clone()
        try:
            rewritten = rewrite(copy, recipe, preprocess, left_out)
        except PassError as error:
            if error.name in left_out or error.name not in {each.name for each in OPTIMIZATIONS}:
                raise
            _log.warning("%s; it is left out", error.message)
            left_out[error.name] = error.problem
            continue
        # Before `save_runnable`, which may move nodes to fp32.
        return Candidate(graph=copy, rewritten=rewritten, rounding=Rounding.of(copy), left_out=left_out)


def rewrite(
    graph: onnx_ir.Model, recipe: Recipe, preprocess: Preprocess | None, left_out: Collection[str] = ()
) -> Rewritten:
    """Rewrite an exported graph in place, without some passes.

    Raises:
        ConversionError: A pass to skip does not exist, a pass failed, or the preprocessing cannot be embedded.
    """
    embedded = recipe.input != "source"
    if embedded and preprocess is None:
        raise ConversionError(
            f"--input {recipe.input}: the preprocessing of images is unknown",
            hint='give --preprocess \'{"mean": [...], "std": [...]}\'',
        )
    at_edge = edge_passes(
        graph,
        outputs=recipe.outputs,
        keep_names=bool(recipe.keep_names),
        preprocess=preprocess if embedded else None,
        softmax=recipe.softmax,
        top_k=recipe.top_k,
        nhwc=recipe.layout == "nhwc",
    )
    rewritten = run_passes(graph, without((*OPTIMIZATIONS, *at_edge), (*recipe.skip, *left_out)))
    if embedded:
        report = next((each for each in rewritten.reports if each.name == EmbedPreprocess.name), None)
        if report is None:
            raise ConversionError(
                f"--input {recipe.input} needs the pass {EmbedPreprocess.name}", hint="do not skip it"
            )
        if not report.ran:
            raise ConversionError(
                f"--input {recipe.input}: {report.note}", hint="it is for models with one FP32 image as their input"
            )
    return rewritten


def remaining_preprocess(model: SourceModel, edge: Edge) -> Preprocess | None:
    """Preprocessing that remains for clients of a rewritten graph."""
    return edge.to_graph_preprocess(model.preprocess) if model.preprocess else None


# The version: manifest and configuration.


_NAMES = ("torchvision", "timm")  # kinds whose locations are no files
_DIGESTED = ("weights", "calibration", "samples", "reference")


def digest_source(source: str) -> str:
    """Digest of the files of a source; empty if they are not on this machine.

    Raises:
        ConversionError: A file cannot be read.
    """
    kind, _, location = source.partition(":")
    places = [] if kind in _NAMES else [source, location, location.rpartition(":")[0]]  # python:FILE:FACTORY
    return next((_digest(Path(each)) for each in places if each and Path(each).exists()), "")


def digest_files(recipe: Recipe, source: str) -> dict[str, str]:
    """Digests of the source, if known, and of a recipe's files, by their keys.

    Raises:
        ConversionError: A file cannot be read.
    """
    given: dict[str, Path | None] = {key: getattr(recipe, key) for key in _DIGESTED}
    found = {key: _digest(path) for key, path in given.items() if path is not None}
    return {"source": source, **found} if source else found


def _digest(path: Path) -> str:
    """Digest of a file or folder; that of a graph includes its weights in other files."""
    try:
        weights = external_files(path) if path.suffix == ".onnx" and path.is_file() else ()
        return digest_of(path, [path.parent / name for name in weights])
    except OSError as error:
        raise ConversionError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


def new_version(
    recipe: Recipe,
    model: SourceModel,
    proven: ProvenGraph,
    *,
    command: str,
    seconds: float,
    digests: Mapping[str, str],
) -> NewVersion:
    """Describe a proven graph for its manifest and its configuration."""
    proof, edge = proven.proof, proven.rewritten.edge
    quantizers = ("nncf",) if recipe.precision is Precision.INT8 and recipe.int8_by == "nncf" else ()
    description = recipe.source if remote_part(recipe.source)[1] else model.description
    source = SourceInfo(
        description=f"{description} with random weights" if model.random_weights else description,
        command=command,
        libraries=(*model.libraries, "onnx", "onnxruntime", *quantizers),
        metrics={},
        preprocess=remaining_preprocess(model, edge),
        labels=() if recipe.top_k else model.labels,
        ranking=replace(edge.ranking, labels=model.labels) if edge.ranking else None,
        task=edge.to_graph_task(model.task),
    )
    conversion = Conversion(
        # Digests are in the recipe because earlier releases refuse unknown keys around it.
        recipe={**recipe.frozen(), **({"digests": dict(digests)} if digests else {})},
        precision=proven.precision,
        passes=tuple(
            PassRecord(name=each.name, nodes_before=each.nodes_before, nodes_after=each.nodes_after, note=each.note)
            for each in proven.rewritten.reports
        ),
        output_errors=proof.errors,
        # The graph and its weights are the only files of their folder.
        graph_bytes=sum(path.stat().st_size for path in proven.graph.parent.iterdir() if path.is_file()),
        seconds=round(seconds, 2),
        notes=(*notes_of(model), *proven.notes),
    )
    return NewVersion(
        graph=proven.graph,
        source=source,
        signature=proof.signature,
        verification=proven.verification,
        golden=proof.golden,
        conversion=conversion,
        max_batch_size=0 if proof.golden.whole else recipe.max_batch_size,
        accepts_images=recipe.input == "encoded",
        engine=proven.engine,
    )
