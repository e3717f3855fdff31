"""Parts of the benchmark on scoring: saved when they are measured, one table of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import score_speed
from score_runs import run_apart

from graphkiln_backend.graph.errors import MeasurementError


def test_a_scorer_is_compared_with_its_parts_alone() -> None:
    costs = {"decode": [(0.002, 0.004)] * 2, "session": [(0.008, 0.016)] * 2, "scorer": [(0.0125, 0.025)] * 2}
    bound, ours = score_speed.bound_rows("int8, batches of 4", costs)
    assert (bound["rows/s"], bound["CPU ms"], bound["ratio"]) == (100, 20, "-")
    assert (ours["rows/s"], ours["ratio"], ours["CPU ms"], ours["CPU ratio"]) == (80, 0.8, 25, 0.8)


def test_runs_are_compared_with_the_peer_round_by_round() -> None:
    runs: dict[str, list[dict[str, Any]]] = {
        "ours": [{"rows": 100, "seconds": 1}, {"rows": 100, "seconds": 2, "stages": {"read_s": 0.5}}],
        score_speed.PEER: [{"rows": 100, "seconds": 2}, {"rows": 100, "seconds": 4}],
    }
    ours, peer = score_speed.run_rows("fp32", runs)
    assert (ours["rows/s"], ours["ratio"], ours["spread"]) == (75, 2, 0)
    assert ours["note"] == "read 5.00 ms"
    assert (peer["ratio"], peer["note"]) == (1, "")


def test_memory_is_compared_with_that_after_a_tenth_of_the_rows() -> None:
    megabytes = {0: 10, 100: 100, 500: 120, 900: 140}
    readings = [{"rows": rows, "worker_mb": mb, "driver_mb": 100} for rows, mb in megabytes.items()]
    rows = score_speed.memory_rows({"rows": 1000, "seconds": 1, "readings": readings})
    assert [row["ratio"] for row in rows] == [1, 1.1, 1.2]


def test_rows_of_plans_and_faults() -> None:
    part = {"rows": 1000, "units": 1, "seconds": 2.0, "peak_mb": 99.6}
    resumed = {"units": 25, "open": 0, "seconds": 0.5}
    listing, _, resume = score_speed.plan_rows({"listing": part, "simulated": part, "resume": resumed})
    assert (listing["rows/s"], listing["note"]) == (500, "1 units, 2.0 s, peak 100 MB")
    assert resume["note"] == "0.50 s, 0 left to do"
    one = {"rows": 2000, "lost": 0, "twice": 1, "errors": 0, "kills": {"worker": 6, "node": 4}, "seconds": 20.0}
    row = score_speed.fault_row([one, {**one, "twice": 0, "lost": 2, "kills": {"worker": 10}}])
    assert (row["row"], row["rows/s"]) == ("digits, three nodes, 2 runs, killed: 4 node, 16 worker", 100)
    assert row["note"] == "2 lost, 1 twice of 4000"


RUN = {"rows": 20, "lost": 0, "twice": 0, "errors": 0, "kills": {"node": 1}, "seconds": 2.0}
VERIFIED = {"units": 2, "rows": 2000, "list_s": 0.1, "verify_s": 4.0, "verify_cpu_s": 3.0, "grown_mb": 20.2}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts that were measured."""
    found: list[str] = []

    def part(name: str, result: object) -> Any:
        return lambda _: found.append(name) or result

    results: dict[str, Any] = {"fp32": [{"row": "fp32, 1 worker"}], "verification": VERIFIED}
    results |= {name: RUN for name in score_speed.PARTS if name.startswith("faults")}
    monkeypatch.setattr(score_speed, "KEPT", tmp_path)
    monkeypatch.setattr(score_speed, "PARTS", {name: part(name, results.get(name)) for name in score_speed.PARTS})
    return found


def test_each_part_is_measured_alone_and_all_saved_parts_have_rows(measured: list[str]) -> None:
    score_speed.benchmark_score(2, 3.0, "fp32")
    score_speed.benchmark_score(2, 3.0, "faults 3")
    rows = score_speed.benchmark_score(2, 3.0, "verification")
    assert measured == ["fp32", "faults 3", "verification"]
    assert [row["row"] for row in rows] == [
        "fp32, 1 worker",
        "verification of 2 units, 2000 rows",
        "digits, three nodes, 1 runs, killed: 1 node",
    ]
    assert rows[1]["note"] == "4.0 s, processor time 3.0 s, listing 0.1 s, memory grew by 20 MB"
    score_speed.benchmark_score(2, 3.0, "faults")
    assert measured[3:] == [f"faults {number}" for number in range(1, 11)]


def test_an_unknown_part_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"no part fp64; there are fp32, int8, memory, .*faults 10"):
        score_speed.benchmark_score(2, 3.0, "fp64")


def test_programs_run_apart() -> None:
    resumed = run_apart("resume", units=3)
    assert (resumed["units"], resumed["open"]) == (3, 0)
    assert resumed["peak_mb"] > 20
    assert run_apart("verification", units=2)["rows"] == 2000
    with pytest.raises(MeasurementError, match="plan-listing failed"):
        run_apart("plan-listing", rows="many")
