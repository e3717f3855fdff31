"""Target of a search: the p99 to meet, the rate, the objective, and parsing of their options."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from graphkiln_backend.graph.errors import InvalidInput

QUANTILE = 0.99
# Confidence of the bound on the target's quantile of latency.
CONFIDENCE = 0.95
# Requests in the whole of a search, below which its figures would rest on single requests.
FEWEST_REQUESTS = 100


class Objective(StrEnum):
    """Criterion for the best candidate among those that meet the target."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    MEMORY = "memory"
    COST = "cost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Target of a search.

    Attributes:
        p99_s: Seconds that 99 of 100 requests may take, from when they were due.
        rate: Requests per second that come; None: the highest rate that meets `p99_s` is searched (throughput), or one
            caller at a time is served (the other objectives).
        objective: Criterion for the best.
        accuracy_floor: Share of the labelled samples' accuracy that may be lost, such as 0.005; None where the numeric
            policy alone judges.
    """

    p99_s: float
    rate: float | None = None
    objective: Objective = Objective.THROUGHPUT
    accuracy_floor: float | None = None

    def __post_init__(self) -> None:
        """Check ranges, and that the rate and the objective do not contradict each other.

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
        """Refuse a rate that gives too few requests within the budget to bound a p99.

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


# Parsing of rates and shares.

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(.*)", re.IGNORECASE)
_PER = {"": 1.0, "/s": 1.0, "/m": 1 / 60, "/min": 1 / 60, "/h": 1 / 3600}


def parse_rate(text: str, option: str) -> float:
    """Read `200/s`, `200` or `12000/min` as requests per second.

    Raises:
        InvalidInput: It is no rate, or not above 0.
    """
    return _parse(text, option, _PER, "requests per second such as 200/s")


def parse_share(text: str, option: str) -> float:
    """Read `0.5%` as 0.005.

    Raises:
        InvalidInput: It is no share below 100%.
    """
    share = _parse(text, option, {"%": 0.01}, "a share such as 0.5%", least=0.0)
    if share >= 1:
        raise InvalidInput(f"{option} {text}: expected less than 100%")
    return share


def _parse(text: str, option: str, units: dict[str, float], expected: str, least: float = math.ulp(0.0)) -> float:
    match = _NUMBER.fullmatch(text.strip())
    unit = match[2].strip().lower() if match else ""
    if match is None or unit not in units:
        raise InvalidInput(f"{option} {text}: expected {expected}")
    value = float(match[1]) * units[unit]
    if not least <= value < math.inf:
        raise InvalidInput(f"{option} {text}: expected {expected}, above 0")
    return value
