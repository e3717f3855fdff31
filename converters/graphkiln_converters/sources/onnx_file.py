"""`FILE.onnx`: an existing graph; its own outputs, computed without optimization, are the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_ir
from onnxscript import version_converter

from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, LoweringError, ManifestError, RepositoryError
from graphkiln_backend.graph.signature import TensorSpec
from graphkiln_backend.passes.graph_file import OPSET, load
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_converters.kernels import save_runnable
from graphkiln_converters.sources.base import InputSpec, SourceOptions
from graphkiln_converters.sources.reference_session import ReferenceSession

_DEFAULT_SIZE = 8
"""Of a dynamic dimension whose size is not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxModel:
    """A graph file as a `SourceModel`.

    Attributes:
        path: The file.
        session: Its reference session.
        inputs: Its inputs.
    """

    path: Path
    session: Session
    inputs: tuple[InputSpec, ...]
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
        return self.session.run(feeds)

    def export(self, dynamic: Mapping[str, Mapping[int, tuple[int, int]]]) -> onnx_ir.Model:  # noqa: ARG002
        """See `SourceModel.export`; the graph's own dynamic dimensions stay as they are, old opsets are converted."""
        model = load(self.path)
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
        read_signature(path)  # a pipe, weights outside of its folder, ...: no runtime is to open that
        session, temporary = _open_reference(path)
    except (LoweringError, RepositoryError, ManifestError) as error:
        raise ConversionError(f"{location} cannot be loaded: {error.message}", hint=error.hint) from error
    signature = session.signature
    if not signature.batchable:
        shapes = ", ".join(map(str, (*signature.inputs, *signature.outputs)))
        session.close()
        raise ConversionError(
            f"{location} has no dynamic batch in every input and output: {shapes}",
            hint="export it with a dynamic first dimension; served as it is, its fixed batch is padded or split",
        )
    inputs = tuple(_spec(spec, options) for spec in signature.inputs)
    return OnnxModel(path=path, session=session, inputs=inputs, _temporary=temporary)


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
            notes = save_runnable(load(path), copy)
            if any("fp64" in note for note in notes):
                return ReferenceSession.open(path), temporary
            if notes:
                return engine.build_reference(copy), temporary
        except BaseException:
            temporary.cleanup()
            raise
        temporary.cleanup()
        raise


def _spec(spec: TensorSpec, options: SourceOptions) -> InputSpec:
    given = options.shapes.get(spec.name) or options.shapes.get("")
    sizes = given or tuple(dim if isinstance(dim, int) else _DEFAULT_SIZE for dim in spec.shape[1:])
    dynamic = {axis: (1, 2 * sizes[axis]) for axis, dim in enumerate(spec.shape[1:]) if isinstance(dim, str)}
    return InputSpec(name=spec.name, dtype=spec.dtype, shape=sizes, dynamic=dynamic)
