"""`_run.json`: what it says of a run, what it keeps of those before it, and what it must not hold."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from score_events import FACTS, RUN, Clock

from graphkiln.scoring import record as records
from graphkiln.scoring.record import NOTE, RunRecord, describe_run
from graphkiln.scoring.run_state import RunState
from graphkiln_backend.lowering.settings import Override
from graphkiln_backend.scoring.opening import open_destination
from graphkiln_backend.scoring.request import ScoreRequest

REQUEST = ScoreRequest(source="/photos", model="/store/m", version=3, destination="/out")


def make_record(outcome: str = "finished") -> RunRecord:
    state = RunState(Clock())
    for event in RUN:
        state.observe(event)
    return replace(describe_run(REQUEST, state, datetime.now(UTC)), outcome=outcome)


def write(record: RunRecord, folder: Path) -> dict[str, Any]:
    destination = open_destination(replace(REQUEST, destination=str(folder)))
    records.write_record(record, destination)
    document: dict[str, Any] = json.loads((folder / NOTE).read_text())
    return document


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    open_destination(replace(REQUEST, destination=str(tmp_path / "out"))).prepare()
    return tmp_path / "out"


def test_who_computed_what_with_what(folder: Path) -> None:
    document = write(make_record(), folder)
    assert document["figures"]["scored"] == 197
    assert document["figures"]["times"]["compute_s"] == 5.0
    assert [worker["rows"] for worker in document["workers"]] == [200, 0]
    worker = document["workers"][0]
    assert (worker["node"], worker["session"], worker["version"]) == (FACTS.node, FACTS.session, FACTS.version)
    assert worker["self_test"]["relative_l2"] == 2e-7
    assert document["quarantined"][0]["id"] == "cats/7.jpg"
    assert document["request"]["version"] == 3
    assert {"python", "graphkiln", "ray", "numpy"} <= set(document["versions"])


def test_runs_before_it_have_a_line_each_newest_first(folder: Path) -> None:
    write(make_record("interrupted"), folder)
    write(make_record("failed"), folder)
    document = write(make_record(), folder)
    assert document["outcome"] == "finished"
    assert [line["outcome"] for line in document["earlier"]] == ["failed", "interrupted"]
    assert document["earlier"][0]["scored"] == 197


def test_a_damaged_one_is_replaced_and_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / NOTE).write_text("{")
    assert write(make_record(), folder)["earlier"] == []
    assert "was damaged" in caplog.text


def test_settings_that_hold_are_written_and_no_credentials() -> None:
    address = "postgresql://user:hunter2@host/db"
    overrides = (Override("precision", "bf16", "--set"), Override("precision", "fp16", "--set"))
    asked = replace(REQUEST, source=address, destination=address, ledger=address, overrides=overrides)
    described = describe_run(asked, RunState(), datetime.now(UTC)).request
    assert described["settings"] == {"precision": "bf16"}
    assert "hunter2" not in json.dumps(described)
