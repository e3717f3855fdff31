"""Artifacts of a version: its graph, lowered where a precision is requested, and what engines compiled of it.

In a lasting cache everything is built once per machine. One that vanishes with the server holds lowered graphs only, so
that instances share them: compiling for it would be work for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import Engine, SessionConfig
from graphkiln_backend.engines.registry import load_engine
from graphkiln_backend.graph.errors import LoweringError, RepositoryError
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.modules import version_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.remembered import (
    CHOICE,
    OBSERVATIONS,
    Measurement,
    Observations,
    RememberedFact,
    recall,
)
from graphkiln_backend.repository.onnx_file import (
    graph_sha256,
    read_precision,
    read_replaced_outputs,
    save_with_tensor_outputs,
)
from graphkiln_backend.repository.version import ModelVersion

if TYPE_CHECKING:
    from graphkiln_backend.repository.tensor_outputs import ReplacedOutput

_log = logging.getLogger("graphkiln.lowering")

_GRAPH = "model.onnx"
_AMP: Literal["O2"] = "O2"  # normalizations and reductions stay fp32. Source: NVIDIA's apex, "Opt levels".


class Artifacts:
    """The artifacts of one version.

    Args:
        version: The version.
        saved: Precision that its graph was saved in.
        cache: Keeps artifacts.
    """

    def __init__(self, version: ModelVersion, saved: Precision, cache: ArtifactCache) -> None:
        self.version = version
        self.saved = saved
        self.cache = cache
        self._content: dict[str, str] = {}
        self._stamp = version.stamp()

    @cached_property
    def replaced(self) -> tuple[ReplacedOutput, ...]:
        """Outputs of the saved graph that are no tensors; a converted graph has no such outputs."""
        if self.version.manifest:
            return ()
        try:
            return read_replaced_outputs(self.version.graph_path)
        except RepositoryError:
            return ()  # damaged: the engine fails when it loads it

    def prepare_graph(self, config: SessionConfig) -> Path:
        """Return the graph that a session runs: the saved one, or one that the passes lowered to its precision.

        Raises:
            CacheError: It is not in the cache and cannot be written.
            ConversionError: The passes fail on it.
        """
        precision = self._lowered_precision(config)
        if precision is None:
            return self._tensor_graph()
        name = f"{precision}-{_GRAPH}"

        def build(folder: Path) -> None:
            self._lower(precision, folder / name)

        return self.cache.get("graph", self.model, self.graph_key(config), build) / name

    def prepare_compiled(self, engine: Engine, config: SessionConfig) -> Path | None:
        """Return what the engine compiled for a session, or None where nothing is kept.

        Raises:
            CacheError: It is not in the cache and cannot be written.
            LoweringError: The engine refuses the graph.
        """
        identity = engine.identity(config)
        if not self.cache.lasting or not identity:
            return None
        key = {**self.graph_key(config), **identity, "device": hardware.identity(config.device)}

        def build(folder: Path) -> None:
            _log.info("compiling for %s", config)
            engine.compile(self.prepare_graph(config), config, folder)
            self.check_unchanged()

        return self.cache.get_lasting(config.engine, self.model, key, build)

    @contextmanager
    def recall_choice(
        self, configs: Sequence[SessionConfig], conditions: Mapping[str, str]
    ) -> Iterator[RememberedFact[Measurement]]:
        """Look for the measured choice between candidates on this machine, and hold its lock meanwhile.

        Args:
            configs: The candidates.
            conditions: Everything else that the choice depends on.
        """
        key = {**conditions, "device": hardware.identity(configs[0].device)}
        for config in configs:
            # "step" is what a configuration was called when the first caches were filled.
            parts = {**self.graph_key(config), **load_engine(config.engine).identity(config), "step": str(config)}
            key |= {f"{config}: {name}": value for name, value in parts.items()}
        with recall(CHOICE, self.cache, self.model, key, "the choice of an engine") as fact:
            yield fact

    @contextmanager
    def recall_observations(
        self, engine: Engine, config: SessionConfig, conditions: Mapping[str, str]
    ) -> Iterator[RememberedFact[Observations] | None]:
        """Look for what was found out about a session, and hold its lock meanwhile.

        Args:
            engine: Builds it.
            config: How to run it.
            conditions: Everything else that the observations depend on.

        Yields:
            The entry; None where the cache does not last, or the engine has no release that could be named.
        """
        identity = engine.identity(config)
        if not self.cache.lasting or not identity:
            yield None
            return
        session = {"session": f"{config}, {config.threads} threads, {sorted(config.options.items())}"}
        session |= {"cuts": f"{list(config.cuts)}"} if config.cuts else {}
        device = {"device": hardware.identity(config.device)}
        key = {**self.graph_key(config), **identity, **device, **session, **conditions}
        with recall(OBSERVATIONS, self.cache, self.model, key, f"what was found out about {config}") as fact:
            yield fact

    @property
    def model(self) -> str:
        """Name of model and version, for people."""
        folder = self.version.graph_path.parent
        return f"{folder.parent.name}/{folder.name}"

    def _tensor_graph(self) -> Path:
        """The saved graph; where outputs of it are no tensors, a copy without them."""
        if not self.replaced:
            return self.version.graph_path

        def build(folder: Path) -> None:
            save_with_tensor_outputs(self.version.graph_path, folder / _GRAPH)
            self.check_unchanged()

        return self.cache.get("graph", self.model, self._saved_key(), build) / _GRAPH

    def _saved_key(self) -> dict[str, str]:
        """The graph that every session starts from, and its weights."""
        self._content = self._content or content_of(self.version)
        if not self.replaced:
            return self._content
        return {**self._content, "outputs": "tensors", "graphkiln": version_of("graphkiln")}

    def _lowered_precision(self, config: SessionConfig) -> Precision | None:
        """The precision that the passes lower the graph to, or None where it runs as it was saved."""
        precision = config.precision
        return precision if precision and precision.is_half and precision is not self.saved else None

    def graph_key(self, config: SessionConfig) -> dict[str, str]:
        """Identify the graph that a session runs: the saved one, its weights, and how it is lowered."""
        saved = self._saved_key()
        precision = self._lowered_precision(config)
        if precision is None:
            return saved
        libraries = {name: version_of(name) for name in ("graphkiln", "onnx-ir", "onnxscript")}
        return {**saved, "precision": precision, "amp": _AMP, **libraries}

    def _lower(self, precision: Precision, target: Path) -> None:
        # Passes bring onnx_ir, onnxscript and sympy: over a second of imports, which most starts need not pay.
        from graphkiln_backend.passes.base import run_passes
        from graphkiln_backend.passes.graph_file import load, save
        from graphkiln_backend.passes.precision import LowerPrecision

        _log.info("lowering the graph to %s", precision)
        model = load(self._tensor_graph())
        run_passes(model, [LowerPrecision(precision, _AMP)])
        save(model, target)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Check that the graph's file was not replaced: what is made of another one would pass for its own.

        Raises:
            LoweringError: It was replaced.
        """
        if self.version.stamp() != self._stamp:
            raise LoweringError(f"{self.version.graph_path} was replaced while it was lowered or served", attempts=())


def saved_precision(version: ModelVersion) -> Precision:
    """Return the precision that a version was saved in, by its manifest or else by its graph.

    Raises:
        RepositoryError: The graph is damaged.
    """
    conversion = version.manifest.conversion if version.manifest else None
    return conversion.precision if conversion else read_precision(version.graph_path)


def content_of(version: ModelVersion) -> dict[str, str]:
    """Return the SHA-256 of graph and weights: those of the manifest, or of all files in the folder."""
    if manifest := version.manifest:
        return {"graph": manifest.sha256, **{f"weights {name}": sha256 for name, sha256 in manifest.weights.items()}}
    folder = version.graph_path.parent
    beside = sorted(path for path in folder.rglob("*") if path.is_file() and path != version.graph_path)
    content = {f"weights {path.relative_to(folder)}": sha256_of(path) for path in beside}
    return {"graph": graph_sha256(version.graph_path), **content}
