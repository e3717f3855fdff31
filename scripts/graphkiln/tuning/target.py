"""What a configuration must reach, and what counts among those that reach it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from graphkiln_backend.graph.errors import InvalidInput

QUANTILE = 0.99
CONFIDENCE = 0.95
"""Of the bound on the quantile of latency that a target is about."""
FEWEST_REQUESTS = 100
"""That come in the whole of a search, or else its figures are of single requests."""


class Objective(StrEnum):
    """What is best among the candidates that meet the target."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    MEMORY = "memory"
    COST = "cost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What is searched for.

    Attributes:
        p99_s: Seconds that 99 of 100 requests may take, from when they were due.
        rate: Requests per second that come; None: the highest rate that meets `p99_s` is searched (throughput), or one
            caller at a time is served (the other objectives).
        objective: What is best.
        accuracy_floor: Share of the labelled samples' accuracy that may be lost, such as 0.005; None where the numeric
            policy alone judges.
    """

    p99_s: float
    rate: float | None = None
    objective: Objective = Objective.THROUGHPUT
    accuracy_floor: float | None = None

    def __post_init__(self) -> None:
        """Refuses what no measurement can answer.

        Raises:
            InvalidInput: A number is out of range, or a rate is to be found that is given.
        """
        if not 0 < self.p99_s < 3600:
            raise InvalidInput(f"a p99 of {self.p99_s:g} s", hint="give a time above 0 and below an hour, such as 50ms")
        if self.rate is not None and not 0 < self.rate < 1e7:
            raise InvalidInput(f"a rate of {self.rate:g} requests per second", hint="give a number above 0")
        if self.accuracy_floor is not None and not 0 <= self.accuracy_floor < 1:
            raise InvalidInput(f"an accuracy floor of {self.accuracy_floor:g}", hint="give a share, such as 0.5%")
        if self.rate is not None and self.objective is Objective.THROUGHPUT:
            raise InvalidInput(
                "the rate is given, and the highest one is searched for",
                hint="take the rate away, or name another objective: latency, memory or cost",
            )

    def check_budget(self, budget_s: float) -> None:
        """Refuses a rate of which too few requests come to say anything of a p99.

        Args:
            budget_s: Seconds that all measurements together may take.

        Raises:
            InvalidInput: They are too few.
        """
        if self.rate is None or self.rate * budget_s >= FEWEST_REQUESTS:
            return
        requests, minutes = self.rate * budget_s, math.ceil(FEWEST_REQUESTS / self.rate / 60)
        raise InvalidInput(
            f"--budget: {requests:.3g} requests come in {budget_s:g} s at {self.rate:g} a second, "
            f"and a search takes {FEWEST_REQUESTS} at least",
            hint=f"--budget {minutes}m finds something, ten times as long proves it",
        )

    def __str__(self) -> str:
        load = f" at {self.rate:g} requests per second" if self.rate else ""
        return f"p99 within {self.p99_s * 1e3:g} ms{load}, best {self.objective}"
