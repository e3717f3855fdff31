"""Artifacts of a version in the artifact cache: lowered graphs, compiled graphs, and measured facts.

In a lasting cache everything is built once per machine. A cache that is deleted with the server holds only lowered
graphs, which instances share: compiling for a single run would not pay.

Facts are JSON files. Their key names everything that the fact depends on, and the version of its kind, so that a change
of the rules invalidates old entries and an edit of the source does not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from graphkiln_backend.cache.store import ArtifactCache, Reservation
from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import Engine, Placement, SessionConfig
from graphkiln_backend.engines.registry import load_engine
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import CacheError, LoweringError, ManifestError, RepositoryError
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.modules import version_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.onnx_file import (
    GraphFacts,
    graph_sha256,
    read_precision,
    read_replaced_outputs,
    save_with_tensor_outputs,
)
from graphkiln_backend.repository.openvino_ir import read_ir
from graphkiln_backend.repository.version import GraphFormat, ModelVersion

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from graphkiln_backend.repository.tensor_outputs import ReplacedOutput

T = TypeVar("T", bound="DataclassInstance")

_log = logging.getLogger("graphkiln.lowering")

_GRAPH = "model.onnx"
_AMP: Literal["O2"] = "O2"  # normalizations and reductions stay fp32. Source: NVIDIA's apex, "Opt levels".


@dataclass(frozen=True, kw_only=True, slots=True)
class FileHash:
    """SHA-256 of a file, hexadecimal."""

    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Comparison of candidates.

    Attributes:
        chosen: Name of the fastest candidate.
        rates: Samples per second by candidate; empty if the graph could not be run.
    """

    chosen: str
    rates: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """Facts about every session with the same graph, engine and configuration.

    Attributes:
        complete: False for a session that was not observed yet.
        placed: Kernels that ran, or None if they could not be read back.
        mixed: Reason why the rows of several requests must not share a batch, or empty.
        repeats: Whether repeated requests gave identical bits.
        warmed: Batch sizes worth warming up, in order; None if warming up failed.
    """

    complete: bool = False
    placed: Placement | None = None
    mixed: str = ""
    repeats: bool = False
    warmed: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind(Generic[T]):
    """A kind of fact.

    Attributes:
        name: Kind of its cache entries.
        file: File name in an entry.
        record: Class of the fact.
        version: Part of the key; empty for entries that never had one.
    """

    name: str
    file: str
    record: type[T]
    version: str


# Raise a version when the rules that produce the fact or the fields of its class change. These files have the rules:
# - hash of a file by its `stamp_of`: `importing.py`
FILE_HASH = Kind(name="sha256", file="sha256.json", record=FileHash, version="1")
# - signature and precision of a graph: `repository/onnx_file.py`
GRAPH_FACTS = Kind(name="facts", file="facts.json", record=GraphFacts, version="1")
# - placement: the engines; dependent rows: `trial.py`, `repository/row_mixing.py`, `training_mode.py`; warm-up sizes:
#   `warmup.py`
OBSERVATIONS = Kind(name="observations", file="observations.json", record=Observations, version="1")
# - fastest session or batch size; without a version since the first release
CHOICE = Kind(name="choice", file="measured.json", record=Measurement, version="")


class RememberedFact(Generic[T]):
    """Cache entry of one fact, with its lock held; made by `recall`."""

    def __init__(self, kind: Kind[T], reservation: Reservation | None, what: str) -> None:
        self._kind = kind
        self._reservation = reservation
        self._what = what
        self.value: T | None = self._read()

    @property
    def found_at(self) -> datetime:
        """Time of the cached fact, or now if there is none (UTC)."""
        if self.value is None or self._reservation is None or self._reservation.path is None:
            return datetime.now(UTC)
        return datetime.fromtimestamp((self._reservation.path / self._kind.file).stat().st_mtime, UTC)

    def keep(self, value: T) -> None:
        """Write the fact unless the entry exists; log a cache that cannot be written."""
        if self._reservation is None or self._reservation.path:
            return
        try:
            with self._reservation.write() as folder:
                (folder / self._kind.file).write_text(json.dumps(encode(value)))
        except CacheError as error:
            _log_uncached(self._what, error)

    def _read(self) -> T | None:
        path = self._reservation.path if self._reservation else None
        if path is None:
            return None
        try:
            return decode(self._kind.record, json.loads((path / self._kind.file).read_bytes()))
        except (OSError, ValueError, ManifestError) as error:
            _log.warning("cannot read %s in %s, measuring again: %s", self._kind.file, path, error)
            return None


