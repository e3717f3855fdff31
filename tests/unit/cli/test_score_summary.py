"""What `score` prints in the end."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from score_events import RUN, Clock

from graphkiln.cli.score_results import describe_verification, print_summary, print_verification
from graphkiln.scoring.run_state import QuarantinedRow, RunState
from graphkiln.scoring.running import RunRecord, describe_run
from graphkiln_backend.scoring.messages import ScoreRequest
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


def test_many_workers_and_rows_stay_legible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_nothing_to_do_is_said_in_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    record = make_record(workers=())
    figures = replace(record.figures, units_done=0, units_before=10, scored=0, errors=0, rows_before=1000)
    print_summary(replace(record, figures=figures))
    printed = capsys.readouterr().out
    assert "1,000 answered before" in printed
    assert "where time went" not in printed
    assert printed.endswith("next: graphkiln score --verify /out\n")


def test_a_destination_that_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    whole = Verification(units=2, inputs=10, scored=9, errors=1, configurations=("c0ffee",), findings=())
    print_verification(whole, "/out")
    said = "/out is whole: 10 rows = 9 scored + 1 errors, 2 units, configuration c0ffee\n"
    assert capsys.readouterr().out == said


def test_one_that_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding(unit_id="u", place="/out/u.parquet", message="it is damaged: \x1b[2J", hint="remove it")
    broken = Verification(units=2, inputs=10, scored=4, errors=1, configurations=(), findings=(finding,) * 30)
    print_verification(broken, "/out")
    printed = capsys.readouterr().out
    assert printed.startswith("unit u (/out/u.parquet): it is damaged: \\x1b[2J (remove it)\n")
    assert "and 10 more\n" in printed
    assert printed.endswith("/out is not whole: 4 scored + 1 errors of 10 rows in 2 units\n")


def test_what_verifies_a_destination_can_be_pasted_into_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    request = {"model": "/store/m", "version": 3, "destination": "/my answers", "format": "delta", "ledger": ""}
    print_summary(make_record(request=request))
    assert capsys.readouterr().out.endswith("next: graphkiln score --verify '/my answers' --format delta\n")


def test_a_verification_as_plain_data() -> None:
    finding = Finding(unit_id="u", place="/out/u.parquet", message="it is damaged", hint="remove it")
    broken = Verification(units=2, inputs=10, scored=4, errors=1, configurations=("c",), findings=(finding,))
    assert describe_verification(broken, "/out") == {
        "destination": "/out", "ok": False, "units": 2, "inputs": 10, "scored": 4, "errors": 1, "configurations": ["c"],
        "findings": [{"unit_id": "u", "place": "/out/u.parquet", "message": "it is damaged", "hint": "remove it"}],
    }  # fmt: skip
