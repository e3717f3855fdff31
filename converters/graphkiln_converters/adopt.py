"""Adopt a version that another tool wrote: golden samples from a reference model, and a manifest.

The graph is not changed. From top to bottom: the graph and its tensors, the expected outputs of the reference under the
names of these tensors, whether they decide anything, the graph's own outputs where an engine here can run it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from graphkiln_backend.engines import registry
from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.decoding import decode
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import (
    ConversionError,
    EngineUnavailable,
    GraphkilnError,
    LoweringError,
    SignatureError,
    UndecidedError,
    VerificationError,
)
from graphkiln_backend.graph.files import stamp_of
from graphkiln_backend.graph.golden import GoldenSamples, repeated
from graphkiln_backend.graph.manifest import MANIFEST_FILE, Adoption, Manifest, Verification, sha256_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import BATCH, Signature, TensorSpec
from graphkiln_backend.graph.task import Task, is_classification
from graphkiln_backend.passes.edge import Arrays, Edge
from graphkiln_backend.proof.comparison import compare, prove
from graphkiln_backend.proof.policy import NOISE_FACTOR, Limits, adopted_limits
from graphkiln_backend.repository.attestation import ATTESTATION_FILE
from graphkiln_backend.repository.config import ModelConfigProto, complete, configured_signature, read_config
from graphkiln_backend.repository.onnx_file import external_files, read_precision
from graphkiln_backend.repository.openvino_ir import is_ir, read_ir, weights_of
from graphkiln_backend.repository.signing import SIGNATURE_FILE
from graphkiln_backend.repository.version import (
    CONFIG_FILE,
    GOLDEN_FILE,
    LABELS_FILE,
    ModelVersion,
    find_served_graph,
    read_graph_signature,
    read_manifest,
)
from graphkiln_backend.repository.version_folders import visible
from graphkiln_converters.convert import check_files_exist, local_source, open_model, read_given_labels, remote_part
from graphkiln_converters.prove import GOLDEN_SAMPLES, NOT_SERVED, ReferenceSamples, other_batch_sizes, prove_session
from graphkiln_converters.recipe import Recipe, check_file
from graphkiln_converters.samples import (
    MOST_READ,
    SEED,
    SYNTHETIC_SAMPLES,
    Sampler,
    each_sample,
    read_reference,
    read_samples,
    spread,
)
from graphkiln_converters.sources.base import (
    EXPORT_BATCH,
    USUAL_SIZE,
    InputSpec,
    SourceModel,
    run_in_batches,
    synthetic_samples,
)
from graphkiln_converters.sources.onnx_file import open_reference
from graphkiln_converters.verify import READABLE
from graphkiln_converters.write import NewVersion, SourceInfo, write_beside_graph

_log = logging.getLogger("graphkiln.converters")


def adopt(
    version: Path, recipe: Recipe, *, command: str = "", replay: Callable[[ModelVersion], None] | None = None
) -> Manifest:
    """Write golden samples and a manifest beside the graph of a version.

    Args:
        version: The version folder.
        recipe: The reference as its source, or an .npz of recorded inputs and outputs; empty to record the outputs of
            the graph itself (OpenVINO IR). Its precision is that in which the graph is meant to compute.
        command: Command line, for the manifest.
        replay: Replays the golden samples on the session that a server would build with the model's configuration; it
            is called if an engine here runs the graph.

    Returns:
        The manifest.

    Raises:
        ConversionError: The version is adopted or proven already, or the reference cannot be used. Nothing is written.
        RepositoryError: There is no graph, or it contradicts config.pbtxt.
        SignatureError: The reference has other tensors than the graph.
        UndecidedError: The samples cannot tell a right graph from a wrong one.
        VerificationError: The graph was run here, alone or as it would be served, and differs from the reference.
            Nothing is written.
    """
    version = version.absolute()
    check_files_exist(recipe)
    _check_free(version)
    graph = AdoptedGraph.read(version)
    stamps = {name: stamp_of(version / name) for name in graph.files}
    hashes = {name: sha256_of(version / name) for name in graph.files}
    expected = _expected(graph, recipe)
    own = expected.recorded and recipe.precision is Precision.FP32  # the default
    adoption = Adoption(
        reference=expected.reference,
        precision=read_ir(graph.path).precision if own else recipe.precision,
        recorded=expected.recorded,
    )
    limits = adopted_limits(adoption)
    golden = _golden(expected.samples)
    _check_decides(golden, expected, limits)
    verification = _prove_here(graph, expected, adoption)
    if {name: stamp_of(version / name) for name in graph.files} != stamps:
        raise ConversionError(f"{graph.path} changed while it was adopted", hint="adopt it when it is complete")
    new = NewVersion(
        graph=graph.path,
        source=SourceInfo(
            description=expected.reference,
            command=command,
            libraries=expected.libraries,
            metrics={} if expected.noise is None else {"reference_fp64_error": expected.noise},
            preprocess=expected.preprocess,
            labels=_labels(graph, expected, recipe),
            task=expected.task,
        ),
        signature=graph.signature,
        verification=() if adoption.recorded else verification,  # of the graph with itself
        golden=golden,
    )
    if replay is None or not verification:
        return write_beside_graph(version, new, hashes, adoption)
    return write_beside_graph(version, new, hashes, adoption, check=partial(_replay, replay))


def _replay(replay: Callable[[ModelVersion], None], version: ModelVersion) -> None:
    """Replay the golden samples of a version as it would be served.

    Raises:
        VerificationError: The session cannot be built, or its outputs differ.
    """
    _log.info("replaying the samples as a server does")
    try:
        replay(version)
    except LoweringError as error:
        raise VerificationError(NOT_SERVED, report=str(error)) from error


def _check_free(version: Path) -> None:
    """Check that a version has no golden samples, and that they can be written."""
    manifest = read_manifest(version)
    if manifest is not None and manifest.adoption is None:
        raise ConversionError(f"{version} is proven already: it has a {MANIFEST_FILE}", hint="graphkiln verify")
    written = (MANIFEST_FILE, GOLDEN_FILE, (manifest and manifest.labels_file) or MANIFEST_FILE)
    there = [name for name in dict.fromkeys(written) if (version / name).exists()]
    if there:
        raise ConversionError(f"{version} is adopted already", hint=f"remove {', '.join(there)} to adopt it again")
    if not os.access(version, os.W_OK | os.X_OK):
        raise ConversionError(
            f"{version} cannot be written: {MANIFEST_FILE} and {GOLDEN_FILE} lie beside the graph",
            hint="adopt a copy of the model, or as a user who may write",
        )


# The graph.


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedGraph:
    """A graph in a model store, for any backend of Triton.

    Attributes:
        path: The file that the backend loads.
        signature: Tensors of the graph, or those in config.pbtxt if only the backend reads it.
        max_batch_size: Largest batch of requests; 0 for a graph that is served whole.
        files: Names of the file and of those that belong to it, in the version folder.
        has_labels: config.pbtxt names a labels file.
    """

    path: Path
    signature: Signature
    max_batch_size: int
    files: tuple[str, ...]
    has_labels: bool

    @classmethod
    def read(cls, version: Path) -> AdoptedGraph:
        """Find the graph of a version, and read its tensors.

        Raises:
            RepositoryError: There is no graph, or it contradicts config.pbtxt.
            ConversionError: The tensors are not known, or some are not in requests.
        """
        config = read_config(version.parent / CONFIG_FILE)
        config.name = config.name or version.parent.name
        if config.HasField("sequence_batching") or config.batch_input or config.batch_output:
            raise ConversionError(
                f"'{config.name}' gets tensors from the server: sequence_batching, batch_input or batch_output",
                hint="golden samples are single requests, with all inputs of the graph",
            )
        path = find_served_graph(
            version,
            backend=config.backend,
            platform=config.platform,
            default_filename=config.default_model_filename,
        )
        signature = _read_tensors(path, config)
        complete(config, signature, labels_file=None)
        files = (path.name, *_files_beside(path))
        if path.parent != version or any(Path(name).name != name for name in files):
            raise ConversionError(
                f"{path} or its weights are in a subfolder", hint=f"put all files of the graph into {version}"
            )
        if not signature.inputs:
            raise ConversionError(f"{path} takes no inputs", hint="its outputs never change: nothing is to be proven")
        return cls(
            path=path,
            signature=signature,
            max_batch_size=config.max_batch_size,
            files=files,
            has_labels=any(output.label_filename for output in config.output),
        )

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The inputs of one sample, with usual sizes of dynamic dimensions."""
        first = 1 if self.max_batch_size else 0
        return tuple(
            InputSpec(
                name=spec.name,
                dtype=spec.dtype,
                shape=tuple(dim if isinstance(dim, int) else USUAL_SIZE for dim in spec.shape[first:]),
            )
            for spec in self.signature.inputs
        )


