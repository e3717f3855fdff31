"""`FILE.onnx`: an existing graph; its own outputs, computed without optimization, are the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
import onnx_ir
from onnxscript import version_converter

from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import (
    ConversionError,
    ExecutionError,
    LoweringError,
    ManifestError,
    RepositoryError,
    SignatureError,
)
from graphkiln_backend.graph.signature import TensorSpec
from graphkiln_backend.passes.graph_file import OPSET, load
from graphkiln_backend.repository.onnx_file import read_replaced_outputs, read_signature
from graphkiln_backend.repository.tensor_outputs import ReplacedOutput, with_tensor_outputs
from graphkiln_converters.kernels import save_runnable
from graphkiln_converters.sources.base import InputSpec, SourceOptions, synthetic_samples
from graphkiln_converters.sources.reference_session import ReferenceSession
from graphkiln_converters.sources.vocabulary import ODD_WORDS, known_words

_DEFAULT_SIZE = 8
"""Of a dynamic dimension whose size is not given."""
_TRIED = 64
"""Samples of made-up text that a graph must take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxModel:
    """A graph file as a `SourceModel`.

    Attributes:
        path: The file.
        session: Its reference session.
        inputs: Its inputs.
        replaced: Its outputs that are no tensors.
        outputs: Names of the outputs that the exported graph has.
    """

    path: Path
    session: Session
    inputs: tuple[InputSpec, ...]
    replaced: tuple[ReplacedOutput, ...] = ()
    outputs: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ("onnx", "onnxruntime")
    preprocess: None = None
    labels: tuple[str, ...] = field(default=())
    _temporary: TemporaryDirectory[str] | None = None

    @property
    def description(self) -> str:
        """The file's name."""
        return str(self.path)

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`."""
        try:
            found = self.session.run(feeds, self.outputs)
        except (ExecutionError, SignatureError) as error:
            raise ConversionError(
                f"{self.path} refuses the samples: {error}",
                hint="give real ones: --samples FILE.npz, saved with numpy.savez(FILE, INPUT_0=..., ...)",
            ) from error
        return found | {output.name: output.to_tensor(found[output.name]) for output in self.replaced if output.classes}

    @property
    def notes(self) -> tuple[str, ...]:
        """See `NotedSource`."""
        return tuple(map(str, self.replaced))

    def export(self, dynamic: Mapping[str, Mapping[int, tuple[int, int]]]) -> onnx_ir.Model:  # noqa: ARG002
        """See `SourceModel.export`; the graph's own dynamic dimensions stay as they are, old opsets are converted."""
        model = _load(self.path)
        if (model.opset_imports.get("") or OPSET) < OPSET:
            version_converter.convert_version(model, OPSET, fallback=True)
        return model

    def close(self) -> None:
        """See `SourceModel.close`."""
        self.session.close()
        if self._temporary:
            self._temporary.cleanup()


def open_source(location: str, options: SourceOptions) -> OnnxModel:
    """Loads a graph.

    Raises:
        ConversionError: The file is missing or damaged, its batch is fixed, or an input is text.
    """
    if options.weights:
        raise ConversionError(f"{location} holds its own weights", hint="leave --weights out")
    path = Path(location)
    if path.is_dir() or not path.exists():
        raise ConversionError(f"there is no file {location}")
    try:
        signature = read_signature(path)  # a pipe, weights outside of its folder, ...: no runtime is to open that
        replaced = read_replaced_outputs(path)
        session, temporary = _open_reference(path)
    except (LoweringError, RepositoryError, ManifestError) as error:
        raise ConversionError(f"{location} cannot be loaded: {error.message}", hint=error.hint) from error
    if not signature.batchable:
        shapes = ", ".join(map(str, (*signature.inputs, *signature.outputs)))
        session.close()
        raise ConversionError(
            f"{location} has no dynamic batch in every input and output: {shapes}",
            hint="export it with a dynamic first dimension; served as it is, its fixed batch is padded or split",
        )
    inputs = _with_words(tuple(_spec(spec, options) for spec in signature.inputs), path, session)
    outputs = tuple(spec.name for spec in signature.outputs)
    return OnnxModel(
        path=path, session=session, inputs=inputs, replaced=replaced, outputs=outputs, _temporary=temporary
    )


def _open_reference(path: Path) -> tuple[Session, TemporaryDirectory[str] | None]:
    """A session of the graph, or of a copy of it: with fp32 kernels where ONNX Runtime has none for a type.

    Beside fp64, fp32 would be no reference: where kernels for that are missing, ONNX's own implementation runs.

    Raises:
        LoweringError: There is no way to run it.
    """
    engine = OnnxRuntimeEngine()
    try:
        return engine.build_reference(path), None
    except LoweringError:
        temporary = TemporaryDirectory(prefix="graphkiln-")
        copy = Path(temporary.name) / path.name
        try:
            notes = save_runnable(_load(path), copy)
            if any("fp64" in note for note in notes):
                return ReferenceSession.open(path), temporary
            if notes:
                return engine.build_reference(copy), temporary
        except BaseException:
            temporary.cleanup()
            raise
        temporary.cleanup()
        raise


def _load(path: Path) -> onnx_ir.Model:
    """A graph, without the types that onnx_ir cannot read."""
    if not read_replaced_outputs(path):
        return load(path)
    model = onnx.load(path)
    with_tensor_outputs(model)
    return onnx_ir.from_proto(model)


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


def _spec(spec: TensorSpec, options: SourceOptions) -> InputSpec:
    given = options.shapes.get(spec.name) or options.shapes.get("")
    sizes = given or tuple(dim if isinstance(dim, int) else _DEFAULT_SIZE for dim in spec.shape[1:])
    dynamic = {axis: (1, 2 * sizes[axis]) for axis, dim in enumerate(spec.shape[1:]) if isinstance(dim, str)}
    return InputSpec(name=spec.name, dtype=spec.dtype, shape=sizes, dynamic=dynamic)
