"""`FILE.onnx`: existing graphs. The reference is the same graph, run without optimization."""

from __future__ import annotations

import _thread
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnx_ir
from onnx.reference import ReferenceEvaluator

from graphkiln_backend.engines.base import Placement, Session
from graphkiln_backend.engines.compute_limit import ComputeLimitExceeded, current_limit
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import (
    ConversionError,
    ExecutionError,
    GraphkilnError,
    LoweringError,
    ManifestError,
    RepositoryError,
    SignatureError,
)
from graphkiln_backend.graph.signature import Dim, Signature, TensorSpec, free_dim
from graphkiln_backend.passes.graph_file import from_proto, load, make_dense, tidied
from graphkiln_backend.repository.onnx_file import read_graph, read_mixing, read_replaced_outputs, read_signature
from graphkiln_backend.repository.tensor_outputs import ReplacedOutput, with_tensor_outputs
from graphkiln_backend.repository.training_mode import EVALUATION_MODE, draws_numbers, find_training
from graphkiln_backend.system.closing import Closeable
from graphkiln_converters.recipe import Recipe, check_file
from graphkiln_converters.runnable import raise_opset, save_runnable
from graphkiln_converters.sources.base import (
    InputSpec,
    SourceModel,
    run_alone,
    sizes_of,
    synthetic_samples,
    with_known,
)
from graphkiln_converters.sources.batches import (
    dependent_rows,
    free_and_prove,
    rounding_limits,
    saved_size,
    without_batch,
)
from graphkiln_converters.sources.trees import Trees, rounded_thresholds, with_leaves

_UNLOADED_LIBRARIES = (
    "convert loads no libraries of custom operators: serve such a graph as it is, as STORE/NAME/1/model.onnx beside a "
    'config.pbtxt with model_operations { op_library_filename: "/path/to/library.so" }'
)
_AS_IT_IS = "as it is, it is served from STORE/NAME/1/model.onnx"
# Number of synthetic text samples that a graph must accept.
_TRIED = 64
_SHORT_BYTES = 2  # integers of more bytes may be sizes, which must stay small


@dataclass(frozen=True, kw_only=True)
class OnnxModel(SourceModel):
    """A graph file.

    Attributes:
        path: The file.
        session: Reference session.
        replaced: Outputs that are not tensors.
        outputs: Output names of the exported graph.
        freed: The graph with a dynamic batch in place of a fixed one, or None.
        answered: Shapes of outputs that the file declares wrongly.
    """

    takes_fixed_batch = True

    path: Path
    session: Session
    replaced: tuple[ReplacedOutput, ...] = ()
    outputs: tuple[str, ...] = ()
    freed: onnx_ir.Model | None = None
    answered: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict)
    _temporary: TemporaryDirectory[str]

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; a graph with a fixed batch computes each row alone, repeated to fill the batch."""
        try:
            run = partial(self.session.run, outputs=self.outputs)
            found = run_alone(run, feeds, self.batch_size) if self.freed else run(feeds)
        except (ExecutionError, SignatureError) as error:
            raise ConversionError(
                f"{self.path} rejects the samples: {error}",
                hint="provide real samples: --samples FILE.npz, saved with numpy.savez(FILE, INPUT_0=..., ...)",
            ) from error
        return found | {output.name: output.to_tensor(found[output.name]) for output in self.replaced if output.classes}

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`; dynamic dimensions are kept, and old opsets are converted."""
        if self.freed:
            return self.freed
        model = self.graph()
        raise_opset(model)
        return model

    def graph(self) -> onnx_ir.Model:
        """The graph of the file, whose outputs have the shapes that they are computed in."""
        model = _load(self.path)
        for value in model.graph.outputs:
            if shape := self.answered.get(str(value.name)):
                value.shape = onnx_ir.Shape(shape)
        return model

    def close(self) -> None:
        """See `SourceModel.close`."""
        self.session.close()
        self._temporary.cleanup()


