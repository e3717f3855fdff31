"""Parts of the benchmark on scoring: kept as they are done, one table of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import score_speed

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
