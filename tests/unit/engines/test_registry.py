"""Engines found by entry point, and the timing of sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints, entry_points

import pytest

from graphkiln_backend.engines import timing
from graphkiln_backend.engines.base import Support
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.registry import BUILT_IN, GROUP, engine_names, load_engine, probe
from graphkiln_backend.engines.timing import fastest_runs_s
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import EngineUnavailable


def test_built_in_engines_are_entry_points() -> None:
    ours = entry_points(group=GROUP)
    assert {entry.name: entry.value for entry in ours if entry.value.startswith("graphkiln_")} == BUILT_IN
    assert "onnxruntime" in engine_names()
    assert isinstance(load_engine("onnxruntime"), OnnxRuntimeEngine)


def test_unknown_engine_suggests_the_nearest() -> None:
    with pytest.raises(EngineUnavailable, match="did you mean 'onnxruntime'"):
        load_engine("onnxrutime")


class Toy:
    def probe(self, device: Device) -> Support:
        return Support(ok=device == CPU, reason="" if device == CPU else "toys are for the cpu")


class TestThirdParties:
    @pytest.fixture(autouse=True)
    def _entries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entries = [
            EntryPoint("toy", f"{__name__}:Toy", GROUP),
            EntryPoint("openvino", "graphkiln_no_such_module:Engine", GROUP),
            EntryPoint("broken", "graphkiln_no_such_module:Engine", GROUP),
        ]
        monkeypatch.setitem(BUILT_IN, "openvino", "graphkiln_no_such_module:Engine")
        monkeypatch.setattr("importlib.metadata.entry_points", lambda **by: list(EntryPoints(entries).select(**by)))
        monkeypatch.setattr(EntryPoint, "load", lambda self: Toy if self.name == "toy" else __import__(self.module))

    def test_engine_of_another_distribution(self) -> None:
        assert engine_names() == ["broken", "onnxruntime", "openvino", "tensorrt", "toy"]
        assert probe("toy", CPU) == Support(ok=True)
        assert probe("toy", Device.gpu()) == Support(ok=False, reason="toys are for the cpu")

    def test_missing_runtime_names_the_extra(self) -> None:
        with pytest.raises(EngineUnavailable, match=r"known but its runtime is not installed.*graphkiln\[openvino\]"):
            load_engine("openvino")

    @pytest.mark.parametrize("name", ["openvino", "broken", "nonesuch"])
    def test_probe_does_not_raise(self, name: str) -> None:
        support = probe(name, CPU)
        assert not support.ok
        assert name in support.reason


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
        """Make functions of the given duration; only the first one leaves spinning threads."""
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


def test_runs_alternate(machine: Machine) -> None:
    assert fastest_runs_s(machine.runs(a=0.4, b=0.2)) == pytest.approx({"a": 0.4, "b": 0.2})
    assert machine.turns == ["a", "b"] * 3


def test_short_runs_are_repeated_for_a_second(machine: Machine) -> None:
    fastest_runs_s(machine.runs(a=1e-3, b=1e-3))
    assert len(machine.turns) > 100
    assert machine.perf_counter() < 1.5


def test_spinning_threads_do_not_disturb(machine: Machine) -> None:
    machine.spin_s = 0.04
    assert fastest_runs_s(machine.runs(spins=0.06, other=0.05)) == pytest.approx({"spins": 0.06, "other": 0.05})
