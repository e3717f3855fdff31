"""Cut a graph into consecutive stages, optimally, by dynamic programming.

The best split has the fastest slowest stage, which limits the pipeline; a stage's time includes the transfer of its
inputs. Of equally fast splits the one with the smallest transfers is taken. If a device would hold more than its equal
share of the weights plus a tenth of all, a slightly slower split that holds less is preferred.

Source: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.1 (the
partitioning algorithm; stages of one device each).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.files import format_size
from graphkiln_backend.graph.graph_costs import GraphCosts
from graphkiln_backend.lowering.parallel.speed import Speed

Floats = npt.NDArray[np.float64]

_EQUAL = 1e-9  # relative difference up to which two splits count as equally fast
_AIM = 0.1  # share of all weights that a device may hold in addition to its equal share
# Share of the slowest stage's time that may be lost to reach _AIM. Two stages of BERT-base lose a third of a layer,
# since its token embedding, a fifth of the weights, takes no time.
_WORTH = 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """A stage with the nodes `begin` to `end - 1`.

    Attributes:
        begin: Position of its first node.
        end: Position after its last node.
        seconds: Time of a micro-batch, including the transfer of its inputs.
        weight_bytes: Its weights; a weight read by two stages is held by both.
        activation_bytes: Peak of live activations, plus micro-batches that wait for the next stage.
        handed_bytes: Inputs of a micro-batch from the previous stage.
        flops: Arithmetic of one sample.
    """

    begin: int
    end: int
    seconds: float
    weight_bytes: int
    activation_bytes: int
    handed_bytes: int
    flops: int

    @property
    def memory_bytes(self) -> int:
        """Memory that its device needs."""
        return self.weight_bytes + self.activation_bytes


def find_stages(
    costs: GraphCosts,
    stages: int,
    speed: Speed,
    *,
    rows: int = 1,
    memory_bytes: int = 0,
    waiting: int = 0,
    turns: int = 1,
) -> tuple[StageCost, ...]:
    """Find the best split into stages.

    Args:
        costs: Costs of the graph.
        stages: Number of stages.
        speed: Speed of each device.
        rows: Samples of a micro-batch.
        memory_bytes: Memory of a device; 0 for no limit.
        waiting: Number of micro-batches that may wait for the next stage.
        turns: Number of batches in flight, of instances that share the devices and weights.

    Raises:
        LoweringError: There are too few places to cut, or no split fits the memory.
    """
    table = _Table(costs, speed, rows=rows, stages=stages, waiting=waiting, turns=turns)
    if len(table.positions) - 1 < stages:
        raise LoweringError(
            f"the graph cannot be cut into {stages} stages",
            attempts=(f"it can be cut at {max(0, len(table.positions) - 2)} places",),
            hint="choose a smaller `pipeline`",
        )
    seconds = table.seconds()
    memory = table.memory()
    if memory_bytes:
        seconds = np.where(memory <= memory_bytes, seconds, np.inf)
    crossing = table.crossing[table.positions]
    chosen = _partition(seconds, crossing, stages)
    if chosen is None:
        least = max(memory[a, b] for a, b in itertools.pairwise(_partition(memory, crossing, stages) or []))
        raise LoweringError(
            f"no split into {stages} stage{'s' if stages > 1 else ''} fits {format_size(memory_bytes)} for each device",
            attempts=(f"the smallest needs {format_size(int(least))}",),
            hint="choose more stages or shards, smaller micro-batches, or more `memory`",
        )
    chosen = _lighter(table, seconds, chosen)
    return tuple(table.stage(a, b, float(seconds[a, b])) for a, b in itertools.pairwise(chosen))


def _lighter(table: _Table, seconds: Floats, chosen: list[int]) -> list[int]:
    """Return the fastest split within `_AIM`, if it is nearly as fast as the chosen one, else the chosen one."""
    stages = len(chosen) - 1
    weights = table.weight_spans
    light = np.where(weights <= (1 / stages + _AIM) * weights[0, -1], seconds, np.inf)
    found = _partition(light, table.crossing[table.positions], stages)
    if found is None or _slowest(seconds, found) > (1 + _WORTH) * _slowest(seconds, chosen):
        return chosen
    return found


def _slowest(seconds: Floats, places: list[int]) -> float:
    return max(float(seconds[a, b]) for a, b in itertools.pairwise(places))


def find_cuts(costs: GraphCosts, stages: int = 2) -> list[int]:
    """Find the positions before which a graph can be cut, including both ends.

    Nodes that runtimes fuse are not separated, unless that leaves too few positions.
    """
    count = len(costs.nodes)
    lives = _lifetimes(costs)
    impossible = np.zeros(count + 1, bool)
    for name in costs.local:
        begin, end = lives.get(name, (0, 0))
        impossible[begin + 1 : end + 1] = True
    separating = impossible.copy()
    for position, node in enumerate(costs.nodes):
        latest = max((lives[name][0] for name in node.reads if name in lives), default=-1)
        if node.fuses and latest >= 0:
            separating[latest + 1 : position + 1] = True
        if node.opens:
            last = max((lives[name][1] for name in node.writes if name in lives), default=position)
            separating[position + 1 : last + 1] = True
    for forbidden in (separating, impossible):
        inner = [position for position in range(1, count) if not forbidden[position]]
        if len(inner) >= stages - 1:
            break
    return [0, *inner, count]


def _lifetimes(costs: GraphCosts) -> dict[str, tuple[int, int]]:
    """Return the positions of the producer (-1 for a graph input) and the last reader of each activation."""
    lives: dict[str, tuple[int, int]] = dict.fromkeys(costs.inputs, (-1, -1))
    for position, node in enumerate(costs.nodes):
        for name in node.reads:
            if name in lives:
                lives[name] = (lives[name][0], position)
        lives |= dict.fromkeys(node.writes, (position, position))
    return lives


class _Table:
    """Costs of every candidate stage, as matrices over its first and last cut position."""

    def __init__(self, costs: GraphCosts, speed: Speed, *, rows: int, stages: int, waiting: int, turns: int) -> None:
        self._costs = costs
        self._speed = speed
        self._rows = rows
        self.positions = np.array(find_cuts(costs, stages) if stages > 1 else [0, len(costs.nodes)])
        self.crossing = rows * _crossing(costs)
        self._nodes_s = np.concatenate([[0.0], np.cumsum(speed.node_seconds(costs, rows))])
        writes = [sum(node.writes.values()) for node in costs.nodes]
        self._alive = self.crossing[:-1] + rows * np.array(writes, np.float64)
        self.weight_spans = self._weight_spans()
        queued = waiting * self.crossing[self.positions][None, :]
        self._activations = turns * (self._activation_spans() + queued)

    def seconds(self) -> Floats:
        """Return the seconds of each candidate stage, `[places, places]`; infinite for empty stages."""
        at = self._nodes_s[self.positions]
        handed = np.array([0.0, *map(self._speed.link_seconds, self.crossing[self.positions[1:]])])
        return np.where(self._is_span, at[None, :] - at[:, None] + handed[:, None], np.inf)

    def memory(self) -> Floats:
        """Return the bytes of weights and activations of each candidate stage, `[places, places]`."""
        return np.where(self._is_span, self.weight_spans + self._activations, np.inf)

    def stage(self, a: int, b: int, seconds: float) -> StageCost:
        begin, end = int(self.positions[a]), int(self.positions[b])
        return StageCost(
            begin=begin,
            end=end,
            seconds=seconds,
            weight_bytes=int(self.weight_spans[a, b]),
            activation_bytes=int(self._activations[a, b]),
            handed_bytes=int(self.crossing[begin]) if begin else 0,
            flops=sum(node.flops for node in self._costs.nodes[begin:end]),
        )

    @property
    def _is_span(self) -> npt.NDArray[np.bool_]:
        order = np.arange(len(self.positions))
        return order[:, None] < order[None, :]

    def _weight_spans(self) -> Floats:
        """Return the weight bytes of each candidate stage; a weight counts once per stage that reads it."""
        count = len(self.positions)
        block = np.searchsorted(self.positions, np.arange(len(self._costs.nodes)), side="right") - 1
        added = np.zeros((count, count))
        for size, blocks in _weight_blocks(self._costs, block):
            for here, following in zip(blocks, (*blocks[1:], count), strict=True):
                added[here, here + 1 : following + 1] += size
        spans: Floats = np.cumsum(added[::-1], axis=0)[::-1]
        return spans

    def _activation_spans(self) -> Floats:
        """Return the peak of live activations of each candidate stage."""
        count = len(self.positions)
        highest = [self._alive[a:b].max() for a, b in zip(self.positions[:-1], self.positions[1:], strict=True)]
        spans = np.zeros((count, count))
        for a in range(count - 1):
            spans[a, a + 1 :] = np.maximum.accumulate(highest[a:])
        return spans


def _crossing(costs: GraphCosts) -> Floats:
    """Return the bytes of one sample that cross each position, `[nodes + 1]`."""
    sizes = costs.activations
    change = np.zeros(len(costs.nodes) + 2)
    for name, (begin, end) in _lifetimes(costs).items():
        change[begin + 1] += sizes[name]
        change[end + 1] -= sizes[name]
    return np.cumsum(change)[:-1]


def _weight_blocks(costs: GraphCosts, block: npt.NDArray[np.intp]) -> Iterator[tuple[int, list[int]]]:
    """Yield the bytes of each weight, and the blocks of nodes that read it, in order."""
    sizes: dict[str, int] = {}
    blocks: dict[str, dict[int, None]] = {}
    for position, node in enumerate(costs.nodes):
        sizes |= node.weights
        for name in node.weights:
            blocks.setdefault(name, {})[int(block[position])] = None
    yield from ((sizes[name], list(found)) for name, found in blocks.items())


def _partition(cost: Floats, crossing: Floats, stages: int) -> list[int] | None:
    """Minimize the largest stage cost; return the chosen places, or None if every split has an infinite cost.

    Args:
        cost: Cost of each candidate stage, `[places, places]`.
        crossing: Bytes that cross each place, for breaking ties.
        stages: Number of stages.
    """
    best = cost[0].copy()
    passed = np.zeros(len(best))
    before: list[npt.NDArray[np.intp]] = []
    for _ in range(stages - 1):
        largest = np.maximum(best[:, None], cost)
        least = largest.min(axis=0)
        tie = largest <= least * (1 + _EQUAL)
        total = np.where(tie, (passed + crossing)[:, None], np.inf)
        before.append(total.argmin(axis=0))
        best, passed = least, total.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    found = [len(best) - 1]
    for chosen in reversed(before):
        found.append(int(chosen[found[-1]]))
    return [0, *reversed(found)]
