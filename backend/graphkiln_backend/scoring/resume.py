"""What a destination holds already, beside what a run plans: what is done, and what has no place in the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.plan import read_plan
from graphkiln_backend.scoring.units import Unit

_TOLD = 3
"""Units that a message names."""
_PIECE = 1000
"""Units that are removed between two looks at the claim."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a run stands.

    Attributes:
        committed: Ids of all units that have a result.
        done_units: Those of them that are planned.
        done_rows: Their rows.
        stale: Ids of those that are not.
    """

    committed: frozenset[str]
    done_units: int
    done_rows: int
    stale: frozenset[str]


def read_standing(destination: Destination, plan: Path) -> Standing:
    """Lists a destination once and goes through a plan once.

    Args:
        destination: Where results are.
        plan: The file of the plan.
    """
    committed = frozenset(destination.committed_ids())
    stale, units, rows = set(committed), 0, 0
    for unit in read_plan(plan):
        if unit.id in committed:
            units, rows = units + 1, rows + unit.rows
            stale.discard(unit.id)
    return Standing(committed=committed, done_units=units, done_rows=rows, stale=frozenset(stale))


def settle_stale(
    destination: Destination,
    stale: frozenset[str],
    configuration: str,
    *,
    replace: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Refuses, or removes, results that are not of this run's input.

    Args:
        destination: Where they are.
        stale: Their ids.
        configuration: Of this run.
        replace: Whether those of an input that changed are removed.
        check: Raises where the destination is another run's by now; asked before each piece is removed.

    Raises:
        ScoringError: They are of another model or other settings, or must not be removed.
    """
    if not stale:
        return
    others = {each.configuration for each in destination.describe(stale) if not each.damage} - {configuration}
    if others:
        raise ScoringError(
            "the destination holds results of another model, another version or other settings",
            hint="results of two are never mixed: name another destination for this run",
        )
    if not replace:
        raise ScoringError(
            f"the destination holds {len(stale)} units that are not part of this input: files have changed or are "
            "gone, or units were cut otherwise",
            hint="--replace removes their rows and scores what took their place",
        )
    remaining = sorted(stale)
    for begin in range(0, len(remaining), _PIECE):
        check()
        destination.remove(remaining[begin : begin + _PIECE])


def account(
    destination: Destination, plan: Path, replaced: Mapping[str, Sequence[Unit]], reasons: Mapping[str, str]
) -> None:
    """Checks that the destination has a result of every unit that is planned, and no other one.

    What is in a unit needs no second look: a worker commits it only with all of its rows, and in one step.

    Args:
        destination: Where results are; listed anew.
        plan: The file of the plan, with what took the place of other units.
        replaced: Units whose input changed; a result that one of them still got is removed.
        reasons: Why units have no result, by their ids, where that is known.

    Raises:
        ScoringError: Some have none, or there are others.
    """
    committed = set(destination.committed_ids())
    missing: list[Unit] = []
    count = rows = 0
    for unit in read_plan(plan):
        if unit.id in committed:
            committed.discard(unit.id)
            continue
        count, rows = count + 1, rows + unit.rows
        if len(missing) < _TOLD:
            missing.append(unit)
    destination.remove(sorted(committed & replaced.keys()))
    if count:
        told = "; ".join(
            f"unit {each.id} of {each.path}: {reasons.get(each.id, 'its result is gone')}" for each in missing
        )
        raise ScoringError(
            f"{count} units ({rows} rows) have no result: {told}",
            hint="all others have theirs; run the same command to try these again",
        )
    if unknown := committed - replaced.keys():
        raise ScoringError(f"{len(unknown)} units have a result that nobody planned: does another run write there?")
