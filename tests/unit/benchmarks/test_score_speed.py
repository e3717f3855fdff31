"""Parts of the benchmark on scoring: kept as they are done, one table of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import score_speed
from score_bound import BoundReport, Cost, Round
from score_runs import Reading, RunReport


def cost(elapsed_ms: float, cpu_ms: float) -> Cost:
    return Cost(elapsed_s=elapsed_ms / 1e3, cpu_s=cpu_ms / 1e3)


def reading(rows: int, worker_mb: float) -> Reading:
    return Reading(rows=rows, worker_mb=worker_mb, driver_mb=100)


def test_a_scorer_beside_its_bound() -> None:
    one = Round(decode=cost(2, 4), session=cost(8, 16), scorer=cost(12.5, 25))
    bound, ours = score_speed.bound_rows("int8", BoundReport(rounds=[one, one], session="ort", batch_size=4))
    assert (bound["rows/s"], bound["CPU ms"], bound["ratio"]) == (100, 20, "-")
    assert (ours["rows/s"], ours["ratio"], ours["CPU ms"], ours["CPU ratio"]) == (80, 0.8, 25, 0.8)
    assert "batches of 4" in str(ours["row"])


def test_runs_beside_the_peer_round_by_round() -> None:
    runs = {
        "ours": [RunReport(rows=100, seconds=1), RunReport(rows=100, seconds=2, stages={"read_s": 0.5})],
        score_speed.PEER: [RunReport(rows=100, seconds=2), RunReport(rows=100, seconds=4)],
    }
    ours, peer = score_speed.run_rows("fp32", runs)
    assert (ours["rows/s"], ours["ratio"], ours["spread"]) == (75, 2, 0)
    assert ours["note"] == "read 5.00 ms"
    assert (peer["ratio"], peer["note"]) == (1, "")


def test_memory_beside_that_of_a_tenth_of_the_rows() -> None:
    readings = [reading(0, 10), reading(100, 100), reading(500, 120), reading(1000, 140)]
    rows = score_speed.memory_rows(RunReport(rows=1000, seconds=1, readings=readings))
    assert [row["ratio"] for row in rows] == [1, 1.1, 1.2]
    assert (
        rows[0].keys()
        == score_speed.bound_rows(
            "int8",
            BoundReport(
                rounds=[Round(decode=cost(1, 1), session=cost(1, 1), scorer=cost(1, 1))], session="", batch_size=1
            ),
        )[0].keys()
    )


def test_plans() -> None:
    part = {"rows": 1000, "units": 1, "seconds": 2.0, "peak_mb": 99.6}
    resumed = {"units": 25, "open": 0, "seconds": 0.5}
    listing, simulated, resume = score_speed.plan_rows({"listing": part, "simulated": part, "resume": resumed})
    assert (listing["rows/s"], listing["note"]) == (500, "1 units, 2.0 s, peak 100 MB")
    assert "simulated" in str(simulated["row"])
    assert resume["note"] == "0.50 s, 0 left to do"


def test_faults_of_all_runs_together() -> None:
    one = {"rows": 2000, "lost": 0, "twice": 1, "errors": 0, "kills": {"worker": 6, "node": 4}, "seconds": 20.0}
    row = score_speed.fault_row([one, {**one, "twice": 0, "lost": 2, "kills": {"worker": 10}}])
    assert (row["row"], row["rows/s"]) == ("digits, three nodes, 2 runs, killed: 4 node, 16 worker", 100)
    assert row["note"] == "2 lost, 1 twice of 4000"


def test_verification() -> None:
    times = {"list_s": 0.1, "verify_s": 4.0, "verify_cpu_s": 3.0, "units_per_s": 0.5, "grown_mb": 20.2}
    row = score_speed.verify_row({"units": 2, "rows": 2000, **times})
    assert (row["row"], row["rows/s"]) == ("verification of 2 units, 2000 rows", 500)
    assert row["note"] == "4.0 s, processor time 3.0 s, listing 0.1 s, memory grew by 20 MB"


RUN = {"rows": 20, "lost": 0, "twice": 0, "errors": 0, "kills": {"node": 1}, "seconds": 2.0}
VERIFIED = {
    "units": 2,
    "rows": 20,
    "list_s": 0.1,
    "verify_s": 1.0,
    "verify_cpu_s": 1.0,
    "units_per_s": 2.0,
    "grown_mb": 1.0,
}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts that were measured."""
    found: list[str] = []

    def part(name: str, result: object) -> Any:
        return lambda _: found.append(name) or result

    parts: dict[str, Any] = {
        "fp32": [{"row": "fp32, graphkiln score, 1 worker", "rows/s": 10.0}],
        "verification": VERIFIED,
    }
    monkeypatch.setattr(score_speed, "KEPT", tmp_path)
    parts |= {name: RUN for name in score_speed.PARTS if name.startswith("faults")}
    monkeypatch.setattr(score_speed, "PARTS", {name: part(name, parts.get(name)) for name in score_speed.PARTS})
    return found


def test_every_part_has_its_rows_and_is_measured_once(measured: list[str]) -> None:
    rows = score_speed.benchmark_score(2, 3.0, "fp32")
    assert [row["row"] for row in rows] == ["fp32, graphkiln score, 1 worker"]
    rows = score_speed.benchmark_score(2, 3.0, "verification")
    assert [row["row"] for row in rows] == [
        "fp32, graphkiln score, 1 worker",
        "verification of 2 units, 20 rows",
    ]
    assert measured == ["fp32", "verification"]


def test_a_part_that_there_is_not_is_told_with_those_that_are() -> None:
    with pytest.raises(SystemExit, match=r"no part fp64; there are fp32, int8, memory, .*faults 10"):
        score_speed.benchmark_score(2, 3.0, "fp64")


def test_runs_with_faults_are_parts_of_their_own_and_one_row(measured: list[str]) -> None:
    score_speed.benchmark_score(2, 3.0, "faults 3")
    (row,) = score_speed.benchmark_score(2, 3.0, "faults 10")
    assert measured == ["faults 3", "faults 10"]
    assert row["row"] == "digits, three nodes, 2 runs, killed: 2 node"
    score_speed.benchmark_score(2, 3.0, "faults")
    assert measured[2:] == [f"faults {number}" for number in range(1, 11)]