def open_source(location: str, recipe: Recipe) -> OnnxModel:
    """Load a graph.

    Raises:
        ConversionError: The file is missing or damaged, or cannot be converted.
    """
    path = Path(location)
    check_file(path)
    temporary = TemporaryDirectory(prefix="graphkiln-")
    try:
        declared = read_signature(path)  # rejects pipes and weights outside the folder before a runtime opens them
        replaced = read_replaced_outputs(path)
        session = open_reference(path, Path(temporary.name))
        answered = _answered_shapes(session, declared, _inputs(declared, recipe, 0, path, session))
        signature = replace(
            declared,
            outputs=tuple(replace(spec, shape=answered.get(spec.name, spec.shape)) for spec in declared.outputs),
        )
        model = OnnxModel(
            description=location,
            named=True,
            libraries=("onnx", "onnxruntime"),
            path=path,
            session=session,
            inputs=_inputs(signature, recipe, 1, path, session),
            notes=(*map(str, replaced), *_corrections(declared, signature)),
            replaced=replaced,
            answered={**_corrected_rows(path, signature), **answered},
            outputs=tuple(spec.name for spec in signature.outputs),
            _temporary=temporary,
        )
        _check_evaluation_mode(model, _specs(signature, recipe, 0))
        model = _with_leaves(_with_batches(model, signature, recipe))
        note = "" if recipe.reference else rounded_thresholds(read_graph(path).graph)
        return replace(model, notes=(*model.notes, note)) if note else model
    except (LoweringError, RepositoryError, ManifestError) as error:
        temporary.cleanup()
        hint = _UNLOADED_LIBRARIES if "op_library_filename" in error.hint else error.hint
        raise ConversionError(f"{location} cannot be loaded: {error.message}", hint=hint) from error
    except BaseException:
        temporary.cleanup()
        raise


def _answered_shapes(
    session: Session, signature: Signature, inputs: tuple[InputSpec, ...]
) -> dict[str, tuple[Dim, ...]]:
    """Find outputs that are computed in other shapes than the graph declares, and these shapes.

    Exporters of trees and hand-made graphs declare one column for several, and clients read it in the metadata.
    """
    runs: list[tuple[Mapping[str, AnyArray], Mapping[str, AnyArray]]] = []
    for sizes in _distinct_sizes(signature):
        if runs and not sizes:
            break
        found = synthetic_samples(inputs, 1, sizes, seed=0)
        feeds = {name: np.asarray(array[0]) for name, array in found.items()}
        with suppress(ExecutionError, SignatureError):  # sizes that the graph rejects
            runs.append((feeds, session.run(feeds, [spec.name for spec in signature.outputs])))
    wrong = {}
    for spec in signature.outputs:
        if any(not isinstance(outputs[spec.name], np.ndarray) for _, outputs in runs):
            continue  # maps, which become tensors
        try:
            for given, outputs in runs:
                replace(signature, outputs=(spec,)).check_answers(given, outputs)
        except SignatureError:
            wrong[spec.name] = _shape_of(spec, signature, runs)
    return wrong


def _corrected_rows(path: Path, signature: Signature) -> dict[str, tuple[Dim, ...]]:
    """Shapes of outputs that the file declares with one row, and the signature with a batch: LightGBM's labels."""
    declared = {value.name: value.type.tensor_type.shape.dim for value in read_graph(path).graph.output}
    return {
        spec.name: spec.shape
        for spec in signature.outputs
        if spec.varies and [dim.dim_value for dim in declared.get(spec.name, ())][:1] == [1]
    }


def _distinct_sizes(signature: Signature) -> Iterator[dict[str, dict[int, int]]]:
    """Sizes of the dynamic dimensions of inputs: twice some that tell the symbols apart, then the usual ones."""
    symbols = list(dict.fromkeys(dim for spec in signature.inputs for dim in spec.shape if isinstance(dim, str)))
    for first in (3, 4) if symbols else ():
        yield {
            spec.name: {
                axis: first + 2 * symbols.index(dim) for axis, dim in enumerate(spec.shape) if isinstance(dim, str)
            }
            for spec in signature.inputs
        }
    yield {}


