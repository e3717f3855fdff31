"""The comparison of copies, stages and shards: what it reports, and how an interrupted one goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parallel_speed
import pytest
from measurement import Summary
from parallel_speed import _COPIES, _LATENCY, _ONE, _SHARDS, _THROUGHPUT, _Built

from graphkiln_backend.graph.graph_costs import GraphCosts, NodeCost
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.parallel.pipeline import PipelineSession, Stage
from graphkiln_backend.lowering.parallel.shards import ShardedSession
from graphkiln_backend.lowering.parallel.worker import Worker

NOTHING = Signature(inputs=(), outputs=())


def stages(*sums: tuple[float, float]) -> PipelineSession:
    """A session of stages that ran and added up for these seconds."""
    listed = []
    for run_s, reduce_s in sums:
        sharded = ShardedSession([], [], NOTHING)
        sharded.run_s, sharded.reduce_s = run_s, reduce_s
        listed.append(Stage(session=sharded, worker=Worker(), inputs=(), outputs=()))
    return PipelineSession(listed, NOTHING, 1)


def test_the_share_of_sums_is_that_of_all_runs() -> None:
    shards = ShardedSession([], [], NOTHING)
    assert parallel_speed.sum_share([stages((3.0, 0.3), (1.0, 0.1))]) == "10.0%"
    assert parallel_speed.sum_share([stages(), shards]) == "-"
    assert parallel_speed.sum_share([]) == "-"


def spread(*held: int, whole: int) -> Any:
    costs = GraphCosts(
        nodes=(NodeCost(name="n", op_type="MatMul", weights={"w": whole}),), inputs={}, outputs=frozenset()
    )
    listed = [SimpleNamespace(weight_bytes=size) for size in held]
    return SimpleNamespace(split=SimpleNamespace(stages=listed, whole=costs))


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

    @pytest.mark.usefixtures("measured")
    def test_a_name_that_is_none(self) -> None:
        with pytest.raises(SystemExit, match="there is no model 'bert': large product, resnet50"):
            parallel_speed.benchmark_parallel(1, 0.1, "bert")
