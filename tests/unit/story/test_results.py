"""Records, factors and judgments."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stories import CHAIN, make_judgment, make_observation

from graphkiln.story.results import (
    Judgment,
    Observation,
    Record,
    Round,
    build_document,
    judge,
    judge_parameter_gradients,
)
from graphkiln.story.workloads import Predictions
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.proof.policy import OTHER_ENGINE


def steps(**seen: Observation) -> list[Any]:
    """The steps of a story's document."""
    document = build_document(CHAIN, Record(facts={}, seen=seen), {variant.key: () for variant in CHAIN})
    return [SimpleNamespace(**step) for step in document["steps"]]


class TestFactors:
    def test_factors_are_medians_of_rounds(self) -> None:
        """The machine is ten times slower in the second round."""
        _, static, *_ = steps(eager=make_observation(1, 0.1, 1), static=make_observation(2, 0.2, 2))
        assert static.own == static.cumulative == pytest.approx(2)

    def test_only_common_rounds_count(self) -> None:
        assert steps(eager=make_observation(1, 2), static=make_observation(2, 6, 100))[1].own == pytest.approx(2.5)
        late = Round(number=4, per_second=9, latencies_ms=(1,), cores=1, memory_mb=1)
        row = steps(eager=make_observation(1), static=Observation(judgment=make_judgment(), rounds=(late,)))[1]
        assert (row.per_second, row.own, row.cumulative) == (9, None, None)

    def test_failed_steps_are_skipped_as_baselines(self) -> None:
        failed = make_observation(5, passed=False)
        _, static, reduced, _ = steps(eager=make_observation(1), static=failed, reduced=make_observation(10))
        assert (static.counts, static.own, static.cumulative) == (False, None, None)
        assert (reduced.beside, reduced.own, reduced.cumulative) == ("eager", 10, 10)
        refused = Observation(refused="no")
        switch = steps(eager=make_observation(1), static=failed, reduced=refused, int8=make_observation(8))[3]
        assert (switch.beside, switch.own) == ("eager", 8)

    def test_values_are_medians(self) -> None:
        rounds = tuple(
            Round(number=n, per_second=rate, latencies_ms=(ms,), cores=cores, memory_mb=mb)
            for n, (rate, ms, cores, mb) in enumerate([(1, 10, 1, 100), (9, 20, 3, 300), (4, 30, 2, 200)])
        )
        row = steps(eager=Observation(judgment=make_judgment(), rounds=rounds))[0]
        assert (row.per_second, row.cores, row.memory_mb) == (4, 2, 200)
        assert (row.p50_ms, row.p99_ms) == (20, pytest.approx(29.8))
        assert (row.own, row.cumulative) == (None, 1)


class TestRecord:
    def test_record_round_trip(self, tmp_path: Path) -> None:
        record = Record(
            facts={"model": "m"},
            precision=Precision.INT8,
            seen={"eager": make_observation(1.5), "x": Observation(refused="why")},
        )
        record.write(tmp_path / "record.json")
        assert Record.read(tmp_path / "record.json") == record
        assert [path.name for path in tmp_path.iterdir()] == ["record.json"]

    @pytest.mark.parametrize("content", ["{", '{"facts": {}, "seen": {"eager": {"rounds": 5}}}'])
    def test_damaged_record(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "record.json").write_text(content)
        with pytest.raises(MeasurementError, match=r"cannot resume"):
            Record.read(tmp_path / "record.json")

    def test_old_record_is_readable(self, tmp_path: Path) -> None:
        """`--resume` reads a record of an older release."""
        older = {
            "facts": {"model": "m"},
            "derivative": "output:image",
            "precision": "bf16",
            "seen": {
                "eager": {
                    "refused": "",
                    "judgment": {
                        "passed": True, "verdict": "PASS", "error": 0.0, "limit": 0.0001, "difference": 0.0,
                        "samples": 2, "same": 2, "interval": [0.3, 1.0], "undecided": "", "right": None,
                        "gradient_error": None,
                    },
                    "rounds": [
                        {"number": 0, "per_second": 2.0, "latencies_ms": [1.0], "cores": 1.0, "memory_mb": 9.0}
                    ],
                }
            },
        }  # fmt: skip
        (tmp_path / "record.json").write_text(json.dumps(older))
        record = Record.read(tmp_path / "record.json")
        assert record.precision is Precision.BF16
        assert record.observation("eager").rounds[0].per_second == 2.0
        record.write(tmp_path / "again.json")
        assert json.loads((tmp_path / "again.json").read_text()) == older

    def test_failed_write_keeps_old_record(self, tmp_path: Path) -> None:
        Record(facts={"model": "m"}).write(tmp_path / "record.json")
        with pytest.raises(TypeError):
            Record(facts={"model": object()}).write(tmp_path / "record.json")
        assert Record.read(tmp_path / "record.json").facts == {"model": "m"}


# Predictions beside those of eager PyTorch, by the numeric policy.


class TestJudgment:
    reference = np.random.default_rng(0).normal(0, 1, (50, 10)) + 8 * np.eye(10)[np.arange(50) % 10]

    def judged(self, found: Predictions) -> Judgment:
        return judge(Predictions(scores=self.reference), found, OTHER_ENGINE, noise=0, targets=None)

    def test_top_k_predictions(self) -> None:
        order = np.argsort(-self.reference, axis=1)[:, :5]
        scores = np.take_along_axis(self.reference, order, axis=1)
        assert self.judged(Predictions(scores=scores, indices=order)).passed
        assert not self.judged(Predictions(scores=scores, indices=(order + 1) % 10)).passed
        near = order.copy()
        near[:, [3, 4]] = near[:, [4, 3]]  # with their scores: the same answer in another order
        swapped = scores.copy()
        swapped[:, [3, 4]] = swapped[:, [4, 3]]
        assert self.judged(Predictions(scores=swapped, indices=near)).passed

    def test_gradient_limits(self) -> None:
        gradients = np.random.default_rng(1).normal(size=(50, 3, 4, 4))
        reference = Predictions(scores=self.reference, gradients=gradients)
        for factor, passed in ((1 + 4e-4, True), (1 + 6e-4, False)):
            found = Predictions(scores=self.reference, gradients=gradients * factor)
            assert judge(reference, found, OTHER_ENGINE, noise=0, targets=None).passed is passed

    def test_gradients_by_parameters(self) -> None:
        row = np.random.default_rng(2).normal(size=1000)
        good = judge_parameter_gradients(make_judgment(), row, row * (1 + 1e-6), 0.0)
        assert good.passed
        assert good.gradient_error == pytest.approx(1e-6, rel=1e-2)
        assert not judge_parameter_gradients(make_judgment(), row, row[::-1].copy(), 0.0).passed
        assert not judge_parameter_gradients(make_judgment(), row, row * 1.001, 1e-5).passed
        assert judge_parameter_gradients(make_judgment(), row, row * 1.001, 1e-3).passed  # fp32 knows no better
