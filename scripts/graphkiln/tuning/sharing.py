"""Several models on one machine: instances and threads for all together, under one budget of cores and memory.

Each model comes with its responses: what it was measured to do alone with so many instances and threads, the cores
that these may keep busy and the memory that they take. Requests come for all models in fixed shares, so that the whole
serves as much as the model that reaches its share first. That is a choice of one response for each model under two
sums; with a few responses each it is solved exactly, by dynamic programming over the models with only those partial
choices kept that no other beats in cores, memory and rate.

Responses are measured one model at a time. Models that share a machine also share its caches: the joint choice is to be
measured as a whole before it is relied on.

Source: H. Kellerer, U. Pferschy, D. Pisinger, "Knapsack Problems" (2004), 11 (multiple choice; dominance).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphkiln.tuning.candidate import INSTANCES, THREADS, Candidate
from graphkiln.tuning.result import Result
from graphkiln.tuning.trials import OpenLoop
from graphkiln_backend.graph.errors import InvalidInput, MeasurementError


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """What a model does with a configuration when it is alone on the machine.

    Attributes:
        candidate: The configuration.
        rate: Requests per second at which its p99 is within the target.
        cores: That its threads may keep busy.
        memory_bytes: Of its instances.
    """

    candidate: Candidate
    rate: float
    cores: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A configuration for each model.

    Attributes:
        responses: Model -> its response.
        rate: Requests per second, of all models together.
        cores: Of all together.
        memory_bytes: Of all together.
        limited_by: The model that reaches its share first: no other one could serve more.
    """

    responses: Mapping[str, Response]
    rate: float
    cores: float
    memory_bytes: int
    limited_by: str


def share_out(
    responses: Mapping[str, Sequence[Response]], shares: Mapping[str, float], *, cores: float, memory_bytes: int
) -> Plan:
    """The configurations that together serve the highest rate; of equal ones those that need the fewest cores.

    Args:
        responses: Model -> what it was measured to do.
        shares: Model -> its part of all requests; they are scaled to a sum of 1.
        cores: Of the machine, for all models together.
        memory_bytes: Likewise.

    Raises:
        InvalidInput: The models of both differ, or a share is not above 0.
        MeasurementError: A model met its target with no configuration, or they do not fit together.
    """
    _check(responses, shares)
    whole = sum(shares.values())
    partial: list[tuple[float, float, int, tuple[Response, ...]]] = [(float("inf"), 0.0, 0, ())]
    names = sorted(responses)
    for name in names:
        share = shares[name] / whole
        extended = [
            (min(rate, each.rate / share), used + each.cores, memory + each.memory_bytes, (*chosen, each))
            for rate, used, memory, chosen in partial
            for each in responses[name]
        ]
        partial = _undominated(one for one in extended if one[1] <= cores + 1e-9 and one[2] <= memory_bytes)
        if not partial:
            raise _too_little(responses, names, cores, memory_bytes)
    rate, used, memory, chosen = max(partial, key=lambda each: (each[0], -each[1], -each[2]))
    plan = dict(zip(names, chosen, strict=True))
    last = min(names, key=lambda name: plan[name].rate / shares[name])
    return Plan(responses=plan, rate=rate, cores=used, memory_bytes=memory, limited_by=last)


def responses_of(result: Result) -> list[Response]:
    """What a search of one model alone found of each configuration that met the target.

    The cores are those that its threads may use; what is unknown of memory counts as nothing.
    """
    found = []
    for row in result.rows:
        point = row.best_point
        reached = row.standing.score.lower
        if point is not None and isinstance(point.load, OpenLoop) and reached > 0:
            candidate = row.standing.candidate
            found.append(
                Response(
                    candidate=candidate,
                    rate=reached,
                    cores=float(candidate.number(INSTANCES) * candidate.number(THREADS)),
                    memory_bytes=point.measured.memory_bytes or 0,
                )
            )
    return found


def _undominated(
    choices: Iterable[tuple[float, float, int, tuple[Response, ...]]],
) -> list[tuple[float, float, int, tuple[Response, ...]]]:
    """The partial choices that no other one matches in rate with as few cores and as little memory."""
    kept: list[tuple[float, float, int, tuple[Response, ...]]] = []
    for choice in sorted(choices, key=lambda each: (-each[0], each[1], each[2])):
        if not any(other[1] <= choice[1] and other[2] <= choice[2] for other in kept):
            kept.append(choice)
    return kept


def _check(responses: Mapping[str, Sequence[Response]], shares: Mapping[str, float]) -> None:
    if set(responses) != set(shares) or not responses:
        shared, known = (", ".join(sorted(each)) or "none" for each in (shares, responses))
        raise InvalidInput(
            f"shares are given for {shared}, models are {known}",
            hint="give each model its share of the requests",
        )
    for name, share in shares.items():
        if not 0 < share < float("inf"):
            raise InvalidInput(f"{name} has a share of {share:g}", hint="a share is a number above 0, such as 3 or 0.5")
    for name, found in responses.items():
        if not found:
            raise MeasurementError(
                f"no configuration of {name} was found to meet the target alone",
                hint="a larger --budget goes on from here; or serve it elsewhere",
            )


def _too_little(
    responses: Mapping[str, Sequence[Response]], names: Sequence[str], cores: float, memory_bytes: int
) -> MeasurementError:
    fewest = sum(min(each.cores for each in responses[name]) for name in names)
    least = sum(min(each.memory_bytes for each in responses[name]) for name in names)
    return MeasurementError(
        f"{', '.join(names)} do not fit together: they need at least {fewest:g} cores and {least / 2**20:.0f} MiB, "
        f"there are {cores:g} and {memory_bytes / 2**20:.0f}",
        hint="allow configurations with fewer instances and threads, or serve one of them elsewhere",
    )
