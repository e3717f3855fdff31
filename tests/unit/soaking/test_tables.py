"""The tables of docs/operations.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soaking import report as tables

RUN = {
    "seed": 3,
    "seconds": 1800.0,
    "faults": [
        {
            "fault": "SIGKILL to an instance",
            "times": 9,
            "median_s": 2.04,
            "worst_s": None,
            "restarts": {"instance_died": 9},
            "errors": {"HTTP 503": 7, "a": 1, "b": 2, "c": 1},
        },
        {"fault": "noise", "times": 2, "median_s": 0.0, "worst_s": 0.0, "restarts": {}, "errors": {}},
    ],
    "totals": {"right": 1000, "refused": 10},
    "modes": [
        {
            "mode": "polling",
            "figures": {"start_mb": 400.0, "end_mb": 401.0},
            "processes": {
                "supervisor": {"processes": 2, "mb_by_minute": {"0": 60.4, "1": 61.0}, "slope_mb_per_minute": 0.1},
                "other": {"processes": 2, "mb_by_minute": {"0": 60.4, "1": 61.0}, "slope_mb_per_minute": None},
            },
        }
    ],
}


def test_a_row_for_each_fault() -> None:
    text = tables.fault_table(RUN)
    assert (
        "| SIGKILL to an instance | 9 | 2.0 s | never | 9 instance_died | 7 HTTP 503, 2 b, 1 a, 1 other kinds |" in text
    )
    assert "| noise | 2 | stays | stays | - | - |" in text
    assert "30 minutes, seed 3. Requests: 1000 right, 10 refused, 0 wrong, 0 lost." in text


def test_the_memory_of_each_kind_of_process() -> None:
    text = tables.fault_table(RUN)
    assert "| **polling**: all | - | 400.0 at the start, 401.0 at the end | - |" in text
    assert "| supervisor | 2 | 60 in its first minute, 61 in its 2nd | 0.1 |" in text
    assert "| other |" not in text


def test_only_what_is_between_the_marks_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = "before\n<!-- docs/soak/soak.json -->\nold\n<!-- end -->\nafter\n"
    assert tables.fill(page) == page, "no run was kept"
    (tmp_path / "soak.json").write_text(json.dumps(RUN))
    filled = tables.fill(page)
    assert filled.startswith("before\n<!-- docs/soak/soak.json -->\n| fault |")
    assert filled.endswith("<!-- end -->\nafter\n")
    assert "old" not in filled
