"""Sessions are timed in turn, and none while threads of another one still spin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from graphkiln_backend.engines import timing
from graphkiln_backend.engines.timing import fastest_runs_s


@dataclass
class Machine:
    """A clock, and threads that spin for a while after each run; a run beside them takes twice as long.

    Attributes:
        spin_s: How long they spin.
        turns: Whose runs there were, in order.
    """

    spin_s: float = 0.0
    turns: list[str] = field(default_factory=list)
    _now_s: float = 0.0
    _spinning_until_s: float = 0.0

    def perf_counter(self) -> float:
        return self._now_s

    def process_time(self) -> float:
        return min(self._now_s, self._spinning_until_s)

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def runs(self, **seconds: float) -> dict[str, Callable[[], object]]:
        """What takes so long each; only the first one leaves threads that spin."""
        names = list(seconds)

        def run(name: str) -> None:
            disturbed = name != names[0] and self._now_s < self._spinning_until_s
            self.turns.append(name)
            self._now_s += seconds[name] * (2 if disturbed else 1)
            if name == names[0]:
                self._spinning_until_s = self._now_s + self.spin_s

        return {name: partial(run, name) for name in names}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(timing, "time", machine)
    return machine


def test_they_take_turns(machine: Machine) -> None:
    assert fastest_runs_s(machine.runs(a=0.4, b=0.2)) == pytest.approx({"a": 0.4, "b": 0.2})
    assert machine.turns == ["a", "b"] * 3


def test_short_runs_are_repeated_for_a_second_at_most(machine: Machine) -> None:
    fastest_runs_s(machine.runs(a=1e-3, b=1e-3))
    assert len(machine.turns) > 100
    assert machine.perf_counter() < 1.5


def test_threads_that_spin_disturb_nobody(machine: Machine) -> None:
    machine.spin_s = 0.04
    assert fastest_runs_s(machine.runs(spins=0.06, other=0.05)) == pytest.approx({"spins": 0.06, "other": 0.05})
