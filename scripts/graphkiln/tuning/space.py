"""The space of candidates: an axis for each key, and constraints that say once why a point is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from graphkiln.tuning.candidate import INSTANCES, THREADS, Candidate, Value
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.text import did_you_mean

Constraint = Callable[[Candidate], str]  # why a candidate is illegal or hopeless, in words; empty where it is neither


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A key and the values that are tried.

    Attributes:
        key: As in `Candidate`.
        values: At least one; the first is the default configuration's, and a later one counts as less simple.
    """

    key: str
    values: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """A candidate that is left out.

    Attributes:
        candidate: Which.
        reason: Why, in words.
        by_budget: Whether a larger budget would have had it measured.
    """

    candidate: Candidate
    reason: str
    by_budget: bool = False


@dataclass(frozen=True, kw_only=True)
class Space:
    """All combinations of the axes' values, without those that a constraint rules out.

    Attributes:
        axes: One for each key.
        constraints: The first that objects gives the reason.
        served: What serves today, where a key was fixed to something else; None for the first value of each axis.
    """

    axes: tuple[Axis, ...]
    constraints: tuple[Constraint, ...] = ()
    served: Candidate | None = None

    @property
    def points(self) -> int:
        """How many combinations there are, with those that are left out."""
        return prod(len(axis.values) for axis in self.axes)

    @property
    def default(self) -> Candidate:
        """The first value of each axis."""
        return Candidate.of({axis.key: axis.values[0] for axis in self.axes})

    @property
    def today(self) -> Candidate:
        """What serves today, which need not be in the space."""
        return self.served or self.default

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Those that no constraint rules out, the simplest first."""
        return tuple(candidate for candidate, reason in self._judged if not reason)

    @cached_property
    def exclusions(self) -> tuple[Exclusion, ...]:
        """Those that a constraint rules out."""
        return tuple(Exclusion(candidate=candidate, reason=reason) for candidate, reason in self._judged if reason)

    def reasons(self) -> dict[str, int]:
        """Reason -> how many candidates it rules out, the most frequent first."""
        return dict(Counter(exclusion.reason for exclusion in self.exclusions).most_common())

    def simplicity(self, candidate: Candidate) -> tuple[int, int, str]:
        """A key to sort by, the simplest first: values beside the default, how far they are from it, the id."""
        steps = [self._positions[axis.key].get(candidate[axis.key], len(axis.values)) for axis in self.axes]
        return sum(step > 0 for step in steps), sum(steps), candidate.id

    def neighbors(self, candidate: Candidate) -> tuple[Candidate, ...]:
        """The legal candidates that are one step away: on one axis, the next value on either side.

        An exchange of threads for instances is a step, too: the way from one to the other leads through set-ups that
        use too few cores or too many, and is never climbed.
        """
        found = self._exchanges(candidate)
        for axis in self.axes:
            at = self._positions[axis.key][candidate[axis.key]]
            nearby = [axis.values[each] for each in (at - 1, at + 1) if 0 <= each < len(axis.values)]
            found += [candidate.with_values({axis.key: value}) for value in nearby]
        return tuple(each for each in found if not self.objection(each))

    def _exchanges(self, candidate: Candidate) -> list[Candidate]:
        """The candidates with as many threads in all, by more or fewer instances."""
        values = {axis.key: axis.values for axis in self.axes}
        cores = candidate.number(THREADS) * candidate.number(INSTANCES)
        pairs = product(values.get(THREADS, ()), values.get(INSTANCES, ()))
        found = [candidate.with_values({THREADS: threads, INSTANCES: instances}) for threads, instances in pairs]
        same = [each for each in found if each.number(THREADS) * each.number(INSTANCES) == cores]
        return [each for each in same if each != candidate]

    def objection(self, candidate: Candidate) -> str:
        """What the first constraint that objects says; empty where none does."""
        return next(filter(None, (constraint(candidate) for constraint in self.constraints)), "")

    def fixed(self, values: Mapping[str, Value]) -> Space:
        """The space in which some keys have one value only, whether it was among those tried or not.

        Raises:
            InvalidInput: No axis has the key.
        """
        self._check(values)
        fixed = (replace(axis, values=(values[axis.key],)) if axis.key in values else axis for axis in self.axes)
        return replace(self, axes=tuple(fixed), served=self.today)

    def only(self, keys: Collection[str]) -> Space:
        """The space in which only these keys vary; the others keep their defaults.

        Raises:
            InvalidInput: No axis has the key.
        """
        self._check(keys)
        return self.fixed({axis.key: axis.values[0] for axis in self.axes if axis.key not in keys})

    @cached_property
    def _judged(self) -> list[tuple[Candidate, str]]:
        keys = [axis.key for axis in self.axes]
        points = [Candidate.of(dict(zip(keys, each, strict=True))) for each in product(*(a.values for a in self.axes))]
        return [(each, self.objection(each)) for each in sorted(points, key=self.simplicity)]

    @cached_property
    def _positions(self) -> dict[str, dict[Value, int]]:
        return {axis.key: {value: number for number, value in enumerate(axis.values)} for axis in self.axes}

    def _check(self, keys: Collection[str]) -> None:
        known = [axis.key for axis in self.axes]
        for key in keys:
            if key not in known:
                raise InvalidInput(f"'{key}' is not tuned for this model", hint=did_you_mean(key, known))