def _read_tensors(path: Path, config: ModelConfigProto) -> Signature:
    """Return the signature of an ONNX file or OpenVINO IR; of other graphs that in config.pbtxt."""
    if path.suffix in READABLE:
        return read_graph_signature(path)
    if configured := configured_signature(config):
        return configured
    raise ConversionError(
        f"the tensors of {path} are not known: graphkiln cannot read them, and config.pbtxt does not name them",
        hint="write `input` and `output` with name, data_type and dims into config.pbtxt",
    )


def _files_beside(path: Path) -> list[str]:
    """Names of the files that belong to a graph: weights, and whatever lies beside a program."""
    match path.suffix:
        case ".onnx":
            return external_files(path)
        case ".xml":
            return [weights_of(path).name] if weights_of(path).is_file() else []
        case ".py":
            beside = (each for each in visible(path.parent) if each.is_file() and each != path)
            not_its_own = {LABELS_FILE, SIGNATURE_FILE, ATTESTATION_FILE}
            return sorted({each.name for each in beside} - not_its_own)
        case _:
            return []


# Expected outputs, by the names of the graph.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Expected:
    """Samples with the outputs that are expected of a graph.

    Attributes:
        reference: Description of the model or file that they come from.
        samples: All rows together, or whole samples for a graph that is served whole.
        libraries: Distributions that computed them.
        noise: Relative L2 error of the reference's fp32 beside its fp64; None if that is unknown.
        recorded: They were recorded from the graph itself.
        preprocess: Preprocessing of images, or None.
        labels: Class names; may be empty.
    """

    reference: str
    samples: Sequence[ReferenceSamples]
    libraries: tuple[str, ...] = ()
    noise: float | None = None
    recorded: bool = False
    preprocess: Preprocess | None = None
    labels: tuple[str, ...] = ()

    @property
    def task(self) -> Task | None:
        """The image task, or None."""
        return self.samples[0].task


