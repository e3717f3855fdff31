"""`FILE.onnx`: an existing graph; its own outputs, computed without optimization, are the reference."""

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
# Samples of made-up text that a graph must take.
_TRIED = 64


@dataclass(frozen=True, kw_only=True)
class OnnxModel(SourceModel):
    """A graph file.

    Attributes:
        path: The file.
        session: Its reference session.
        replaced: Its outputs that are no tensors.
        outputs: Names of the outputs that the exported graph has.
        freed: The graph with its batch made to vary, or None.
    """

    takes_fixed_batch = True

    path: Path
    session: Session
    replaced: tuple[ReplacedOutput, ...] = ()
    outputs: tuple[str, ...] = ()
    freed: onnx_ir.Model | None = None
    _temporary: TemporaryDirectory[str]

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; a graph that was saved with a batch computes row by row, a row filling the batch."""
        try:
            run = partial(self.session.run, outputs=self.outputs)
            found = run_alone(run, feeds, self.batch_size) if self.freed else run(feeds)
        except (ExecutionError, SignatureError) as error:
            raise ConversionError(
                f"{self.path} refuses the samples: {error}",
                hint="give real ones: --samples FILE.npz, saved with numpy.savez(FILE, INPUT_0=..., ...)",
            ) from error
        return found | {output.name: output.to_tensor(found[output.name]) for output in self.replaced if output.classes}

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`; the graph's own dynamic dimensions stay as they are, old opsets are converted."""
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
        ConversionError: The file is missing or damaged, its batch is fixed, or an input is text.
    """
    path = Path(location)
    check_file(path)
    temporary = TemporaryDirectory(prefix="graphkiln-")
    try:
        signature = read_signature(path)  # a pipe, weights outside of its folder, ...: no runtime is to open that
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
    """Refuse graphs that draw random numbers: neither proof nor replay could tell a draw from a fault."""
    if not _repeats(model, {name: np.asarray(a[0]) for name, a in synthetic_samples(inputs, 1, {}, seed=0).items()}):
        reason = "draws random numbers: it returns something else each time, which cannot be proven"
        raise ConversionError(f"{model.path} {reason}", hint=f"{EVALUATION_MODE}; {_AS_IT_IS}")


def _check_trained(path: Path) -> None:
    """Refuse graphs in training mode: statistics of each request are not what the model has learned."""
    if found := find_training(path):
        raise ConversionError(
            f"{path} is in training mode, in which it does not compute what it has learned: {found}",
            hint=f"{EVALUATION_MODE}; {_AS_IT_IS}",
        )


def _repeats(model: OnnxModel, feeds: Mapping[str, AnyArray]) -> bool:
    try:
        first, second = (model.session.run(feeds, model.outputs) for _ in range(2))
    except (ExecutionError, SignatureError):
        return True  # of sizes that it does not take, the proof tells
    return all(
        np.array_equal(first[name], second[name], equal_nan=first[name].dtype.kind == "f") for name in model.outputs
    )


def _with_batches(model: OnnxModel, signature: Signature, recipe: Recipe) -> OnnxModel:
    """The source, batched where its rows are independent, else whole, with the reason."""
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
    """The source with its fixed batch made to vary and proven, or why that cannot be."""
    copy = Path(source._temporary.name) / "freed.onnx"  # noqa: SLF001 - its own
    try:
        graph = _load(source.path)
        freed = replace(source, batch_size=batch_size, freed=graph)
        return replace(freed, freed=free_and_prove(graph, freed.run, freed.inputs, copy))
    except GraphkilnError as error:
        return error.message


def _open_reference(path: Path, folder: Path) -> Session:
    """A session of the graph, or of a copy of it: with fp32 kernels where ONNX Runtime has none for a type.

    Beside fp64, fp32 would be no reference: where kernels for that are missing, ONNX's own implementation runs.
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
    """A graph, without the types that onnx_ir cannot read."""
    if not read_replaced_outputs(path):
        return load(path)
    model = onnx.load(path)
    with_tensor_outputs(model)
    make_dense(model)
    return tidied(from_proto(model, path))


def _with_words(inputs: tuple[InputSpec, ...], path: Path, session: Session) -> tuple[InputSpec, ...]:
    """Inputs whose synthetic text the graph knows; with text that it does not know, where it takes that, too."""
    if not any(spec.dtype is DType.BYTES for spec in inputs):
        return inputs
    graph = onnx.load(path, load_external_data=False).graph
    words = {spec.name: known_words(graph, spec.name) for spec in inputs if spec.dtype is DType.BYTES}
    for more in (ODD_WORDS, ODD_WORDS[1:], ()):  # some graphs take no empty text, others none that they do not know
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
    """The inputs; the dimensions of a sample begin with the first one or, behind the batch, with the second."""
    return tuple(_spec(spec, recipe, first) for spec in signature.inputs)


def _spec(spec: TensorSpec, recipe: Recipe, first: int) -> InputSpec:
    dims = spec.shape[first:]
    if spec.has_rank:
        sizes = sizes_of(spec.name, spec.shape, recipe.shapes)[first:]
    else:  # any number of them is as good as another
        sizes = recipe.shapes.get(spec.name) or recipe.shapes.get("") or (USUAL_SIZE,) * len(dims)
    dynamic = {axis: (1, 2 * sizes[axis]) for axis, dim in enumerate(dims) if isinstance(dim, str)}
    return InputSpec(name=spec.name, dtype=spec.dtype, shape=sizes, dynamic=dynamic)


# Texts that a graph knows: the categories and tokens that its nodes hold, for samples that mean something to it.

# Unlikely categories: they show what a graph makes of text that it does not know.
ODD_WORDS = ("", "unknown", "größe", "日本", "two words", "NUL\0inside")
# Start of the names of attributes that hold what a node returns, not what it is asked.
_ANSWERS = ("classlabels", "values_", "default_")
_MOST_WORDS = 1000


def known_words(graph: onnx.GraphProto, name: str) -> tuple[str, ...]:
    """The texts that the first nodes know that read an input, or what was made of it: categories, keys, tokens.

    Args:
        graph: The graph.
        name: The input.
    """
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


# Runs a graph with ONNX's own implementation of its operators, in numpy: slow, and of every type.


@dataclass(frozen=True, slots=True)
class ReferenceSession(Closeable):
    """A graph that ONNX's reference implementation runs; see `engines.base.Session`."""

    signature: Signature
    _evaluator: ReferenceEvaluator

    @classmethod
    def open(cls, graph: Path) -> ReferenceSession:
        """Load a graph.

        Raises:
            LoweringError: It has an operator that the implementation does not know.
        """
        try:
            return cls(read_signature(graph), ReferenceEvaluator(onnx.load(graph)))
        except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
            raise LoweringError(f"{graph} cannot be computed in its own type", attempts=(str(error),)) from error

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
        except Exception as error:  # an operator in numpy raises anything
            raise ExecutionError(f"ONNX's reference implementation failed: {type(error).__name__}: {error}") from error
        return dict(zip(names, map(np.asarray, found), strict=True))

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:  # noqa: ARG002
        """Nothing of it is a kernel."""
        return Placement(nodes={}, precision="unknown")

    def close(self) -> None:
        """Nothing to free."""
