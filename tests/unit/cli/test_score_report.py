"""What a run came to, as a page."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime

import pytest
from score_events import RUN, Clock

from graphkiln.cli.score_results import STAGES, score_report
from graphkiln.reporting.report import render
from graphkiln.scoring.run_state import QuarantinedRow, RunState
from graphkiln.scoring.running import RunRecord, describe_run
from graphkiln_backend.scoring.messages import ScoreRequest, StageTimes


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


def test_every_stage_has_its_words() -> None:
    assert [field.name for field in fields(StageTimes)] == list(STAGES)


def test_figures_are_those_of_the_run(record: RunRecord) -> None:
    rows, stages, workers = score_report(record, {}, "graphkiln score").sections
    assert dict(rows.table.rows)["scored by this run"] == f"{record.figures.scored:,}"
    assert len(stages.table.rows) == len(STAGES)
    assert [row[0] for row in workers.table.rows] == [f"{each.node}:{each.pid}" for each in record.workers]
    assert sum(int(row[3].replace(",", "")) for row in workers.table.rows) == sum(each.rows for each in record.workers)


def test_rows_that_ended_their_worker_are_named_as_text(record: RunRecord) -> None:
    bad = QuarantinedRow(id="<b>.jpg", unit_id="u", reason="killed")
    page = render(score_report(replace(record, quarantined=(bad,)), {}, "graphkiln score"))
    assert "<td>&lt;b&gt;.jpg</td><td>killed</td>" in page


def test_nothing_to_do_is_a_page_too(record: RunRecord) -> None:
    figures = replace(
        record.figures, units_done=0, scored=0, errors=0, rows_before=0, quarantined=0, times=StageTimes()
    )
    page = render(score_report(replace(record, figures=figures, workers=()), {"date": "today"}, "graphkiln score"))
    assert page.count("<svg") == 3