def _expected(graph: AdoptedGraph, recipe: Recipe) -> _Expected:
    is_recorded = not recipe.source or recipe.source.endswith(".npz")
    for option in ("weights", "pretrained", "shape", *(["samples"] if recipe.source else [])):
        if is_recorded and getattr(recipe, option):
            raise ConversionError(f"--{option} is for a reference that is a model", hint="leave it out")
    preprocess = None if recipe.preprocess is None else decode(Preprocess, recipe.preprocess, path="preprocess")
    labels = read_given_labels(recipe.labels) if recipe.labels else ()
    if not recipe.source:
        return replace(_recorded_here(graph, recipe, preprocess), labels=labels)
    if is_recorded:
        return replace(_recorded_elsewhere(graph, Path(recipe.source)), preprocess=preprocess, labels=labels)
    with (
        local_source(recipe.source) as source,
        open_model(recipe.model_copy(update={"source": source})) as model,
    ):
        return _computed(graph, recipe, model)


def _recorded_here(graph: AdoptedGraph, recipe: Recipe, preprocess: Preprocess | None) -> _Expected:
    """Record the outputs of the graph itself, by the engine that reads its format."""
    if not is_ir(graph.path):
        raise ConversionError(
            f"{graph.path} has no reference", hint="--reference model.onnx, torchvision:NAME, recorded.npz, ..."
        )
    inputs = {spec.name: spec for spec in graph.inputs}
    if recipe.samples:
        feeds = read_samples(recipe.samples, inputs, preprocess, MOST_READ)
    else:
        feeds = synthetic_samples(graph.inputs, SYNTHETIC_SAMPLES, {}, seed=SEED)
    with ExitStack() as opened:
        session = _open(graph.path, opened)
        if graph.max_batch_size:
            samples = [ReferenceSamples(feeds=feeds, outputs=run_in_batches(session.run, feeds, 1))]
        else:
            samples = [
                ReferenceSamples(feeds=each, outputs=session.run(each), whole=True) for each in each_sample(feeds)
            ]
    return _Expected(
        reference=f"{graph.path.name} itself, on this machine",
        samples=samples,
        libraries=("openvino",),
        recorded=True,
        preprocess=preprocess,
    )


