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
# Minimum number of requests in a whole search; with fewer, its figures would rest on single requests.
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
        p99_s: Upper limit on the 99th percentile of latency in seconds, counted from when requests are due.
        rate: Requests per second. None searches for the highest rate that meets `p99_s` (objective throughput), or
            measures one caller at a time (other objectives).
        accuracy_floor: Largest accepted loss of accuracy on labelled samples, for example 0.005. None applies the
            numeric policy alone.
    """

    p99_s: float
    rate: float | None = None
    objective: Objective = Objective.THROUGHPUT
    accuracy_floor: float | None = None

    def __post_init__(self) -> None:
        """Validate the ranges and the combination of rate and objective.

        Raises:
            InvalidInput: A number is out of range, or a rate is combined with the objective throughput.
        """
        if not 0 < self.p99_s < 3600:
            raise InvalidInput(
                f"--p99 of {self.p99_s:g} s is out of range", hint="give a time above 0 and below an hour, such as 50ms"
            )
        if self.rate is not None and not 0 < self.rate < 1e7:
            raise InvalidInput(
                f"--rate of {self.rate:g} requests per second is out of range", hint="give a number above 0"
            )
        if self.rate is not None and self.objective is Objective.THROUGHPUT:
            raise InvalidInput(
                "--rate cannot be combined with the objective throughput, which searches for the highest rate",
                hint="remove --rate, or choose another objective: latency, memory or cost",
            )

    def check_budget(self, budget_s: float) -> None:
        """Check that a fixed rate gives enough requests within the budget to bound a p99.

        Raises:
            InvalidInput: The budget is too short for the rate.
        """
        if self.rate is None or self.rate * budget_s >= FEWEST_REQUESTS:
            return
        requests, minutes = self.rate * budget_s, math.ceil(FEWEST_REQUESTS / self.rate / 60)
        raise InvalidInput(
            f"--budget: {self.rate:g} requests per second give {requests:.3g} requests in {budget_s:g} s, "
            f"but a search needs at least {FEWEST_REQUESTS}",
            hint=f"--budget {minutes}m is the minimum; ten times as long gives a confirmed result",
        )

    def __str__(self) -> str:
        load = f" at {self.rate:g} requests per second" if self.rate else ""
        return f"p99 within {self.p99_s * 1e3:g} ms{load}, best {self.objective}"


# Parsing of rates and shares.

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(.*)", re.IGNORECASE)
_PER = {"": 1.0, "/s": 1.0, "/m": 1 / 60, "/min": 1 / 60, "/h": 1 / 3600}


def parse_rate(text: str, option: str) -> float:
    """Parse `200/s`, `200` or `12000/min` into requests per second.

    Raises:
        InvalidInput: The text is not a rate above 0.
    """
    return _parse(text, option, _PER, "requests per second such as 200/s")


def parse_share(text: str, option: str) -> float:
    """Parse `0.5%` into 0.005.

    Raises:
        InvalidInput: The text is not a share below 100%.
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
