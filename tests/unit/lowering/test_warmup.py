"""Warm-up: batch sizes whose first run is slow, with golden samples or synthetic inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.lowering.warmup import repeat_warm_up, warm_up


@pytest.fixture
def session(add_engine: Any) -> Any:
    engine = add_engine("engine")
    return engine.build(Path("graph"), engine.config)


class Costs:
    """Session with the given costs of a run, measured by its own clock.

    Args:
        row_s: Seconds of each row.
        first_s: Additional seconds of the first run of each size.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, row_s: float, first_s: float) -> None:
        spec = TensorSpec(name="x", dtype=DType.FP32, shape=("batch", 3))
        self.signature = Signature(inputs=(spec,), outputs=())
        self.batches: list[int] = []
        self._row_s, self._first_s, self._now_s = row_s, first_s, 0.0
        monkeypatch.setattr("graphkiln_backend.lowering.warmup.time", self)

    def run(self, feeds: Any) -> Any:
        (size,) = {len(array) for array in feeds.values()}
        self._now_s += size * self._row_s + self._first_s * (size not in self.batches)
        self.batches.append(size)
        return {}

    def process_time(self) -> float:
        return self._now_s


class TestSizes:
    def batches(self, monkeypatch: pytest.MonkeyPatch, largest: int, **seconds: float) -> tuple[list[int], Any]:
        session: Any = Costs(monkeypatch, **seconds)
        session.run({"x": np.zeros((1, 3), np.float32)})  # the trial
        session.batches.clear()
        session.batches.append(1)
        warmed = warm_up(session, (1, largest), SyntheticInputs())
        return session.batches[1:], warmed

    def test_cheap_sizes_are_tried_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runs, warmed = self.batches(monkeypatch, 32, row_s=0.1, first_s=0.01)  # ResNet-50 on ONNX Runtime
        assert runs == [1, 2, 2]
        assert (warmed.sizes, warmed.note) == ((), "")

    def test_sizes_that_need_code_generation_are_all_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runs, warmed = self.batches(monkeypatch, 6, row_s=0.002, first_s=0.03)  # MobileNetV3-small on OpenVINO
        assert runs == [1, 2, 2, 4, 4, 3, 6, 6, 5]
        assert warmed.sizes == (2, 3, 4, 5, 6)

    def test_warmup_ends_when_a_first_run_costs_hardly_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runs, warmed = self.batches(monkeypatch, 64, row_s=0.01, first_s=0.03)
        assert runs == [1, 2, 2, 4, 4, 3, 8, 8]
        assert warmed.sizes == (2, 3, 4)

    def test_cheap_largest_batch_is_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runs, warmed = self.batches(monkeypatch, 64, row_s=0.0001, first_s=0.0002)  # digits on ONNX Runtime
        assert runs == [1, 2, 2, 64]
        assert warmed.sizes == (64,)

    def test_cached_sizes_are_run(self, session: Any, golden: GoldenSamples) -> None:
        assert repeat_warm_up(session, (2, 8, 8), golden).sizes == (2, 8, 8)
        assert session.batches == [2, 8, 8]


class TestOrder:
    def test_everything_runs_each_size_twice(self, session: Any, golden: GoldenSamples) -> None:
        assert warm_up(session, (1, 2, 8), golden, everything=True).note == ""
        assert session.batches == [1, 1, 2, 2, 8, 8]

    def test_warmup_stops_at_a_failing_synthetic_batch(self, session: Any) -> None:
        run = session.run

        def fail_at_four(feeds: Any) -> Any:
            if len(feeds["x"]) == 4:
                raise SignatureError("refused", expected="2", got="4")
            return run(feeds)

        session.run = fail_at_four
        note = "a synthetic batch of 4 fails: refused: expected 2, got 4"
        assert warm_up(session, (1, 2, 4, 8), SyntheticInputs(), everything=True).note == note
        assert session.batches == [1, 1, 2, 2]
        assert repeat_warm_up(session, (2, 4), SyntheticInputs()).note == note

    def test_failing_golden_batch_is_an_error(self, session: Any, golden: GoldenSamples) -> None:
        session.engine.run_error = ExecutionError("no memory")
        with pytest.raises(ExecutionError):
            warm_up(session, (1,), golden)