def _recorded_elsewhere(graph: AdoptedGraph, path: Path) -> _Expected:
    """Read recorded inputs and outputs."""
    check_file(path, what="reference", expected="an .npz of inputs and outputs by name")
    outputs = [spec.name for spec in graph.signature.outputs]
    feeds, recorded = read_reference(path, graph.inputs, outputs)
    if graph.max_batch_size:
        samples = [ReferenceSamples(feeds=feeds, outputs=recorded)]
    else:
        pairs = zip(each_sample(feeds), each_sample(recorded), strict=True)
        samples = [ReferenceSamples(feeds=one, outputs=outputs, whole=True) for one, outputs in pairs]
    return _checked(graph, _Expected(reference=str(path), samples=samples))


def _computed(graph: AdoptedGraph, recipe: Recipe, model: SourceModel) -> _Expected:
    """Make samples and compute their outputs by a reference model."""
    if model.random_weights:
        raise ConversionError(
            f"{model.description} has random weights: its outputs are not those of {graph.path.name}",
            hint="--weights FILE or --pretrained",
        )
    for note in model.notes:
        _log.warning("%s", note)
    model, edge = _with_inputs_of(graph, recipe, model)
    sampler = Sampler(
        model=model, edge=edge, preprocess=model.preprocess and edge.to_graph_preprocess(model.preprocess)
    )
    _log.info("computing the outputs of %s", model.description)
    samples = sampler.samples(recipe)
    exact = sampler.beside_fp64([_golden_rows(group) for group in samples])
    edge = _outputs_of(graph, recipe, model, samples[0].outputs)
    samples = [group.at(edge) for group in samples]
    if not model.whole and not graph.max_batch_size:
        samples = _whole_batches(graph, samples[0])
    return _checked(
        graph,
        _Expected(
            reference=recipe.source if remote_part(recipe.source)[1] else model.description,
            samples=samples,
            libraries=model.libraries,
            noise=exact and exact[1],
            preprocess=sampler.preprocess,
            labels=model.labels,
        ),
    )


def _with_inputs_of(graph: AdoptedGraph, recipe: Recipe, model: SourceModel) -> tuple[SourceModel, Edge]:
    """Fit a reference to the inputs of a graph: names by the returned edge, sizes of dynamic dimensions.

    Raises:
        SignatureError: Names, types or sizes differ.
        ConversionError: The graph takes batches, the reference does not.
    """
    if model.whole and graph.max_batch_size:
        raise ConversionError(
            f"{model.description} takes no batches, but max_batch_size is {graph.max_batch_size}: {model.whole}",
            hint="give another reference, or set max_batch_size: 0 and write dims with all dimensions",
        )
    specs = {spec.name: spec for spec in graph.signature.inputs}
    names = _pair([spec.name for spec in model.inputs], list(specs), freely=_is_code(recipe))
    fitted = [
        spec.name in names and _fitted(spec, specs[names[spec.name]], recipe, whole=bool(model.whole))
        for spec in model.inputs
    ]
    if not all(fitted) or len(names) != len(specs):
        first = [] if model.whole else [BATCH]
        got = (f"{spec.name} {spec.dtype}[{','.join(map(str, [*first, *spec.shape]))}]" for spec in model.inputs)
        raise _mismatch("inputs", model.description, graph, specs.values(), got)
    types = {spec.name: spec.dtype.numpy for spec in model.inputs}
    halved = graph.signature.inputs[0].dtype is DType.FP16
    edge = Edge(
        inputs=names,
        to_graph_feeds=lambda feeds: {ours: feeds[theirs] for theirs, ours in names.items()},
        to_source_feeds=lambda feeds: {
            theirs: feeds[ours].astype(types[theirs], copy=False) for theirs, ours in names.items()
        },
        to_graph_preprocess=lambda preprocess: replace(preprocess, dtype=DType.FP16) if halved else preprocess,
    )
    return replace(model, inputs=tuple(spec for spec in fitted if spec)), edge