def _shape_of(
    spec: TensorSpec, signature: Signature, runs: Sequence[tuple[Mapping[str, AnyArray], Mapping[str, AnyArray]]]
) -> tuple[Dim, ...]:
    """Describe the shapes in which an output was computed: sizes that stayed, symbols of inputs that they followed."""
    shapes = [outputs[spec.name].shape for _, outputs in runs]
    if len({*map(len, shapes)}) > 1:
        return spec.shape
    followed: dict[tuple[int, ...], Dim] = {}
    for given in signature.inputs:
        for axis, dim in enumerate(given.shape):
            if isinstance(dim, str):
                followed.setdefault(tuple(feeds[given.name].shape[axis] for feeds, _ in runs), dim)
    found: list[Dim] = []
    for axis, sizes in enumerate(zip(*shapes, strict=True)):
        stays = len({*sizes}) == 1
        found.append(followed.get(sizes, sizes[0] if stays else free_dim(spec.name, axis)))
    return tuple(found)


def _corrections(declared: Signature, answered: Signature) -> Iterator[str]:
    for before, after in zip(declared.outputs, answered.outputs, strict=True):
        if before != after:
            yield f"the file declares {before}, and computes {after}: corrected"


def _check_evaluation_mode(model: OnnxModel, inputs: tuple[InputSpec, ...]) -> None:
    """Reject graphs that draw random numbers, or use batch statistics instead of trained ones."""
    hint = f"{EVALUATION_MODE}; {_AS_IT_IS}"
    if draws_numbers(model.path) and not _repeats(model, inputs):
        raise ConversionError(
            f"{model.path} draws random numbers: its outputs differ from run to run and cannot be proven", hint=hint
        )
    if found := find_training(model.path):
        raise ConversionError(
            f"{model.path} is in training mode, and would not return its trained results: {found}", hint=hint
        )


def _repeats(model: OnnxModel, inputs: tuple[InputSpec, ...]) -> bool:
    """Run a graph twice; return False if the outputs differ."""
    feeds = {name: np.asarray(rows[0]) for name, rows in synthetic_samples(inputs, 1, {}, seed=0).items()}
    try:
        first, second = (model.session.run(feeds, model.outputs) for _ in range(2))
    except (ExecutionError, SignatureError):
        return True  # the proof reports unsupported sizes
    return all(
        np.array_equal(first[name], second[name], equal_nan=first[name].dtype.kind == "f") for name in model.outputs
    )


def _with_batches(model: OnnxModel, signature: Signature, recipe: Recipe) -> OnnxModel:
    """Return the source, batched if its rows are independent, else unbatched with the reason."""
    reason = read_mixing(model.path) or without_batch(signature)
    if signature.batchable:
        reason = dependent_rows(model.run, model.run, model.inputs, rounding_limits(model.graph()))
    elif not reason and recipe.batch == "fixed":
        reason = "--batch fixed"
    elif not reason:
        copy = Path(model._temporary.name) / "freed.onnx"  # noqa: SLF001 - its own
        try:
            graph = model.graph()
            freed = replace(model, batch_size=saved_size(signature), freed=graph)
            return replace(freed, freed=free_and_prove(graph, freed.run, freed.inputs, copy))
        except GraphkilnError as error:
            reason = error.message
    if not reason:
        return model
    return replace(model, inputs=_inputs(signature, recipe, 0, model.path, model.session), whole=reason)


