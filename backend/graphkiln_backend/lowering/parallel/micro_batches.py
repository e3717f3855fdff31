"""Into how many micro-batches a pipeline cuts a batch, where nobody says it: by the costs of its stages.

More of them keep more stages at work, and each one reads all weights of a stage again and is handed over on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.lowering.parallel.cuts import StageCost

FindStages = Callable[[int], tuple[StageCost, ...]]
"""Rows of a micro-batch -> the best stages for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutting:
    """How a largest batch is cut.

    Attributes:
        count: Micro-batches.
        rows: Of each, at most.
        stages: What each stage costs for one of them.
        others: Other counts that were considered -> seconds of a batch.
        turns: Batches that may be under way at once.
    """

    count: int
    rows: int
    stages: tuple[StageCost, ...]
    others: Mapping[int, float] = field(default_factory=dict)
    turns: int = 1

    @property
    def seconds(self) -> float:
        """Of a batch: the first part passes all stages, then the slowest one takes its time for each more.

        Where several batches are under way, each takes its share of that, or as long as the slowest stage needs for it.
        """
        times = [stage.seconds for stage in self.stages]
        alone = sum(times) + (self.count - 1) * max(times)
        return max(alone / self.turns, self.count * max(times))

    def explain(self, costs: str = "counted") -> str:
        """Why so many; empty where somebody said it.

        Args:
            costs: Whether they were counted or measured.
        """
        if not self.others:
            return ""
        beside = ", ".join(f"{count} take {seconds / self.seconds:.2f}x" for count, seconds in self.others.items())
        return f"the fastest by {costs} costs ({beside} of the time)"


def cut_batch(find: FindStages, largest_batch: int, counts: Sequence[int], turns: int = 1) -> Cutting:
    """The cutting by which a batch is over first; of those that are as fast, the one with the fewest parts.

    Args:
        find: Finds the stages; raises `LoweringError` where none fit.
        largest_batch: Rows.
        counts: What to choose from, ascending.
        turns: Batches that may be under way at once.

    Raises:
        LoweringError: For none of them there are stages that fit; as for the one that needs the least memory.
    """
    found: list[Cutting] = []
    refused: LoweringError | None = None
    for count in counts:
        rows = math.ceil(largest_batch / count)
        try:
            found.append(Cutting(count=count, rows=rows, stages=find(rows), turns=turns))
        except LoweringError as error:
            refused = error
    if not found:
        raise refused or LoweringError("there is no batch to cut", attempts=(f"{largest_batch} rows",))
    best = min(found, key=lambda cutting: cutting.seconds)
    others = {cutting.count: cutting.seconds for cutting in found if cutting is not best}
    return replace(best, others=others)


def usual_counts(largest_batch: int) -> tuple[int, ...]:
    """What is considered: powers of two, and parts of one row.

    Args:
        largest_batch: Rows, at least 1.
    """
    powers = [1 << exponent for exponent in range(largest_batch.bit_length())]
    return tuple(sorted({*powers, largest_batch}))