def _fitted(given: InputSpec, spec: TensorSpec, recipe: Recipe, *, whole: bool) -> InputSpec | None:
    """Return the input of a reference in the sizes of a graph's input; None if it does not fit."""
    if not spec.has_rank:
        return replace(given, dtype=spec.dtype, dynamic={}) if _same_type(given.dtype, spec.dtype, recipe) else None
    dims = spec.shape if whole else spec.shape[1:]
    if not _same_type(given.dtype, spec.dtype, recipe) or len(spec.shape) != len(given.shape) + (not whole):
        return None
    sizes = []
    for axis, (size, dim) in enumerate(zip(given.shape, dims, strict=True)):
        if isinstance(dim, int) and dim != size and axis not in given.dynamic:
            return None
        sizes.append(dim if isinstance(dim, int) else size)
    return replace(given, dtype=spec.dtype, shape=tuple(sizes), dynamic={})


def _outputs_of(graph: AdoptedGraph, recipe: Recipe, model: SourceModel, outputs: Arrays) -> Edge:
    """Map the outputs of a reference to those of a graph; further ones are left out.

    Raises:
        SignatureError: Their names differ.
    """
    specs = {spec.name: spec for spec in graph.signature.outputs}
    names = _pair(list(outputs), list(specs), freely=_is_code(recipe))
    if len(names) != len(specs):
        got = (_described(name, array) for name, array in outputs.items())
        raise _mismatch("outputs", model.description, graph, specs.values(), got)

    def converted(array: AnyArray, dtype: DType) -> AnyArray:
        same = _same_type(DType.from_numpy(array.dtype), dtype, recipe)
        return array.astype(dtype.numpy, copy=False) if same and dtype.is_float else array

    return Edge(
        outputs=names,
        to_graph_outputs=lambda found: {
            ours: converted(found[theirs], specs[ours].dtype) for theirs, ours in names.items()
        },
    )


_NUMBERED = re.compile(r"(?:input|output)_{0,2}(\d+)", re.IGNORECASE)


def _pair(theirs: Sequence[str], ours: Sequence[str], *, freely: bool) -> dict[str, str]:
    """Pair tensors of a reference with those of a graph, by name; empty if they do not correspond.

    They correspond by position if one side numbers its tensors: `INPUT_0`, or `INPUT__0` of Triton's PyTorch backend.

    Args:
        theirs: Names in the reference.
        ours: Names in the graph.
        freely: The reference is code, whose names are those of parameters: a single tensor may have any name.
    """
    if set(ours) <= set(theirs):
        return {name: name for name in ours}
    by_position = _numbers(theirs) or _numbers(ours) or (freely and len(ours) == 1)
    if len(theirs) != len(ours) or not by_position:
        return {}
    return dict(zip(_in_order(theirs), _in_order(ours), strict=True))


def _in_order(names: Sequence[str]) -> list[str]:
    """Sort numbered tensors; return other ones as they are."""
    numbers = _numbers(names)
    return [names[numbers.index(number)] for number in range(len(names))] if numbers else list(names)


def _numbers(names: Sequence[str]) -> list[int]:
    """Number of each tensor, if all have one, from 0 on; else empty."""
    found = [int(match[1]) for match in map(_NUMBERED.fullmatch, names) if match]
    return found if sorted(found) == list(range(len(names))) else []


def _is_code(recipe: Recipe) -> bool:
    return not recipe.source.lower().endswith(".onnx")


def _same_type(theirs: DType, ours: DType, recipe: Recipe) -> bool:
    """Return true for equal types, and where a graph in fp16 has fp16 tensors for the reference's fp32."""
    halved = recipe.precision is Precision.FP16 and (theirs, ours) == (DType.FP32, DType.FP16)
    return theirs is ours or halved


