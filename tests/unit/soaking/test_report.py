"""Failures of a soak, and its report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from soaking import report as tables
from soaking.report import failures, failures_of, summarize, to_json, to_text
from soaking.soak import Injection, Result
from soaking.traffic import Outcome

GOOD = Result(
    mode="polling",
    seed=1,
    seconds=60.0,
    first_start_s=3.0,
    counts={"client http": {"right": 100, "refused": 3}, "client grpc": {"right": 50}},
    bad=[],
    unexplained=[],
    unready=[],
    injections=[
        Injection(
            fault="SIGKILL to an instance",
            begun=10.0,
            ended=14.0,
            ready_again_s=seconds,
            unready={"503": 20},
            errors={"HTTP 503": 3},
            restarts={"instance_died": 1},
        )
        for seconds in (2.0, 6.0, 3.0)
    ],
    figures={"start_mb": 400.0, "end_mb": 401.0},
    left=[],
    stops=[(0, 2.5)],
    stuck=0,
    notes=[],
)
LOST = Outcome(sender="client http", verdict="lost", detail="NoAnswer", begun=0.0, ended=30.0)


def test_a_good_soak_passes() -> None:
    assert failures([GOOD]) == []
    assert to_text([GOOD]).endswith("passed")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"counts": {"client": {"right": 9, "wrong": 1}}}, "1 wrong answers"),
        ({"counts": {"client": {"right": 9, "lost": 2}}}, "2 requests without an answer"),
        ({"counts": {"client": {"refused": 9}}}, "no request was answered"),
        ({"unexplained": [LOST]}, "1 requests refused while no fault was at work"),
        ({"unready": ["1.0 s: 400", "1.1 s: 400"]}, "readiness failed 2 times"),
        ({"processes": {"supervisor": {"slope_mb_per_minute": 3.0}}}, "no longer young grew: supervisor 3.0 MB/min"),
        ({"figures": {"start_mb": 400.0, "end_mb": 800.0}}, "memory grew"),
        ({"left": ["graphkiln-x"]}, "left behind: graphkiln-x"),
        ({"stops": [(1, 31.0)]}, "SIGTERM ended with"),
        ({"stuck": 1}, "1 senders still wait"),
        ({"notes": ["ended early: no server"]}, "ended early"),
        ({"injections": [replace(GOOD.injections[0], ready_again_s=None)]}, "not ready again within 60 s: SIGKILL"),
        ({"injections": [replace(GOOD.injections[0], trouble="no stub")]}, "SIGKILL to an instance: no stub"),
    ],
)
def test_every_kind_of_failure(changed: dict[str, object], words: str) -> None:
    result = replace(GOOD, **changed)  # type: ignore[arg-type]
    assert any(words in failure for failure in failures_of(result))


def test_a_fault_without_recovery_has_no_worst_time() -> None:
    (row,) = summarize([*GOOD.injections, replace(GOOD.injections[0], ready_again_s=None)])
    assert row["worst_s"] is None


def test_the_report_as_text_and_as_json() -> None:
    noisy = replace(GOOD, left=["graphkiln-abcdefgh"], bad=[LOST])
    text = to_text([noisy])
    assert "wrong or lost: client http: NoAnswer" in text
    assert "| SIGKILL to an instance | 3 | 3.0 s | 6.0 s | 3 instance_died | 9 HTTP 503 |" in text
    document = json.loads(json.dumps(to_json([noisy])))
    assert document["totals"] == {"right": 150, "refused": 3}
    assert document["faults"][0]["fault"] == "SIGKILL to an instance"


def test_a_soak_without_answers_fails() -> None:
    assert failures([replace(GOOD, counts={})]) == ["polling: no request was answered"]


# The tables of docs/operations.md.

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


def test_faults_that_nobody_noticed_are_one_line() -> None:
    text = tables.fault_table(RUN)
    assert "| SIGKILL to an instance | 9 | 2.0 s | never | 9 instance_died | 7 HTTP 503," in text
    assert "| noise" not in text
    assert "No restart, no error, always ready: noise (2)." in text


def test_the_memory_of_each_kind_of_process() -> None:
    text = tables.fault_table(RUN)
    assert "| **polling**: all | - | 400.0 at the start, 401.0 at the end | - |" in text
    assert "| supervisor | 2 | 60 in its first minute, 61 in its 2nd | 0.1 |" in text
    assert "| other |" not in text


def test_only_marked_tables_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = "before\n<!-- docs/soak/soak.json -->\nold\n<!-- end -->\nafter\n"
    assert tables.fill(page) == page, "no run was saved"
    (tmp_path / "soak.json").write_text(json.dumps(RUN))
    filled = tables.fill(page)
    assert filled.startswith("before\n<!-- docs/soak/soak.json -->\n| fault |")
    assert filled.endswith("<!-- end -->\nafter\n")
    assert "old" not in filled
