"""Costs of each node of a graph, counted (arithmetic, weights, activations) or measured (`node_times.json`)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import LoweringError, ManifestError
from graphkiln_backend.graph.files import TEXT_LIMIT, read_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCost:
    """Costs of a node for one sample; dimensions of unknown size count as 1.

    Attributes:
        name: The node's name.
        op_type: Its operator.
        flops: Floating-point operations of a convolution or matrix product (a multiply and an add are two).
        weights: Bytes of each weight that it reads, by name.
        reads: Names of the activations that it reads.
        writes: Bytes of each activation that it computes, by name.
        fuses: Whether runtimes fuse it with the node before it.
        opens: Whether runtimes fuse it with the nodes after it.
    """

    name: str
    op_type: str
    flops: int = 0
    weights: Mapping[str, int] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    writes: Mapping[str, int] = field(default_factory=dict)
    fuses: bool = False
    opens: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCosts:
    """All nodes of a graph in an order in which they can be computed.

    Attributes:
        nodes: The nodes.
        inputs: Bytes of each input of the graph, by name.
        outputs: Names of the outputs of the graph.
        local: Names of activations that cannot be passed to another stage, because they are sharded, or are not
            tensors of a known type.
    """

    nodes: tuple[NodeCost, ...]
    inputs: Mapping[str, int]
    outputs: frozenset[str]
    local: frozenset[str] = frozenset()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; shared weights count once."""
        return sum({name: size for node in self.nodes for name, size in node.weights.items()}.values())

    @property
    def activations(self) -> dict[str, int]:
        """Bytes of one sample of each input and of each activation that a node computes, by name."""
        return {**self.inputs, **{name: size for node in self.nodes for name, size in node.writes.items()}}

    @property
    def flops(self) -> int:
        """Floating-point operations of one sample."""
        return sum(node.flops for node in self.nodes)


# Measured times of the nodes of a graph, in a file beside it: `node_times.json`.

NODE_TIMES_FILE = "node_times.json"
_SIZE = re.compile("[1-9][0-9]{0,8}")
_HINT = "measure again (graphkiln lower STORE/NAME --measure), or remove the file: costs are counted then"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTimes:
    """Seconds of one core for each node of a graph, measured without fusion.

    Attributes:
        graph: SHA-256 of the graph's file.
        runtime: Name and version of the runtime.
        machine: The processor.
        batches: Seconds by batch size (as text) and node name.
    """

    graph: str
    runtime: str
    machine: str
    batches: dict[str, dict[str, float]]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that were measured, ascending."""
        return tuple(sorted(map(int, self.batches)))

    def at(self, size: int) -> Mapping[str, float]:
        """Seconds of each node for a batch size of `sizes`."""
        return self.batches[str(size)]

    def text(self) -> str:
        """Return the content of the file."""
        return json.dumps(encode(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> NodeTimes:
        """Read a file.

        Raises:
            LoweringError: It cannot be read, or does not contain node times.
        """
        try:
            found = decode(cls, json.loads(read_bytes(path, TEXT_LIMIT)))
        except (OSError, ValueError, OverflowError, RecursionError, ManifestError) as error:
            raise unusable(path, str(error)) from error
        if reason := _find_fault(found):
            raise unusable(path, reason)
        return found


def unusable(path: Path, reason: str) -> LoweringError:
    """Create the error for an unusable file of node times."""
    return LoweringError(f"{path} cannot be used", attempts=(reason,), hint=_HINT)


def _find_fault(times: NodeTimes) -> str:
    """Describe a value that is not a measurement; empty if all are."""
    if sizes := [size for size in times.batches if not _SIZE.fullmatch(size)]:
        return f"batches: '{sizes[0][:20]}' is not a batch size"
    for size, seconds in times.batches.items():
        for name, value in seconds.items():
            if not (math.isfinite(value) and value >= 0):
                return f"batches.{size}.{name}: {value} is not a number of seconds"
        if not sum(seconds.values()):
            return f"batches.{size}: no node took any time"
    return "" if times.batches else "batches: nothing was measured"
