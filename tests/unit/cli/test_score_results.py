"""Summary of `score` and result of `score --verify`."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime

import pytest
from score_events import RUN, Clock

from graphkiln.cli.score_results import (
    STAGES,
    describe_verification,
    print_estimate,
    print_summary,
    print_verification,
    score_report,
)
from graphkiln.reporting.report import render
from graphkiln.scoring.estimation import Estimate, Planned, Rate, Workers
from graphkiln.scoring.run_state import QuarantinedRow, RunState
from graphkiln.scoring.running import RunRecord, describe_run
from graphkiln_backend.scoring.messages import ScoreRequest, StageTimes
from graphkiln_backend.scoring.verify import Finding, Verification


def make_record(**changes: object) -> RunRecord:
    state = RunState(Clock())
    for event in RUN:
        state.observe(event)
    record = replace(
        describe_run(ScoreRequest(source="/in", model="", destination=""), state, datetime.now(UTC)),
        request={"model": "/store/m", "version": 3, "destination": "/out"},
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def test_long_summary_is_shortened(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    record = make_record()
    rows = tuple(QuarantinedRow(id=f"{i}.jpg", unit_id="u", reason="\x1b[2J" + "x" * 100) for i in range(50))
    figures = replace(record.figures, quarantined=50)
    print_summary(replace(record, workers=record.workers * 100, quarantined=rows, figures=figures))
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 120
    assert max(map(len, printed.splitlines()[:-2])) <= 80
    assert "and 40 more" in printed
    assert "and 180 more" in printed
    assert "\x1b" not in printed


def test_summary_of_a_run_without_work(capsys: pytest.CaptureFixture[str]) -> None:
    record = make_record(workers=())
    figures = replace(record.figures, units_done=0, units_before=10, scored=0, errors=0, rows_before=1000)
    print_summary(replace(record, figures=figures))
    printed = capsys.readouterr().out
    assert "1,000 answered before" in printed
    assert "where time went" not in printed
    assert printed.endswith("next: graphkiln score --verify /out\n")


def test_whole_destination(capsys: pytest.CaptureFixture[str]) -> None:
    whole = Verification(units=2, inputs=10, scored=9, errors=1, configurations=("c0ffee",), findings=())
    print_verification(whole, "/out")
    said = "/out is whole: 10 rows = 9 scored + 1 errors, 2 units, configuration c0ffee\n"
    assert capsys.readouterr().out == said


def test_damaged_destination(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding(unit_id="u", place="/out/u.parquet", message="it is damaged: \x1b[2J", hint="remove it")
    broken = Verification(units=2, inputs=10, scored=4, errors=1, configurations=(), findings=(finding,) * 30)
    print_verification(broken, "/out")
    printed = capsys.readouterr().out
    assert printed.startswith("unit u (/out/u.parquet): it is damaged: \\x1b[2J (remove it)\n")
    assert "and 10 more\n" in printed
    assert printed.endswith("/out is not whole: 4 scored + 1 errors of 10 rows in 2 units\n")


def test_next_command_is_quoted_for_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    request = {"model": "/store/m", "version": 3, "destination": "/my answers", "format": "delta", "ledger": ""}
    print_summary(make_record(request=request))
    assert capsys.readouterr().out.endswith("next: graphkiln score --verify '/my answers' --format delta\n")


def test_verification_as_plain_data() -> None:
    finding = Finding(unit_id="u", place="/out/u.parquet", message="it is damaged", hint="remove it")
    broken = Verification(units=2, inputs=10, scored=4, errors=1, configurations=("c",), findings=(finding,))
    assert describe_verification(broken, "/out") == {
        "destination": "/out", "ok": False, "units": 2, "inputs": 10, "scored": 4, "errors": 1, "configurations": ["c"],
        "findings": [{"unit_id": "u", "place": "/out/u.parquet", "message": "it is damaged", "hint": "remove it"}],
    }  # fmt: skip


# HTML report of a run.


@pytest.fixture
def record() -> RunRecord:
    state = RunState(Clock())
    for event in RUN:
        state.observe(event)
    return replace(
        describe_run(ScoreRequest(source="/in", model="", destination=""), state, datetime.now(UTC)),
        request={"model": "/store/m", "version": 3, "destination": "/out"},
        quarantined=(),
    )


def test_every_stage_has_a_description() -> None:
    assert [field.name for field in fields(StageTimes)] == list(STAGES)


def test_report_has_the_figures_of_the_run(record: RunRecord) -> None:
    rows, stages, workers = score_report(record, {}, "graphkiln score").sections
    assert dict(rows.table.rows)["scored by this run"] == f"{record.figures.scored:,}"
    assert len(stages.table.rows) == len(STAGES)
    assert [row[0] for row in workers.table.rows] == [f"{each.node}:{each.pid}" for each in record.workers]
    assert sum(int(row[3].replace(",", "")) for row in workers.table.rows) == sum(each.rows for each in record.workers)


def test_quarantined_rows_are_escaped(record: RunRecord) -> None:
    bad = QuarantinedRow(id="<b>.jpg", unit_id="u", reason="killed")
    page = render(score_report(replace(record, quarantined=(bad,)), {}, "graphkiln score"))
    assert "<td>&lt;b&gt;.jpg</td><td>killed</td>" in page


def test_report_of_a_run_without_work(record: RunRecord) -> None:
    figures = replace(
        record.figures, units_done=0, scored=0, errors=0, rows_before=0, quarantined=0, times=StageTimes()
    )
    page = render(score_report(replace(record, figures=figures, workers=()), {"date": "today"}, "graphkiln score"))
    assert page.count("<svg") == 3


# Output of `score --dry-run`.

REQUEST = ScoreRequest(source="/photos", model="/store/m", destination="/out")
ESTIMATE = Estimate(
    configuration="c0ffee",
    model="resnet50 version 3",
    session="openvino on cpu in int8",
    planned=Planned(units=1000, rows=10**6, size_bytes=120 << 30, units_before=250, rows_before=250_000),
    workers=Workers(by_node={f"node-{number}": 4 for number in range(40)}, cores=8, here=4),
    rate=Rate(rows=4096, errors=2, pieces=10, per_s=812.4, interval=(790.2, 834.6)),
    start_s=4.2,
    seconds=3600.0,
    seconds_interval=(3500.0, 7300.0),
)


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def printed(estimate: Estimate, capsys: pytest.CaptureFixture[str]) -> str:
    print_estimate(estimate, REQUEST)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.replace("\u2502", " ").split())


def test_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(ESTIMATE, capsys)
    for said in (
        "1,000,000 rows in 1,000 units, 120 GiB",
        "250,000 rows in 250 units: 750,000 rows are left",
        "resnet50 version 3: openvino on cpu in int8",
        "4 on node-0",
        "and 30 more nodes, 8 cores each",
        "4,096 rows in 10 pieces, 2 with an error",
        "812 rows/s (790 to 835 with 95% confidence)",
        "60 min, of which 4 s until workers are ready (58 min to 2.0 h)",
    ):
        assert said in words


def test_estimate_without_rows_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing is left to be scored" in printed(replace(ESTIMATE, rate=None), capsys)


def test_estimate_without_interval_and_room(capsys: pytest.CaptureFixture[str]) -> None:
    rate = Rate(rows=1, errors=0, pieces=1, per_s=1.0, interval=None)
    nowhere = replace(ESTIMATE, rate=rate, workers=replace(ESTIMATE.workers, by_node={}))
    words = printed(nowhere, capsys)
    assert "too few rows for an interval" in words
    assert "no node has room" in words


def test_estimate_with_stale_results(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(replace(ESTIMATE, planned=replace(ESTIMATE.planned, stale=7)), capsys)
    assert "7 units in the destination are not of this input and configuration" in words