def _whole_batches(graph: AdoptedGraph, rows: ReferenceSamples) -> list[ReferenceSamples]:
    """Divide rows of a reference into whole inputs of a graph, whose first dimension may be fixed."""
    count = len(next(iter(rows.feeds.values())))
    fixed = graph.signature.inputs[0].shape[0]
    size = fixed if isinstance(fixed, int) else GOLDEN_SAMPLES
    return [
        replace(rows, feeds=_rows(rows.feeds, start, size), outputs=_rows(rows.outputs, start, size), whole=True)
        for start in range(0, count, size)
    ]


def _rows(arrays: Arrays, start: int, size: int) -> dict[str, AnyArray]:
    """Rows from `start`; repeated if there are fewer than `size`."""
    return repeated({name: array[start : start + size] for name, array in arrays.items()}, size)


def _checked(graph: AdoptedGraph, expected: _Expected) -> _Expected:
    """Compare types and sizes of samples with those of a graph.

    Raises:
        SignatureError: They differ.
    """
    for group in expected.samples:
        for kind, specs, arrays in (
            ("inputs", graph.signature.inputs, group.feeds),
            ("outputs", graph.signature.outputs, group.outputs),
        ):
            if not all(_fits(spec, arrays[spec.name]) for spec in specs):
                got = (_described(spec.name, arrays[spec.name]) for spec in specs)
                raise _mismatch(kind, expected.reference, graph, specs, got)
    return expected


def _fits(spec: TensorSpec, array: AnyArray) -> bool:
    if DType.from_numpy(array.dtype) is not spec.dtype:
        return False
    pairs = zip(spec.shape, array.shape, strict=False)
    sizes_fit = len(spec.shape) == array.ndim and all(isinstance(dim, str) or dim == size for dim, size in pairs)
    return sizes_fit or not spec.has_rank


def _described(name: str, array: AnyArray) -> str:
    return f"{name} {DType.from_numpy(array.dtype)}[{','.join(map(str, array.shape))}]"


def _mismatch(
    kind: str, reference: str, graph: AdoptedGraph, expected: Iterable[TensorSpec], got: Iterable[str]
) -> SignatureError:
    return SignatureError(
        f"the {kind} of {reference} differ from those of {graph.path}",
        expected=", ".join(map(str, expected)),
        got=", ".join(got),
        hint="sizes: --shape; names: record INPUT_<i> and OUTPUT_<i> of the reference into an .npz, and give that",
    )


# The samples.


def _golden(samples: Sequence[ReferenceSamples]) -> GoldenSamples:
    """A few rows, or the first whole sample, with the outputs that the graph should have."""
    group = samples[0] if samples[0].whole else _golden_rows(samples[0])
    return GoldenSamples(inputs=group.feeds, source_outputs={}, graph_outputs=group.outputs, whole=group.whole)


def _golden_rows(group: ReferenceSamples) -> ReferenceSamples:
    """A few samples, evenly spread; a whole sample is returned as it is."""
    if group.whole:
        return group
    chosen = spread(len(next(iter(group.feeds.values()))), GOLDEN_SAMPLES)
    feeds, outputs = (
        {name: array[chosen] for name, array in arrays.items()} for arrays in (group.feeds, group.outputs)
    )
    return replace(group, feeds=feeds, outputs=outputs)


def _check_decides(golden: GoldenSamples, expected: _Expected, limits: Limits) -> None:
    """Check that the expected outputs tell a right graph from a wrong one.

    Raises:
        UndecidedError: They do not: a graph that ignores its inputs would pass, or the reference itself is uncertain.
    """
    if reason := _why_undecided(golden, expected, limits):
        raise UndecidedError(
            "the samples prove nothing",
            report=reason,
            hint="give real samples (--samples), a trained reference (--weights, --pretrained), or the --precision of "
            "the graph",
        )


def _why_undecided(golden: GoldenSamples, expected: _Expected, limits: Limits) -> str:
    noise, outputs, task = expected.noise, golden.graph_outputs, expected.task
    if noise is not None and not NOISE_FACTOR * noise <= limits.relative_l2:
        return (
            f"{expected.reference} in fp32 is {noise:.1e} off its own fp64, "
            f"and {limits.relative_l2:.0e} is allowed for {limits.name}"
        )
    for name, array in outputs.items():
        if array.dtype.kind not in "OSU" and array.size and not np.isfinite(array.astype(np.float64)).any():
            return f"'{name}' has no finite number"
    try:
        prove(outputs, outputs, limits, batch_sizes=(), reading=task, samples=golden.count)
    except VerificationError as error:
        return error.report
    groups = [group.outputs for group in expected.samples] if golden.whole else _each_row(outputs)
    if len(groups) > 1:
        pairs = zip(groups, (*groups[1:], groups[0]), strict=True)
        if all(error.within(limits) for one, other in pairs for error in compare(one, other)):
            return f"all samples have the same outputs, within the limits of {limits.name}"
    elif all(_is_constant(array) for array in outputs.values()):
        return "all elements of the outputs are equal"
    return ""


