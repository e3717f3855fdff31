"""Cheap bounds: what a bare session's time says of every configuration that serves it.

A server adds to a session, and instances that share cores slow each other down: no configuration answers faster than
the bare session of one sample, or more often than its instances would if each had the machine to itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphkiln.tuning.candidate import INSTANCES, MAX_BATCH_SIZE, Candidate
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import Bare, Failed

_SLACK = 1.2
"""How much faster a session may be than it was measured: clocks and neighbors change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What a candidate cannot beat.

    Attributes:
        rate: Requests of one sample per second, at most.
        latency_s: Seconds of one request, at least.
    """

    rate: float
    latency_s: float


def bound_of(candidate: Candidate, bare: Bare) -> Bound:
    """The bounds that a bare session sets, by its fastest batch size.

    Sizes that were not measured count with the time of a line through the smallest and the largest that were.
    """
    largest = max(1, candidate.number(MAX_BATCH_SIZE))
    sizes = {size for size in bare.batch_s if size <= largest} | {1, largest}
    fastest = max(size / _run_s(bare, size) for size in sizes)
    rate = candidate.number(INSTANCES) * fastest * _SLACK
    return Bound(rate=rate, latency_s=min(bare.batch_s.values()) / _SLACK)


def objection(candidate: Candidate, bare: Bare | Failed, target: Target) -> str:
    """Why a candidate cannot meet a target whatever its scheduler does; empty where it may."""
    if isinstance(bare, Failed):
        return bare.reason
    if bare.accuracy:
        return f"changes the outputs: {bare.accuracy}"
    lost, floor = bare.accuracy_lost, target.accuracy_floor
    if lost is not None and floor is not None and lost > floor:
        return f"loses {lost:.2%} of accuracy, allowed {floor:.2%}"
    bound = bound_of(candidate, bare)
    if bound.latency_s > target.p99_s:
        return f"its bare session alone takes {bound.latency_s * _SLACK * 1e3:.3g} ms"
    if target.rate and bound.rate < target.rate:
        return f"its bare sessions alone reach at most {bound.rate:.3g} requests per second"
    return ""


def _run_s(bare: Bare, size: int) -> float:
    if size in bare.batch_s:
        return bare.batch_s[size]
    smallest, largest = min(bare.batch_s), max(bare.batch_s)
    if smallest == largest:
        return bare.batch_s[largest]  # nothing is known of larger batches: they may cost the same
    each = (bare.batch_s[largest] - bare.batch_s[smallest]) / (largest - smallest)
    return max(bare.batch_s[smallest] + (size - smallest) * each, min(bare.batch_s.values()))
