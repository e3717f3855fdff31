"""The graphs of all parts of a split model, in a folder that the artifact cache keeps.

FOLDER/parts.json     FOLDER/part-0-shard-0.onnx     FOLDER/part-0-shard-1.onnx ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import CacheError, ManifestError
from graphkiln_backend.graph.graph_costs import GraphCosts

PARTS_FILE = "parts.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the graph; see `passes.stages.PartTensors`."""

    stage: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduced: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """All parts; `parts.json` keeps it under these names.

    Attributes:
        parts: In the order in which they are computed.
        shards: How many graphs there are of each.
    """

    parts: tuple[Part, ...]
    shards: int = 1

    def of_stage(self, stage: int) -> tuple[tuple[int, Part], ...]:
        """The parts of a stage with their numbers."""
        return tuple((number, part) for number, part in enumerate(self.parts) if part.stage == stage)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.parts[-1].stage + 1


def graph_of(folder: Path, part: int, shard: int) -> Path:
    """The graph of a shard of a part."""
    return folder / f"part-{part}-shard-{shard}.onnx"


def count_costs(graph_path: Path, shards: int, shapes: Mapping[str, Sequence[int]] | None = None) -> GraphCosts:
    """The costs of one shard of a graph.

    Args:
        graph_path: The graph.
        shards: How many there are; 1 for the whole graph.
        shapes: Of a sample of each input, by name, with a batch of 1; None where nobody knows what varies.

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
    """Cuts a graph, and writes all parts.

    Args:
        graph_path: The graph.
        cuts: Positions of the first node of each stage but the first, in the order of `count_costs`.
        shards: Of each part.
        folder: Empty.

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
    """Reads what `write_parts` wrote.

    Raises:
        CacheError: It cannot be read.
    """
    try:
        return decode(Parts, json.loads((folder / PARTS_FILE).read_bytes()))
    except (OSError, ValueError, ManifestError) as error:
        raise CacheError(f"cannot read the parts of a graph in {folder}: {error}") from error
