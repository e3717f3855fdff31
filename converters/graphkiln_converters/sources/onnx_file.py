"""`FILE.onnx`: existing graphs. The reference is the same graph, run without optimization."""

from __future__ import annotations

import _thread
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
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
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.passes.graph_file import from_proto, load, make_dense, tidied
from graphkiln_backend.repository.onnx_file import read_mixing, read_replaced_outputs, read_signature
from graphkiln_backend.repository.tensor_outputs import ReplacedOutput, with_tensor_outputs
from graphkiln_backend.repository.training_mode import EVALUATION_MODE, draws_numbers, find_training
from graphkiln_backend.system.closing import Closeable
from graphkiln_converters.recipe import Recipe, check_file
from graphkiln_converters.runnable import raise_opset, save_runnable
from graphkiln_converters.sources.base import USUAL_SIZE, InputSpec, SourceModel, run_alone, sizes_of, synthetic_samples
from graphkiln_converters.sources.batches import (
    dependent_rows,
    free_and_prove,
    rounding_limits,
    saved_size,
    without_batch,
)

_UNLOADED_LIBRARIES = (
    "convert loads no libraries of custom operators: serve such a graph as it is, as STORE/NAME/1/model.onnx beside a "
    'config.pbtxt with model_operations { op_library_filename: "/path/to/library.so" }'
)
_AS_IT_IS = "as it is, it is served from STORE/NAME/1/model.onnx"
# Number of synthetic text samples that a graph must accept.
_TRIED = 64


@dataclass(frozen=True, kw_only=True)
class OnnxModel(SourceModel):
    """A graph file.

    Attributes:
        path: The file.
        session: Reference session.
        replaced: Outputs that are not tensors.
        outputs: Output names of the exported graph.
        freed: The graph with a dynamic batch in place of a fixed one, or None.
    """

    takes_fixed_batch = True

    path: Path
    session: Session
    replaced: tuple[ReplacedOutput, ...] = ()
    outputs: tuple[str, ...] = ()
    freed: onnx_ir.Model | None = None
    _temporary: TemporaryDirectory[str]

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; a graph with a fixed batch computes each row alone, repeated to fill the batch."""
        try:
            run = partial(self.session.run, outputs=self.outputs)
            found = run_alone(run, feeds, self.batch_size) if self.freed else run(feeds)
        except (ExecutionError, SignatureError) as error:
            raise ConversionError(
                f"{self.path} refuses the samples: {error}",
                hint="provide real samples: --samples FILE.npz, saved with numpy.savez(FILE, INPUT_0=..., ...)",
            ) from error
        return found | {output.name: output.to_tensor(found[output.name]) for output in self.replaced if output.classes}

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`; dynamic dimensions are kept, and old opsets are converted."""
        if self.freed:
            return self.freed
        model = _load(self.path)
        raise_opset(model)
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
        signature = read_signature(path)  # rejects pipes and weights outside the folder before a runtime opens them
        _check_ranks(signature, path)
        replaced = read_replaced_outputs(path)
        session = _open_reference(path, Path(temporary.name))
        model = OnnxModel(
            description=location,
            libraries=("onnx", "onnxruntime"),
            path=path,
            session=session,
            inputs=_with_words(_specs(signature, recipe, 1), path, session),
            notes=tuple(map(str, replaced)),
            replaced=replaced,
            outputs=tuple(spec.name for spec in signature.outputs),
            _temporary=temporary,
        )
        if draws_numbers(path):
            _check_repeatable(model, _specs(signature, recipe, 0))
        _check_trained(path)
        return _with_batches(model, signature, recipe)
    except (LoweringError, RepositoryError, ManifestError) as error:
        temporary.cleanup()
        hint = _UNLOADED_LIBRARIES if "op_library_filename" in error.hint else error.hint
        raise ConversionError(f"{location} cannot be loaded: {error.message}", hint=hint) from error
    except BaseException:
        temporary.cleanup()
        raise


def _check_ranks(signature: Signature, path: Path) -> None:
    for spec in signature.inputs:
        if not spec.has_rank:
            raise ConversionError(
                f"{path} does not say how many dimensions input '{spec.name}' has",
                hint="write its shape into the graph: onnx.tools.update_model_dims.update_inputs_outputs_dims",
            )