def _with_leaves(model: OnnxModel) -> OnnxModel:
    """Add rows that reach the leaves of trees, as XGBoost, LightGBM and CatBoost export them."""
    trees = Trees.of(onnx.load(model.path, load_external_data=False).graph)
    tables = all(len(spec.shape) == 1 and spec.dtype.is_float and not spec.dynamic for spec in model.inputs)
    if trees is None or not tables or model.whole or model.freed:
        return model
    before = Path(model._temporary.name) / "before_trees.onnx"  # noqa: SLF001 - its own
    onnx.save(trees.before(onnx.load(model.path)), before)
    generator = np.random.default_rng(0)
    count = sum(spec.shape[0] for spec in model.inputs)
    columns = [*generator.standard_normal((count, _TRIED + 1))]
    with OnnxRuntimeEngine().build_reference(before) as session:
        rows, note = with_leaves(trees, session.run, model.inputs, columns, generator)
    notes = (*model.notes, note) if note else model.notes
    return replace(model, inputs=with_known(model.inputs, rows), notes=notes)


def open_reference(path: Path, folder: Path) -> Session:
    """Open a reference session, on a copy that emulates 16-bit types where ONNX Runtime lacks kernels.

    If fp64 kernels are missing, ONNX's reference implementation runs the graph, because fp32 is too coarse.
    """
    engine = OnnxRuntimeEngine()
    try:
        return engine.build_reference(path)
    except LoweringError:
        notes = save_runnable(_load(path), folder / path.name)
        if any("fp64" in note for note in notes):
            return ReferenceSession.open(path)
        if notes:
            return engine.build_reference(folder / path.name)
        raise


def _load(path: Path) -> onnx_ir.Model:
    """Load a graph without the types that onnx_ir cannot read."""
    if not read_replaced_outputs(path):
        return load(path)
    model = onnx.load(path)
    with_tensor_outputs(model)
    make_dense(model)
    return tidied(from_proto(model, path))


def _inputs(signature: Signature, recipe: Recipe, first: int, path: Path, session: Session) -> tuple[InputSpec, ...]:
    """Return the input specs with values that the graph knows; `first` is the first dimension of a sample."""
    return _with_words(_with_ranges(_specs(signature, recipe, first), path, session), path, session)


def _with_words(inputs: tuple[InputSpec, ...], path: Path, session: Session) -> tuple[InputSpec, ...]:
    """Add a vocabulary to text inputs: words from the graph, and unknown words if the graph accepts them."""
    if not any(spec.dtype is DType.BYTES for spec in inputs):
        return inputs
    graph = onnx.load(path, load_external_data=False).graph
    words = {spec.name: known_words(graph, spec.name) for spec in inputs if spec.dtype is DType.BYTES}
    for more in (ODD_WORDS, ODD_WORDS[1:], ()):  # some graphs reject empty text, others unknown words
        specs = tuple(
            replace(spec, words=(*words[spec.name], *more) or spec.words) if spec.name in words else spec
            for spec in inputs
        )
        try:
            session.run(synthetic_samples(specs, _TRIED, {}, seed=0))
        except (ExecutionError, SignatureError):
            continue
        return specs
    return specs  # real samples may do


def _with_ranges(inputs: tuple[InputSpec, ...], path: Path, session: Session) -> tuple[InputSpec, ...]:
    """Widen the ranges of integers: all of a short type, and all rows of the table that an index selects from."""
    whole = [spec.name for spec in inputs if spec.dtype.numpy.kind in "iu"]
    if not whole:
        return inputs
    graph = onnx.load(path, load_external_data=False).graph
    tables = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    ranges = {}
    for spec in inputs:
        if spec.name in whole and spec.dtype.numpy.itemsize <= _SHORT_BYTES:
            ends = np.iinfo(str(spec.dtype.numpy))
            ranges[spec.name] = (int(ends.min), int(ends.max) + 1)
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0] in tables and node.input[1] in whole:
            axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
            rows = tables[node.input[0]][axis]
            ranges[node.input[1]] = (0, min(rows, ranges.get(node.input[1], (0, rows))[1]))
    specs = inputs
    for name, (low, high) in ranges.items():
        wider = tuple(replace(spec, low=low, high=high) if spec.name == name else spec for spec in specs)
        specs = wider if _accepts(session, synthetic_samples(wider, 1, {}, seed=0)) else specs
    return specs


