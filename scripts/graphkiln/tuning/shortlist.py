"""Which candidates are measured on a server at all: all that may meet the target, or as many as the budget allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from graphkiln.tuning.bounds import bound_of, objection
from graphkiln.tuning.candidate import SESSION_KEYS, Candidate
from graphkiln.tuning.space import Exclusion, Space
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import Bare, Failed, Trials


@dataclass(frozen=True, kw_only=True)
class Probes:
    """What bare sessions said.

    Attributes:
        sessions: Session -> its times, or why it has none.
        viable: Candidates that may meet the target, the simplest first.
        refused: The others, with the reasons.
    """

    sessions: Mapping[Candidate, Bare | Failed]
    viable: tuple[Candidate, ...] = ()
    refused: tuple[Exclusion, ...] = field(default=())

    def bare(self, candidate: Candidate) -> Bare:
        """The times of a viable candidate's session.

        Raises:
            KeyError: It is not viable.
        """
        found = self.sessions[candidate.restricted_to(SESSION_KEYS)]
        if isinstance(found, Failed):
            raise KeyError(found.reason)
        return found


def probe(space: Space, target: Target, trials: Trials, has_time: Callable[[], bool] = lambda: True) -> Probes:
    """Measures the bare session of every candidate, each session once.

    Args:
        space: The candidates.
        target: What they must meet.
        trials: What measures.
        has_time: Whether another session may be timed; the simplest one always is.
    """
    by_session = dict.fromkeys(each.restricted_to(SESSION_KEYS) for each in space.candidates)
    sessions: dict[Candidate, Bare | Failed] = {}
    for session in by_session:
        sessions[session] = trials.probe(session) if not sessions or has_time() else _UNTIMED
    viable, refused = [], []
    for candidate in space.candidates:
        reason = objection(candidate, sessions[candidate.restricted_to(SESSION_KEYS)], target)
        if reason:
            refused.append(Exclusion(candidate=candidate, reason=reason, by_budget=reason == _UNTIMED.reason))
        else:
            viable.append(candidate)
    return Probes(sessions=sessions, viable=tuple(viable), refused=tuple(refused))


_UNTIMED = Failed(reason="the budget was spent before its session was timed")


def shortlist(probes: Probes, most: int, first: Sequence[Candidate] = ()) -> list[Candidate]:
    """So many candidates, spread over all sessions, those of the fastest sessions first.

    Args:
        probes: What bare sessions said.
        most: How many.
        first: Those that are taken anyway.
    """
    by_session: dict[Candidate, list[Candidate]] = {}
    for candidate in sorted(probes.viable, key=lambda each: -bound_of(each, probes.bare(each)).rate):
        by_session.setdefault(candidate.restricted_to(SESSION_KEYS), []).append(candidate)
    turns = zip_longest(*(_spread(each) for each in by_session.values()))
    ordered = [candidate for turn in turns for candidate in turn if candidate is not None]
    return list(dict.fromkeys([*first, *ordered]))[: max(most, len(first))]


def _spread(candidates: list[Candidate]) -> list[Candidate]:
    """The same candidates in an order whose every beginning is spread over the whole: ends first, then middles."""
    order: list[int] = []
    step = len(candidates)
    while step:
        order += range(0, len(candidates), step)
        step //= 2
    return [candidates[each] for each in dict.fromkeys([*order, *range(len(candidates))])]