def _check_repeatable(model: OnnxModel, inputs: tuple[InputSpec, ...]) -> None:
    """Reject graphs that draw random numbers, whose results can be neither proven nor replayed."""
    if not _repeats(model, {name: np.asarray(a[0]) for name, a in synthetic_samples(inputs, 1, {}, seed=0).items()}):
        reason = "draws random numbers: its outputs differ from run to run and cannot be proven"
        raise ConversionError(f"{model.path} {reason}", hint=f"{EVALUATION_MODE}; {_AS_IT_IS}")


def _check_trained(path: Path) -> None:
    """Reject graphs in training mode, which use batch statistics instead of trained ones."""
    if found := find_training(path):
        raise ConversionError(
            f"{path} is in training mode, and would not return its trained results: {found}",
            hint=f"{EVALUATION_MODE}; {_AS_IT_IS}",
        )


def _repeats(model: OnnxModel, feeds: Mapping[str, AnyArray]) -> bool:
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
        reason = dependent_rows(model.run, model.run, model.inputs, rounding_limits(_load(model.path)))
    elif not reason:
        made = _freed(model, saved_size(signature)) if recipe.batch == "free" else "--batch fixed"
        if isinstance(made, OnnxModel):
            return made
        reason = made
    if not reason:
        return model
    return replace(model, inputs=_with_words(_specs(signature, recipe, 0), model.path, model.session), whole=reason)


def _freed(source: OnnxModel, batch_size: int) -> OnnxModel | str:
    """Return the source with a verified dynamic batch, or the reason why that is not possible."""
    copy = Path(source._temporary.name) / "freed.onnx"  # noqa: SLF001 - its own
    try:
        graph = _load(source.path)
        freed = replace(source, batch_size=batch_size, freed=graph)
        return replace(freed, freed=free_and_prove(graph, freed.run, freed.inputs, copy))
    except GraphkilnError as error:
        return error.message


def _open_reference(path: Path, folder: Path) -> Session:
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


def _with_words(inputs: tuple[InputSpec, ...], path: Path, session: Session) -> tuple[InputSpec, ...]:
    """Add a vocabulary to text inputs: words from the graph, and unknown words if the graph accepts them."""
    if not any(spec.dtype is DType.BYTES for spec in inputs):
        return inputs
    graph = onnx.load(path, load_external_data=False).graph
    words = {spec.name: known_words(graph, spec.name) for spec in inputs if spec.dtype is DType.BYTES}
    for more in (ODD_WORDS, ODD_WORDS[1:], ()):  # some graphs reject empty text, others unknown words
        specs = tuple(_with_text(spec, (*words.get(spec.name, ()), *more)) for spec in inputs)
        try:
            session.run(synthetic_samples(specs, _TRIED, {}, seed=0))
        except (ExecutionError, SignatureError):
            continue
        return specs
    return specs  # real samples may do


def _with_text(spec: InputSpec, words: tuple[str, ...]) -> InputSpec:
    return replace(spec, words=words or spec.words) if spec.dtype is DType.BYTES else spec


def _specs(signature: Signature, recipe: Recipe, first: int) -> tuple[InputSpec, ...]:
    """Return the input specs; `first` is the first dimension of a sample, 1 after a batch dimension."""
    return tuple(_spec(spec, recipe, first) for spec in signature.inputs)


def _spec(spec: TensorSpec, recipe: Recipe, first: int) -> InputSpec:
    dims = spec.shape[first:]
    if spec.has_rank:
        sizes = sizes_of(spec.name, spec.shape, recipe.shapes)[first:]
    else:  # any size is valid
        sizes = recipe.shapes.get(spec.name) or recipe.shapes.get("") or (USUAL_SIZE,) * len(dims)
    dynamic = {axis: (1, 2 * sizes[axis]) for axis, dim in enumerate(dims) if isinstance(dim, str)}
    return InputSpec(name=spec.name, dtype=spec.dtype, shape=sizes, dynamic=dynamic)


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