def _each_row(outputs: Arrays) -> list[dict[str, AnyArray]]:
    count = len(next(iter(outputs.values())))
    return [{name: array[i : i + 1] for name, array in outputs.items()} for i in range(count)]


def _is_constant(array: AnyArray) -> bool:
    return not array.size or (bool((array == array.flat[0]).all()) and (array.size > 1 or not array.flat[0]))


def _labels(graph: AdoptedGraph, expected: _Expected, recipe: Recipe) -> tuple[str, ...]:
    """Labels for the manifest: the user's, else the reference's if they fit and config.pbtxt names no others."""
    if recipe.labels or not is_classification(expected.task):
        return expected.labels
    classes = graph.signature.outputs[0].shape[-1:]
    return expected.labels if classes == (len(expected.labels),) and not graph.has_labels else ()


# The graph's own outputs.


def _prove_here(graph: AdoptedGraph, expected: _Expected, adoption: Adoption) -> tuple[Verification, ...]:
    """Run a graph and compare its outputs, if an engine here can run it.

    Raises:
        VerificationError: They differ.
    """
    if graph.path.suffix not in READABLE:
        return ()
    with ExitStack() as opened:
        try:
            session = _open(graph.path, opened)
        except (LoweringError, EngineUnavailable) as error:
            _log.warning("%s is not run here, its server proves it: %s", graph.path, error)
            return ()
        limits = adopted_limits(adoption)
        sizes = [size for size in other_batch_sizes(EXPORT_BATCH) if size <= graph.max_batch_size]
        try:
            return prove_session(session, expected.samples, limits, batch_sizes=tuple(sizes)).verification
        except UndecidedError:
            raise
        except VerificationError as error:
            mixes = graph.max_batch_size and _mixes_rows(session, expected.samples[0].feeds, limits)
            raise VerificationError(
                f"{graph.path} does not compute what {expected.reference} computes",
                report=error.report,
                hint="a row depends on the other rows of its batch: set max_batch_size: 0 and write dims with all "
                "dimensions"
                if mixes
                else _precision_hint(graph.path, adoption.precision),
                relative_l2=error.relative_l2,
            ) from error


def _open(path: Path, opened: ExitStack) -> Session:
    """Open a session on the CPU, in the precision of the graph.

    Raises:
        LoweringError: The engine refuses the graph.
        EngineUnavailable: The engine is not installed.
    """
    if is_ir(path):
        return opened.enter_context(registry.open_reference(path))
    folder = opened.enter_context(TemporaryDirectory(prefix="graphkiln-"))
    return opened.enter_context(open_reference(path, Path(folder)))


def _mixes_rows(session: Session, feeds: Arrays, limits: Limits) -> bool:
    """True if rows have other outputs alone than in batches; false if the graph does not run with both."""
    try:
        alone, together = (run_in_batches(session.run, feeds, size) for size in other_batch_sizes(EXPORT_BATCH))
        return not all(error.within(limits) for error in compare(alone, together))
    except GraphkilnError:
        return False


def _precision_hint(path: Path, given: Precision) -> str:
    """Suggest the precision of a graph's weights, if it is another one than the given."""
    if is_ir(path):
        most = next(iter(read_ir(path).weights), "")
        saved = _IR_PRECISIONS.get(most, given)
    else:
        saved = read_precision(path)
    return f"its weights are {saved}: --precision {saved}" if saved is not given else ""


# OpenVINO's names of element types. Its files have weights in fp16 by default, which it computes with in fp32.
_IR_PRECISIONS = {"f16": Precision.FP16, "bf16": Precision.BF16, "i8": Precision.INT8, "u8": Precision.INT8}
