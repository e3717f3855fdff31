"""The smallest of the fastest batch sizes, remembered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.remembered import Measurement
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.scoring import model as module
from graphkiln_backend.scoring.model import choose_batch_size, measure_sizes

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="")


class Timed:
    """A session that takes the time that a test says for a batch.

    Args:
        row_s: Seconds of a row by batch size.
        most: It fails at larger batches.
    """

    def __init__(self, row_s: dict[int, float], most: int = 100) -> None:
        self.row_s, self.most, self.now_s, self.runs = row_s, most, 0.0, 0
        self.signature = Signature(inputs=(TensorSpec(name="x", dtype=DType.FP32, shape=("batch", 1)),), outputs=())

    def run(self, feeds: Mapping[str, AnyArray], _: Sequence[str] | None = None) -> dict[str, AnyArray]:
        size = len(feeds["x"])
        if size > self.most:
            raise ExecutionError("too large")
        self.runs += 1
        self.now_s += size * self.row_s[size]
        return {}

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    session = Timed({1: 2.0, 2: 1.0, 4: 0.99, 8: 1.5})
    monkeypatch.setattr(module, "time", session)
    return session


def test_of_equally_fast_sizes_the_smallest(timed: Any) -> None:
    measured = measure_sizes(timed, [1, 2, 4, 8], SyntheticInputs())
    assert measured.chosen == "2"
    assert measured.rates == {"1": 0.5, "2": 1.0, "4": 1.01, "8": 0.6667}


def test_sizes_that_fail_are_left_out(timed: Any) -> None:
    timed.most = 1
    assert measure_sizes(timed, [1, 2, 4], SyntheticInputs()).chosen == "1"
    timed.most = 0
    assert measure_sizes(timed, [1, 2, 4], SyntheticInputs()).rates == {}


class Memory:
    """Artifacts that remember one choice."""

    value: Measurement | None = None
    conditions: Mapping[str, str]

    @contextmanager
    def recall_choice(self, _: object, conditions: Mapping[str, str]) -> Iterator[Memory]:
        self.conditions = conditions
        yield self

    def keep(self, value: Measurement) -> None:
        self.value = value


def test_measures_once(timed: Any) -> None:
    memory: Any = Memory()
    assert choose_batch_size(memory, timed, CONFIG, [1, 2, 4], SyntheticInputs()) == 2
    assert "threads" in memory.conditions
    runs = timed.runs
    assert choose_batch_size(memory, timed, CONFIG, [1, 2, 4], SyntheticInputs()) == 2
    assert timed.runs == runs


def test_nothing_to_measure(timed: Any) -> None:
    never: Any = None
    assert choose_batch_size(never, timed, CONFIG, [1], SyntheticInputs()) == 1
    assert choose_batch_size(never, timed, CONFIG, [1, 8], None) == 8
    assert timed.runs == 0
