"""Cut a graph into consecutive stages: the exact best of all cuts, by dynamic programming.

The best split has the shortest slowest stage, since a pipeline is as fast as that; a stage's time includes handing its
inputs over. Of splits that are as fast, the one across whose cuts less passes is taken. Where a device would hold more
than its share of the weights and a tenth of all, a split that is a little slower and holds less is taken instead.

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

_EQUAL = 1e-9  # stages that are less than this share apart are as fast
_AIM = 0.1  # of all weights: what a device may hold beside an equal share
# Of the slowest stage's time: what holding no more than that may cost. Two stages of BERT-base give up a third of a
# layer for it, since the table of its tokens, a fifth of its weights, takes no time.
_WORTH = 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """A stage: the nodes from `begin` to before `end`.

    Attributes:
        begin: Position of its first node.
        end: Position behind its last node.
        seconds: Time of a micro-batch, with what it takes to hand its inputs over.
        weight_bytes: Its weights; one that another stage reads, too, is held by both.
        activation_bytes: Most that is alive at once while it computes a micro-batch, and what waits for the next stage.
        handed_bytes: Inputs from the stage before for a micro-batch.
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
        waiting: Micro-batches that may wait for the next stage.
        turns: Batches that may be under way at once, of instances that share the devices and their weights.

    Raises:
        LoweringError: There are not that many places to cut, or no split fits the memory.
    """
    table = _Table(costs, speed, rows=rows, stages=stages, waiting=waiting, turns=turns)
    if len(table.positions) - 1 < stages:
        raise LoweringError(
            f"the graph cannot be cut into {stages} stages",
            attempts=(f"it has {max(0, len(table.positions) - 2)} places where it can be cut",),
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
    """The fastest split whose devices hold no more than `_AIM` allows, where it is nearly as fast as the chosen one."""
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
    """Find positions of nodes before which a graph can be cut, the first and the one behind the last among them.

    Nothing that runtimes fuse is separated, unless that leaves too few places for so many stages.
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
    """Position at which each activation is computed (-1 for an input of the graph), and of its last reader."""
    lives: dict[str, tuple[int, int]] = dict.fromkeys(costs.inputs, (-1, -1))
    for position, node in enumerate(costs.nodes):
        for name in node.reads:
            if name in lives:
                lives[name] = (lives[name][0], position)
        lives |= dict.fromkeys(node.writes, (position, position))
    return lives


class _Table:
    """Costs of every span of nodes between two places as a stage."""

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
        """Seconds of the stage from one place to another, `[places, places]`; infinite where it would be empty."""
        at = self._nodes_s[self.positions]
        handed = np.array([0.0, *map(self._speed.link_seconds, self.crossing[self.positions[1:]])])
        return np.where(self._is_span, at[None, :] - at[:, None] + handed[:, None], np.inf)

    def memory(self) -> Floats:
        """Bytes of its weights and activations, likewise."""
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
        """Bytes of the weights from place to place: each counts where it is read for the first time since the begin."""
        count = len(self.positions)
        block = np.searchsorted(self.positions, np.arange(len(self._costs.nodes)), side="right") - 1
        added = np.zeros((count, count))
        for size, blocks in _weight_blocks(self._costs, block):
            for here, following in zip(blocks, (*blocks[1:], count), strict=True):
                added[here, here + 1 : following + 1] += size
        spans: Floats = np.cumsum(added[::-1], axis=0)[::-1]
        return spans

    def _activation_spans(self) -> Floats:
        """Most bytes that are alive at once from place to place."""
        count = len(self.positions)
        highest = [self._alive[a:b].max() for a, b in zip(self.positions[:-1], self.positions[1:], strict=True)]
        spans = np.zeros((count, count))
        for a in range(count - 1):
            spans[a, a + 1 :] = np.maximum.accumulate(highest[a:])
        return spans


def _crossing(costs: GraphCosts) -> Floats:
    """Bytes of one sample that are computed before each position and read at or behind it, `[nodes + 1]`."""
    sizes = costs.activations
    change = np.zeros(len(costs.nodes) + 2)
    for name, (begin, end) in _lifetimes(costs).items():
        change[begin + 1] += sizes[name]
        change[end + 1] -= sizes[name]
    return np.cumsum(change)[:-1]


def _weight_blocks(costs: GraphCosts, block: npt.NDArray[np.intp]) -> Iterator[tuple[int, list[int]]]:
    """The bytes of each weight, and the blocks of nodes that read it, in order."""
    sizes: dict[str, int] = {}
    blocks: dict[str, dict[int, None]] = {}
    for position, node in enumerate(costs.nodes):
        sizes |= node.weights
        for name in node.weights:
            blocks.setdefault(name, {})[int(block[position])] = None
    yield from ((sizes[name], list(found)) for name, found in blocks.items())


def _partition(cost: Floats, crossing: Floats, stages: int) -> list[int] | None:
    """The places between which the largest cost is least; None where every split has an infinite one.

    Args:
        cost: Cost of the stage from one place to another, `[places, places]`.
        crossing: Bytes that pass at each place: of equal splits, the one with less is taken.
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
