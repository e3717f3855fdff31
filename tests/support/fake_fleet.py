"""Simulated fleet: workers and nodes that die and rows that end workers, from a seeded generator."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from graphkiln_backend.scoring.messages import (
    Attempt,
    Blame,
    Cause,
    Done,
    Ended,
    Failed,
    Outcome,
    Survived,
    Unit,
    UnitReport,
    WorkerFacts,
    WorkerReady,
)
from graphkiln_backend.scoring.schedule import MAX_STORE_FAILURES


def unit(number: int, rows: int = 40) -> Unit:
    return Unit(id=f"{number:032x}", path=f"/images/{number}", part="", rows=rows)


def facts(node: str = "node") -> WorkerFacts:
    return WorkerFacts(node=node, pid=1, session="onnxruntime on cpu", self_test="", seconds=1.0)


@dataclass
class FakeFleet:
    """Computes one attempt, or simulates one fault, per `wait`.

    Args:
        size: Number of workers.
        nodes: Number of nodes.
        broken_node: Node that ends each worker with whatever it computes.
        poison: Positions of rows that end a worker, by unit id.
        faults: Probability per `wait` that a worker or node ends without a poison row.
        failures: Probability that an attempt fails for another cause; too few to give up a unit.
        seed: Seed of the generator.
    """

    size: int = 3
    nodes: int = 1
    broken_node: str = ""
    poison: dict[str, set[int]] = field(default_factory=dict)
    faults: float = 0.0
    failures: float = 0.0
    seed: int = 0
    commits: Counter[str] = field(default_factory=Counter)
    quarantined: dict[str, set[int]] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._work: dict[str, list[Attempt]] = {}
        self._nodes: dict[str, str] = {}
        self._born = 0
        self._failures_left = MAX_STORE_FAILURES - 1
        self.most_in_flight = 0

    def clock(self) -> float:
        return self.now

    def assign(self, worker: str, attempt: Attempt) -> None:
        work = self._work[worker]
        work.append(attempt)
        if attempt.probe is not None:
            assert len(work) == 1, "a probe runs alone on its worker"
        self.most_in_flight = max(self.most_in_flight, len(work))

    def wait(self, timeout_s: float, _: object = None) -> list[Outcome]:
        self.now += timeout_s
        if len(self._work) < self.size:
            self._born += 1
            name = f"worker-{self._born}"
            self._work[name] = []
            used = [self._nodes[each] for each in self._work if each in self._nodes]
            self._nodes[name] = min((f"node-{number}" for number in range(self.nodes)), key=used.count)
            return [WorkerReady(worker=name, facts=facts(self._nodes[name]))]
        if self._random.random() < self.faults:
            name = self._random.choice(sorted(self._work))
            blame = self._random.choice([Blame.NODE, Blame.WORKER])
            committed = [each for each in self._work[name] if self._random.random() < 0.3]
            for attempt in committed:
                if not attempt.probe and not self._touched(attempt):
                    self._commit(attempt)
            return [self._end(name, blame)]
        busy = sorted(name for name, work in self._work.items() if work)
        return [self._compute(self._random.choice(busy))] if busy else []

    def _compute(self, name: str) -> Outcome:
        attempt = self._random.choice(self._work[name])
        if self._failures_left and self._random.random() < self.failures:
            self._failures_left -= 1
            self._work[name].remove(attempt)
            cause = self._random.choice([Cause.SOURCE, Cause.STORE])
            return Failed(worker=name, attempt=attempt.number, cause=cause, reason="not now")
        if self._touched(attempt) or self._nodes[name] == self.broken_node:
            return self._end(name, Blame.ROWS)
        self._work[name].remove(attempt)
        if attempt.probe:
            return Survived(worker=name, attempt=attempt.number)
        return Done(worker=name, attempt=attempt.number, report=self._commit(attempt))

    def _touched(self, attempt: Attempt) -> set[int]:
        rows = range(attempt.unit.rows)[attempt.probe.start : attempt.probe.stop] if attempt.probe else None
        poison = self.poison.get(attempt.unit.id, set()) - attempt.quarantined.keys()
        return poison if rows is None else poison & set(rows)

    def _commit(self, attempt: Attempt) -> UnitReport:
        twin = self.commits[attempt.unit.id] > 0
        if not twin:
            self.commits[attempt.unit.id] += 1
            self.quarantined[attempt.unit.id] = set(attempt.quarantined)
        errors = len(attempt.quarantined)
        return UnitReport(unit_id=attempt.unit.id, rows=attempt.unit.rows, errors=errors, seconds=1.0, twin=twin)

    def _end(self, name: str, blame: Blame) -> Ended:
        del self._work[name]
        return Ended(worker=name, blame=blame, reason="crashed")