def _accepts(session: Session, samples: Mapping[str, AnyArray]) -> bool:
    """Return true if a graph accepts one sample, with or without a batch dimension."""
    for feeds in (samples, {name: np.asarray(rows[0]) for name, rows in samples.items()}):
        with suppress(ExecutionError, SignatureError):
            session.run(feeds)
            return True
    return False


def _specs(signature: Signature, recipe: Recipe, first: int) -> tuple[InputSpec, ...]:
    """Return the input specs; `first` is the first dimension of a sample, 1 after a batch dimension."""
    specs = []
    for spec in signature.inputs:
        if not spec.has_rank:
            raise ConversionError(
                f"the graph does not declare the number of dimensions of input '{spec.name}'",
                hint="write its shape into the graph: onnx.tools.update_model_dims.update_inputs_outputs_dims",
            )
        sizes = sizes_of(spec.name, spec.shape, recipe.shapes)[first:]
        dynamic = {axis: (1, 2 * sizes[axis]) for axis, dim in enumerate(spec.shape[first:]) if isinstance(dim, str)}
        specs.append(InputSpec(name=spec.name, dtype=spec.dtype, shape=sizes, dynamic=dynamic))
    return tuple(specs)


# Vocabulary of a graph: categories and tokens in its nodes, for meaningful synthetic samples.

# Words that are unlikely to be in a vocabulary, to test unknown text.
ODD_WORDS = ("", "unknown", "größe", "日本", "two words", "NUL\0inside")
# Prefixes of attributes with values that a node returns, as opposed to keys.
_ANSWERS = ("classlabels", "values_", "default_")
_MOST_WORDS = 1000


def known_words(graph: onnx.GraphProto, name: str) -> tuple[str, ...]:
    """Return the vocabulary (categories, keys, tokens) of the first nodes downstream of an input that have one."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for value in node.input:
            readers.setdefault(value, []).append(node)
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.STRING}
    words: dict[str, None] = {}
    seen, waiting = {name}, [name]
    while waiting:
        for node in readers.get(waiting.pop(), ()):
            found = dict.fromkeys(_words(node, constants))
            words |= found
            further = [value for value in node.output if not found and value not in seen]
            seen.update(further)
            waiting += further
    return tuple(words)[:_MOST_WORDS]


def _words(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> Iterator[str]:
    for attribute in node.attribute:
        if not attribute.name.startswith(_ANSWERS):
            yield from (word.decode("utf-8", "replace") for word in (*attribute.strings, *attribute.t.string_data))
    for value in node.input:
        if value in constants:
            yield from (word.decode("utf-8", "replace") for word in constants[value].string_data)


@dataclass(frozen=True, slots=True)
class ReferenceSession(Closeable):
    """Session of ONNX's reference implementation in NumPy, which is slow but supports all types."""

    signature: Signature
    _evaluator: ReferenceEvaluator

    @classmethod
    def open(cls, graph: Path) -> ReferenceSession:
        """Load a graph.

        Raises:
            LoweringError: The reference implementation lacks an operator.
        """
        try:
            return cls(read_signature(graph), ReferenceEvaluator(onnx.load(graph)))
        except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
            raise LoweringError(
                f"{graph} has an operator without a reference implementation", attempts=(str(error),)
            ) from error

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Compute outputs; see `engines.base.Session.run`.

        Raises:
            ExecutionError: An operator failed.
        """
        names = [spec.name for spec in self.signature.outputs] if outputs is None else list(outputs)
        limit = current_limit()
        try:
            with limit.computation(_thread.interrupt_main) if limit else nullcontext():
                found = self._evaluator.run(names, dict(feeds))
        except ComputeLimitExceeded:
            raise
        except Exception as error:  # operators in NumPy raise any exception
            raise ExecutionError(f"ONNX's reference implementation failed: {type(error).__name__}: {error}") from error
        return dict(zip(names, map(np.asarray, found), strict=True))

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:  # noqa: ARG002
        """Return an empty placement, since there are no kernels."""
        return Placement(nodes={}, precision="unknown")

    def close(self) -> None:
        """Do nothing."""
