"""What a version's sessions start from: its graph, lowered where a precision is asked for, and what engines compiled.

In a lasting cache everything is built once per machine. One that vanishes with the server holds lowered graphs only, so
that instances share them: compiling for it would be work for nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Literal

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import Engine, Session, SessionConfig
from graphkiln_backend.engines.registry import load_engine
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.onnx_file import read_precision
from graphkiln_backend.repository.version import ModelVersion

_log = logging.getLogger("graphkiln.lowering")

_GRAPH = "model.onnx"
_MEASURED = "measured.json"
_AMP: Literal["O2"] = "O2"
"""Normalizations and reductions stay fp32. Source: NVIDIA's apex, "Opt levels"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A comparison of candidates: the chosen one's name, and the samples per second of each that works."""

    chosen: str
    rates: dict[str, float]


class Artifacts:
    """The artifacts of one version.

    Args:
        version: The version.
        saved: Precision that its graph was saved in.
        cache: Where artifacts are kept.
    """

    def __init__(
        self,
        version: ModelVersion,
        saved: Precision,
        cache: ArtifactCache,
    ) -> None:
        self.saved = saved
        self._version = version
        self._cache = cache
        self._content: dict[str, str] = {}
        self._stamp = version.stamp()

    def graph(self, step: SessionConfig) -> Path:
        """The graph that a step runs: the saved one, or one that the passes lowered.

        Raises:
            CacheError: It is not in the cache and cannot be written.
            ConversionError: The passes fail on it.
        """
        precision = step.precision
        if not (precision and self._lowers(step)):
            return self._version.graph_path
        name = f"{precision}-{_GRAPH}"
        key = self._graph_key(step)
        return self._cache.get("graph", self._model, key, lambda folder: self._lower(precision, folder / name)) / name

    def compiled(self, engine: Engine, step: SessionConfig) -> Path | None:
        """What the engine compiled for a step, or None where nothing is kept.

        Raises:
            CacheError: It is not in the cache and cannot be written.
            LoweringError: The engine refuses the graph.
        """
        identity = engine.identity(step)
        if not self._cache.lasting or not identity:
            return None
        key = {**self._graph_key(step), **identity, "device": hardware.identity(step.device)}

        def build(folder: Path) -> None:
            _log.info("compiling for %s", step)
            engine.compile(self.graph(step), step, folder)
            self.check_unchanged()

        return self._cache.get(step.engine, self._model, key, build)

    def load(self, engine: Engine, step: SessionConfig) -> Session:
        """A session from what was compiled where that is kept, else from the graph.

        Raises:
            GraphkilnError: As `graph`, `compiled` and `Engine.build`.
        """
        compiled = self.compiled(engine, step)
        return engine.build(self.graph(step), step, compiled)

    def measured(
        self, steps: Sequence[SessionConfig], asked: Mapping[str, str], measure: Callable[[], Measured]
    ) -> Measured:
        """What a comparison of candidates came to, on this machine and for these engines; made when it is not known.

        Args:
            steps: The candidates.
            asked: What else a candidate must do to be one.
            measure: Compares them.

        Raises:
            CacheError: It is not in the cache and cannot be written.
            LoweringError: No candidate works.
        """
        key = {**asked, "device": hardware.identity(steps[0].device)}
        for step in steps:
            settings = str(replace(step, reason="", shared_folder=None))
            parts = {**self._graph_key(step), **load_engine(step.engine).identity(step), "step": settings}
            key |= {f"{step}: {name}": value for name, value in parts.items()}

        def build(folder: Path) -> None:
            (folder / _MEASURED).write_text(json.dumps(encode(measure())))

        folder = self._cache.get("choice", self._model, key, build)
        return decode(Measured, json.loads((folder / _MEASURED).read_bytes()))

    @property
    def _model(self) -> str:
        folder = self._version.graph_path.parent
        return f"{folder.parent.name}/{folder.name}"

    def _lowers(self, step: SessionConfig) -> bool:
        return step.precision is not None and step.precision.is_half and step.precision is not self.saved

    def _graph_key(self, step: SessionConfig) -> dict[str, str]:
        """The graph, its weights, and how it is lowered."""
        self._content = self._content or _content(self._version)
        if not (step.precision and self._lowers(step)):
            return self._content
        return {
            **self._content,
            "precision": step.precision,
            "amp": _AMP,
            **{name: version_of(name) for name in ("graphkiln", "onnx-ir", "onnxscript")},
        }

    def _lower(self, precision: Precision, target: Path) -> None:
        # Passes bring onnx_ir, onnxscript and sympy: over a second of imports, which most starts need not pay.
        from graphkiln_backend.passes.base import run_passes
        from graphkiln_backend.passes.graph_file import load, save
        from graphkiln_backend.passes.precision import LowerPrecision

        _log.info("lowering the graph to %s", precision)
        model = load(self._version.graph_path)
        run_passes(model, [LowerPrecision(precision, _AMP)])
        save(model, target)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """What is made of a file that was replaced meanwhile would pass for the old file's.

        Raises:
            LoweringError: It was.
        """
        if self._version.stamp() != self._stamp:
            raise LoweringError(f"{self._version.graph_path} was replaced while it was lowered or served", attempts=())


def saved_precision(version: ModelVersion) -> Precision:
    """The precision that a version was saved in, by its manifest or else by its graph.

    Raises:
        RepositoryError: The graph is damaged.
    """
    conversion = version.manifest.conversion if version.manifest else None
    return conversion.precision if conversion else read_precision(version.graph_path)


def _content(version: ModelVersion) -> dict[str, str]:
    """SHA-256 of the graph and of every file of weights: the manifest's, or those of all files in its folder."""
    if manifest := version.manifest:
        return {"graph": manifest.sha256, **{f"weights {name}": sha256 for name, sha256 in manifest.weights.items()}}
    folder = version.graph_path.parent
    beside = sorted(path for path in folder.rglob("*") if path.is_file() and path != version.graph_path)
    content = {f"weights {path.relative_to(folder)}": sha256_of(path) for path in beside}
    return {"graph": sha256_of(version.graph_path), **content}
