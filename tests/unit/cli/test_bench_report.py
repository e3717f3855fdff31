"""What bench measured, as a page: the figures of `--json`, in charts with their tables."""

from __future__ import annotations

from typing import Any

import pytest

from graphkiln.cli.bench_report import bench_report
from graphkiln.reporting.report import Report, render


def row(load: str, per_second: float, **changes: Any) -> dict[str, Any]:
    client = {
        "per_second": per_second, "per_second_range": (per_second - 2, per_second + 3), "unsent": 0, "errors": {},
        "latency_ms": {"p50": 1.5, "p90": 2.0, "p99": 3.25, "p99.9": 4.0, "mean": 1.6}, "client_cores": 0.25,
    }  # fmt: skip
    return {
        "load": load, "client": {**client, **changes}, "batch": 1.5, "server_cores": None,
        "generator": {"name": "graphkiln", "processes": 3, "share_of_machine": 0.12},
        "server_us": {"queue": 10.0, "input": 20.0, "infer": 1200.0, "output": 30.0},
    }  # fmt: skip


def report(*rows: dict[str, Any]) -> Report:
    return bench_report(rows, "m", "http://h:1", {"date": "today"}, "graphkiln bench --model m")


def test_figures_are_those_that_were_measured() -> None:
    rates, latencies, stages = report(row("1", 100.0), row("4", 300.0)).sections
    assert rates.table.rows[1] == ("4", "none", "300.0", "298.0", "303.0", "0", "0.25")
    assert latencies.table.rows[0] == ("1", "1.50", "2.00", "3.25", "4.00")
    assert stages.table.rows[0] == ("1", "10", "20", "1200", "30", "1.5", "-")
    assert rates.chart is not None
    one, four = rates.chart["rows"]
    assert four["width"] == pytest.approx(3 * one["width"], rel=0.01)


def test_stages_follow_each_other() -> None:
    *_, stages = report(row("1", 100.0)).sections
    assert stages.chart is not None
    queue, prepared, infer, output = stages.chart["rows"]
    assert queue["x"] <= prepared["x"] <= infer["x"] < output["x"]
    assert infer["width"] > 10 * prepared["width"]


def test_nothing_answered_has_no_latencies_and_says_the_errors() -> None:
    failed = report(row("1", 0.0, latency_ms={}, errors={"ServerError": 3}))
    rates, latencies, _ = failed.sections
    assert rates.table.rows[0][1] == "3 ServerError"
    assert latencies.table.rows == [("1", "-", "-", "-", "-")]
    assert latencies.chart is not None
    assert latencies.chart["rows"] == []
    assert "3 ServerError" in render(failed)


def test_the_page_has_a_table_for_each_chart_and_what_repeats_it() -> None:
    page = render(report(row("1", 100.0)))
    assert page.count("<svg") == page.count("<table") == 3
    assert "graphkiln bench --model m" in page
    assert "3 processes, up to 12% of this machine" in page


def test_a_server_of_which_nothing_is_known_has_no_stages() -> None:
    unknown = {**row("1", 100.0), "server_us": dict.fromkeys(("queue", "input", "infer", "output")), "batch": None}
    *_, stages = report(unknown).sections
    assert stages.table.rows == [("1", *"------")]
    assert stages.chart is not None
    assert stages.chart["rows"] == []