@contextmanager
def recall(
    kind: Kind[T], cache: ArtifactCache, model: str, key: Mapping[str, str], what: str = ""
) -> Iterator[RememberedFact[T]]:
    """Look up a fact, and hold its lock for the block, so that only one process computes it.

    Args:
        kind: Kind of the fact.
        cache: The cache.
        model: Model name, for people.
        key: Everything that the fact depends on, without the version of the kind.
        what: Description of the fact for the warning when it cannot be cached; empty for no warning.
    """
    versioned = {**key, "rules": kind.version} if kind.version else key
    with ExitStack() as held:
        reservation = None
        try:
            reservation = held.enter_context(cache.reserve(kind.name, model, versioned))
        except CacheError as error:
            _log_uncached(what, error)
        yield RememberedFact(kind, reservation, what)


def _log_uncached(what: str, error: CacheError) -> None:
    if what:
        _log.warning("cannot cache %s: %s", what, error)


class Artifacts:
    """Artifacts of one version.

    Args:
        version: The version.
        saved: Precision of the saved graph.
        cache: The cache.
    """

    def __init__(self, version: ModelVersion, saved: Precision, cache: ArtifactCache) -> None:
        self.version = version
        self.saved = saved
        self.cache = cache
        self._content: dict[str, str] = {}
        self._stamp = version.stamp()

    @property
    def model(self) -> str:
        """Name of model and version, for people."""
        folder = self.version.graph_path.parent
        return f"{folder.parent.name}/{folder.name}"

    @cached_property
    def replaced(self) -> tuple[ReplacedOutput, ...]:
        """Outputs of the saved graph that are not tensors. Converted graphs have none."""
        if self.version.manifest or self.version.format is GraphFormat.OPENVINO_IR:
            return ()
        try:
            return read_replaced_outputs(self.version.graph_path)
        except RepositoryError:
            return ()  # a damaged graph: the engine reports it

    def prepare_graph(self, config: SessionConfig) -> Path:
        """Return the graph that a session runs: the saved one, or one lowered to the session's precision.

        Raises:
            CacheError: The graph is not in the cache and cannot be written.
            ConversionError: A lowering pass failed.
        """
        precision = self._lowered_precision(config)
        if precision is None:
            return self._tensor_graph()
        name = f"{precision}-{_GRAPH}"

        def build(folder: Path) -> None:
            self._lower(precision, folder / name)

        return self.cache.get("graph", self.model, self.graph_key(config), build) / name

    def prepare_compiled(self, engine: Engine, config: SessionConfig) -> Path | None:
        """Return the engine's compiled graph, or None if it is not cached for this engine or cache.

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
        """Look up the measured choice between candidates on this machine, and hold its lock for the block.

        Args:
            configs: The candidates.
            conditions: Everything else that the choice depends on.
        """
        key = {**conditions, "device": hardware.identity(configs[0].device)}
        for config in configs:
            # "step" is the name of a configuration in the first caches.
            parts = {**self.graph_key(config), **load_engine(config.engine).identity(config), "step": str(config)}
            key |= {f"{config}: {name}": value for name, value in parts.items()}
        with recall(CHOICE, self.cache, self.model, key, "the choice of an engine") as fact:
            yield fact

    @contextmanager
    def recall_observations(
        self, engine: Engine, config: SessionConfig, conditions: Mapping[str, str]
    ) -> Iterator[RememberedFact[Observations] | None]:
        """Look up the observations of a session, and hold their lock for the block.

        Yields:
            The entry, or None if the cache does not last or the engine has no cache identity.
        """
        identity = engine.identity(config)
        if not self.cache.lasting or not identity:
            yield None
            return
        session = {"session": f"{config}, {config.threads} threads, {sorted(config.options.items())}"}
        session |= {"cuts": f"{list(config.cuts)}"} if config.cuts else {}
        device = {"device": hardware.identity(config.device)}
        key = {**self.graph_key(config), **identity, **device, **session, **conditions}
        with recall(OBSERVATIONS, self.cache, self.model, key, f"the observations of {config}") as fact:
            yield fact

    def graph_key(self, config: SessionConfig) -> dict[str, str]:
        """Return the cache key of the graph that a session runs: saved graph, weights, lowering."""
        saved = self._saved_key()
        precision = self._lowered_precision(config)
        if precision is None:
            if self.version.format is GraphFormat.OPENVINO_IR and config.precision:
                return {**saved, "inference precision": config.precision}  # OpenVINO lowers it while it compiles
            return saved
        libraries = {name: version_of(name) for name in ("graphkiln", "onnx-ir", "onnxscript")}
        return {**saved, "precision": precision, "amp": _AMP, **libraries}

    def check_unchanged(self) -> None:
        """Check that the graph file was not replaced, so that no artifact of another graph is cached under its key.

        Raises:
            LoweringError: The file was replaced.
        """
        if self.version.stamp() != self._stamp:
            raise LoweringError(f"{self.version.graph_path} was replaced while it was lowered or served", attempts=())

    def _tensor_graph(self) -> Path:
        """Return the saved graph, or a copy without the outputs that are not tensors."""
        if not self.replaced:
            return self.version.graph_path

        def build(folder: Path) -> None:
            save_with_tensor_outputs(self.version.graph_path, folder / _GRAPH)
            self.check_unchanged()

        return self.cache.get("graph", self.model, self._saved_key(), build) / _GRAPH

    def _saved_key(self) -> dict[str, str]:
        self._content = self._content or content_of(self.version)
        if not self.replaced:
            return self._content
        return {**self._content, "outputs": "tensors", "graphkiln": version_of("graphkiln")}

    def _lowered_precision(self, config: SessionConfig) -> Precision | None:
        """Return the precision to lower the graph to, or None if the engine gets it as saved."""
        if self.version.format is GraphFormat.OPENVINO_IR:
            return None
        precision = config.precision
        return precision if precision and precision.is_half and precision is not self.saved else None

    def _lower(self, precision: Precision, target: Path) -> None:
        # Importing onnx_ir, onnxscript and sympy takes over a second; most starts do not lower.
        from graphkiln_backend.passes.base import run_passes
        from graphkiln_backend.passes.graph_file import load, save
        from graphkiln_backend.passes.precision import LowerPrecision

        _log.info("lowering the graph to %s", precision)
        model = load(self._tensor_graph())
        run_passes(model, [LowerPrecision(precision, _AMP)])
        save(model, target)
        self.check_unchanged()


def saved_precision(version: ModelVersion) -> Precision:
    """Return the precision of the saved graph, from the manifest if there is one.

    Raises:
        RepositoryError: The graph is damaged.
    """
    conversion = version.manifest.conversion if version.manifest else None
    if conversion:
        return conversion.precision
    is_ir = version.format is GraphFormat.OPENVINO_IR
    return read_ir(version.graph_path).precision if is_ir else read_precision(version.graph_path)


def content_of(version: ModelVersion) -> dict[str, str]:
    """Return the SHA-256 of graph and weights: those of the manifest, or of all files in the version folder."""
    if manifest := version.manifest:
        return {"graph": manifest.sha256, **{f"weights {name}": sha256 for name, sha256 in manifest.weights.items()}}
    folder = version.graph_path.parent
    beside = sorted(path for path in folder.rglob("*") if path.is_file() and path != version.graph_path)
    content = {f"weights {path.relative_to(folder)}": sha256_of(path) for path in beside}
    is_ir = version.format is GraphFormat.OPENVINO_IR
    return {"graph": sha256_of(version.graph_path) if is_ir else graph_sha256(version.graph_path), **content}
