"""The comparison of copies, stages and shards: what it reports, and how an interrupted one goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parallel_speed
import pytest
from measurement import Summary
from parallel_speed import _COPIES, _LATENCY, _ONE, _PARTS, _SHARDS, _STAGES, _THROUGHPUT, _Built
from split_sessions import Stopwatch

from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.graph_costs import GraphCosts, NodeCost
from graphkiln_backend.graph.parallelism import Parallelism


def test_the_share_of_sums_is_that_of_all_runs() -> None:
    runs, sums = Stopwatch(), Stopwatch()
    runs.seconds, sums.seconds = 4.0, 0.4
    assert parallel_speed.sum_share(_Built(run=dict, runs=runs, sums=sums)) == "10.0%"
    assert parallel_speed.sum_share(_Built(run=dict, runs=runs)) == "-"
    assert parallel_speed.sum_share(_Built(run=dict, sums=sums)) == "-"


def spread(*held: int, whole: int) -> Any:
    costs = GraphCosts(
        nodes=(NodeCost(name="n", op_type="MatMul", weights={"w": whole}),), inputs={}, outputs=frozenset()
    )
    listed = [SimpleNamespace(weight_bytes=size) for size in held]
    numbers = Parallelism(pipeline=2, micro_batches=4)
    return SimpleNamespace(split=SimpleNamespace(stages=listed, whole=costs, numbers=numbers))


def test_a_row_is_compared_with_the_reference_of_what_is_measured() -> None:
    found = {
        _ONE: Summary(per_second=2.0, p50_ms=500.0, p99_ms=500.0, rates=(2.0, 2.0, 4.0)),
        _SHARDS: Summary(per_second=3.0, p50_ms=333.33, p99_ms=400.0, rates=(3.0, 3.2, 6.0)),
    }
    built = _Built(run=dict, spread=spread(30, 20, whole=50))
    assert parallel_speed._row("m", _LATENCY, _SHARDS, built, found, 1) == {
        "model": "m", "measured": "one row", "set-up": _SHARDS, "samples/s": 3.0, "p50 ms": 333.3, "ratio": 1.5,
        "spread": 0.033, "weights a device": "60%", "sums": "-",
    }  # fmt: skip
    copies = {_COPIES: Summary(per_second=0.5, p50_ms=2000.0, p99_ms=2000.0, rates=(0.5,))}
    row = parallel_speed._row("m", _THROUGHPUT, _COPIES, _Built(run=dict), copies, 16)
    chosen = {_STAGES: Summary(per_second=1.0, p50_ms=1.0, p99_ms=1.0, rates=(1.0,))}
    staged = parallel_speed._row("m", _PARTS, _STAGES, built, chosen, 16)
    assert staged["set-up"] == "pipeline=2: 4 chosen"
    assert (row["samples/s"], row["ratio"], row["weights a device"]) == (8.0, 1.0, "100%")


def test_every_model_has_its_references() -> None:
    for measured in parallel_speed._MEASURED.values():
        for what, set_ups in measured.items():
            assert parallel_speed._REFERENCE[what] in set_ups


class TestGoingOn:
    @pytest.fixture
    def measured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        names: list[str] = []

        def fake(name: str, *_: object) -> list[dict[str, object]]:
            names.append(name)
            return [{"model": name, "ratio": len(names)}]

        monkeypatch.setattr(parallel_speed, "PARTS", tmp_path)
        monkeypatch.setattr(parallel_speed, "_measure_model", fake)
        monkeypatch.setattr(parallel_speed, "measure_apart", lambda _, measure: measure())
        monkeypatch.setattr(parallel_speed, "usable_cores", lambda: 2)
        return names

    def test_what_is_done_is_not_measured_again(self, measured: list[str]) -> None:
        first = parallel_speed.benchmark_parallel(1, 0.1)
        assert measured == list(parallel_speed._MEASURED)
        assert parallel_speed.benchmark_parallel(1, 0.1) == first
        assert measured == list(parallel_speed._MEASURED)

    def test_unless_it_is_asked_for_by_its_name(self, measured: list[str]) -> None:
        parallel_speed.benchmark_parallel(1, 0.1)
        rows = parallel_speed.benchmark_parallel(1, 0.1, "resnet50")
        assert measured[-1] == "resnet50"
        assert [row["ratio"] for row in rows if row["model"] == "resnet50"] == [len(measured)]

    def test_one_that_hangs_is_named_when_the_others_are_done(
        self, measured: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def apart(name: str, measure: Callable[[], Any]) -> Any:
            if name == "resnet50":
                raise MeasurementError(f"{name}: 'round 1/2: OpenVINO, 2 streams' did not end within 900 s")
            return measure()

        monkeypatch.setattr(parallel_speed, "measure_apart", apart)
        with pytest.raises(SystemExit, match="resnet50: 'round 1/2: OpenVINO, 2 streams' did not end"):
            parallel_speed.benchmark_parallel(1, 0.1)
        assert measured == [name for name in parallel_speed._MEASURED if name != "resnet50"]

    @pytest.mark.usefixtures("measured")
    def test_a_name_that_is_none(self) -> None:
        with pytest.raises(SystemExit, match="there is no model 'bert': large product, resnet50"):
            parallel_speed.benchmark_parallel(1, 0.1, "bert")
