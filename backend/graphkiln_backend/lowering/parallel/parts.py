"""Graphs and compiled artifacts of the parts of a split model, in the artifact cache.

    ENTRY/parts.json     ENTRY/part-0-shard-0.onnx     ENTRY/part-0-shard-1.onnx ...

Each compiled artifact has a copy of `parts.json`, so that a start with a filled cache does not read the graphs.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import Engine, SessionConfig
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.device import Place
from graphkiln_backend.graph.errors import CacheError, ManifestError
from graphkiln_backend.graph.graph_costs import GraphCosts
from graphkiln_backend.graph.modules import version_of
from graphkiln_backend.lowering.artifacts import Artifacts

_log = logging.getLogger("graphkiln.lowering")
# Part of the cache key of split graphs. Raise it when the same cuts of the same graph would give other parts, after a
# change of `write_parts` or of `passes/node_costs.py`, `sharding.py`, `stages.py`.
PARTS_VERSION = "1"
_STOP_SPINNING = "session.force_spinning_stop"
PARTS_FILE = "parts.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedParts:
    """Files from which the sessions of parts are built.

    Attributes:
        folder: Folder of `parts.json`, and of the graphs if they are not compiled.
        compiled: (part, shard) -> folder of the compiled artifact; empty if compiled artifacts are not cached.
    """

    folder: Path
    compiled: Mapping[tuple[int, int], Path] = field(default_factory=dict)


def prepare_parts(artifacts: Artifacts, engine: Engine, config: SessionConfig) -> PreparedParts:
    """Return the parts of a split graph from the cache, or build them.

    Args:
        artifacts: Artifacts of the version.
        engine: Engine of the parts.
        config: Configuration with `cuts`, `places` and `parallel`.

    Raises:
        CacheError: The parts are not in the cache and cannot be written.
        LoweringError: The graph cannot be split, or the engine refuses a part.
    """
    first = _compile(artifacts, engine, config, 0, 0)
    if first is not None:
        parts = read_parts(first)
        numbers = [(part, shard) for part in range(len(parts.parts)) for shard in range(parts.shards)]
        compiled = {each: folder for each in numbers if (folder := _compile(artifacts, engine, config, *each))}
        if len(compiled) == len(numbers):  # otherwise the cache became full or was removed
            return PreparedParts(folder=first, compiled=compiled)
    return PreparedParts(folder=_write_graphs(artifacts, config))


def config_at(config: SessionConfig, place: Place) -> SessionConfig:
    """Configure a part of a split graph for its place."""
    threads = min(config.threads, len(place.cores) or config.threads)
    tuning = config.tuning
    if _shards(config) > 1 and threads > 1:
        # The parts of a shard run one after another on the same cores: threads that spin after a run would slow the
        # next part for tens of milliseconds. Source: ONNX Runtime, `onnxruntime_session_options_config_keys.h`.
        tuning = replace(tuning, config_entries={_STOP_SPINNING: "1", **tuning.config_entries})
    return replace(config, device=place.device, threads=threads, tuning=tuning, parallel=None, places=(), cuts=())


def _compile(artifacts: Artifacts, engine: Engine, config: SessionConfig, part: int, shard: int) -> Path | None:
    """Return the compiled artifact of a shard of a part, or None if it is not cached."""
    own = config_at(config, config.places[0])
    identity = engine.identity(own)
    if not identity:
        return None
    device = hardware.identity(own.device)
    key = {**_key(artifacts, config), **identity, "device": device, "part": str(part), "shard": str(shard)}

    def build(folder: Path) -> None:
        graphs = _write_graphs(artifacts, config)
        _log.info("compiling part %d, shard %d for %s", part, shard, config)
        engine.compile(graph_of(graphs, part, shard), own, folder)
        shutil.copy(graphs / PARTS_FILE, folder)
        artifacts.check_unchanged()

    return artifacts.cache.get_lasting(config.engine, artifacts.model, key, build)


def _write_graphs(artifacts: Artifacts, config: SessionConfig) -> Path:
    """Write the graphs of all parts into the cache, and return their folder."""

    def build(folder: Path) -> None:
        _log.info("splitting the graph for %s", config)
        write_parts(artifacts.prepare_graph(config), config.cuts, _shards(config), folder)
        artifacts.check_unchanged()

    return artifacts.cache.get("parts", artifacts.model, _key(artifacts, config), build)


def _key(artifacts: Artifacts, config: SessionConfig) -> dict[str, str]:
    libraries = {name: version_of(name) for name in ("onnx", "onnx-ir")}
    cuts = {"cuts": f"{list(config.cuts)}", "shards": str(_shards(config))}
    return {**artifacts.graph_key(config), **cuts, **libraries, "rules": PARTS_VERSION}


def _shards(config: SessionConfig) -> int:
    return config.parallel.tensor if config.parallel else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the graph; see `passes.stages.PartTensors`."""

    stage: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduced: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Content of `parts.json`.

    Attributes:
        parts: The parts in the order of execution.
        shards: Number of shards of each part.
    """

    parts: tuple[Part, ...]
    shards: int = 1

    def of_stage(self, stage: int) -> tuple[tuple[int, Part], ...]:
        """Return the numbers and parts of a stage."""
        return tuple((number, part) for number, part in enumerate(self.parts) if part.stage == stage)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.parts[-1].stage + 1


def graph_of(folder: Path, part: int, shard: int) -> Path:
    """Return the file of a shard of a part."""
    return folder / f"part-{part}-shard-{shard}.onnx"


def count_costs(graph_path: Path, shards: int, shapes: Mapping[str, Sequence[int]] | None = None) -> GraphCosts:
    """Count the costs of one shard of a graph.

    Args:
        graph_path: The graph.
        shards: Number of shards; 1 for the whole graph.
        shapes: Input shapes of one sample by name, with a batch of 1; None if dynamic sizes are unknown.

    Raises:
        LoweringError: The graph cannot be read or split.
    """
    from graphkiln_backend.passes import node_costs, sharding  # a second of imports

    whole = node_costs.load_for_splitting(graph_path, weights=False)
    if shapes:
        node_costs.bind_sizes(whole, shapes)
    if shards == 1:
        return node_costs.count_costs(whole)
    sharded = sharding.shard_graph(graph_path, shards, 0)
    node_costs.bind_shard(sharded.model, whole)
    return node_costs.count_costs(sharded.model, sharded.local)


def write_parts(graph_path: Path, cuts: tuple[int, ...], shards: int, folder: Path) -> None:
    """Cut a graph and write all parts.

    Args:
        graph_path: The graph.
        cuts: Position of the first node of each stage except the first, in the node order of `count_costs`.
        shards: Number of shards of each part.
        folder: An empty folder.

    Raises:
        LoweringError: The graph cannot be read or split.
        OSError: The folder cannot be written.
    """
    from graphkiln_backend.passes import node_costs, sharding, stages

    for shard in range(shards):
        if shards == 1:
            model = node_costs.load_for_splitting(graph_path)
        else:
            model = sharding.shard_graph(graph_path, shards, shard).model
        found = stages.find_parts(model, cuts)
        for number, part in enumerate(found):
            stages.write_part(model, part, graph_of(folder, number, shard))
    listed = tuple(
        Part(stage=part.stage, inputs=part.inputs, outputs=part.outputs, reduced=part.reduced) for part in found
    )
    (folder / PARTS_FILE).write_text(json.dumps(encode(Parts(parts=listed, shards=shards))))


def read_parts(folder: Path) -> Parts:
    """Read `parts.json` of a folder.

    Raises:
        CacheError: The file cannot be read.
    """
    try:
        return decode(Parts, json.loads((folder / PARTS_FILE).read_bytes()))
    except (OSError, ValueError, ManifestError) as error:
        raise CacheError(f"cannot read the parts of a graph in {folder}: {error}") from error
