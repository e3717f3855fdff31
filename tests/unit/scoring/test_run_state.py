"""Figures and messages from the events of a run."""

from __future__ import annotations

import json

import pytest
from score_events import ENDED, FACTS, PLANNED, RUN, Clock, committed

from graphkiln.scoring.run_state import Progress, RunState
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.scoring.messages import (
    NodeLost,
    NodeRefused,
    RowQuarantined,
    UnitFailed,
    WorkerReady,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> RunState:
    return RunState(clock)


def test_events_are_counted(state: RunState) -> None:
    for event in RUN:
        progress = state.observe(event)
    assert progress.event == "finished"
    assert (progress.units, progress.units_before, progress.units_done) == (10, 4, 2)
    assert (progress.rows, progress.rows_before, progress.rows_done) == (1000, 400, 200)
    assert (progress.errors, progress.quarantined, progress.retries) == (3, 1, 1)
    assert state.twins == 1
    assert [(row.id, row.unit_id) for row in state.quarantined] == [("cats/7.jpg", "b")]
    assert [worker.ended for worker in progress.workers] == ["killed by signal 11", ""]


def test_rates_start_when_the_first_worker_is_ready(state: RunState, clock: Clock) -> None:
    state.observe(PLANNED)
    assert state.progress().seconds_left is None
    clock.now = 100.0
    state.observe(WorkerReady(worker="worker-1", facts=FACTS))
    clock.now = 110.0
    progress = state.observe(committed("a", rows=200))
    assert progress.rows_per_s == pytest.approx(20)
    assert progress.seconds_left == pytest.approx(400 / 20)
    assert progress.workers[0].rows_per_s == pytest.approx(20)


def test_progress_has_the_rate_of_the_last_minute(state: RunState, clock: Clock) -> None:
    state.observe(PLANNED)
    state.observe(WorkerReady(worker="worker-1", facts=FACTS))
    clock.now = 10.0
    state.observe(committed("a", rows=100))
    clock.now = 100.0
    assert state.observe(committed("b", rows=60)).rows_per_s == pytest.approx(1.0)
    assert state.rows_per_s == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("event", "name", "words"),
    [
        (ENDED, "worker", "worker-1 on node-1 ended: killed by signal 11"),
        (NodeLost(node="node-2"), "node", "node-2 is gone"),
        (NodeRefused(node="node-2", reason="it has no room"), "node", "node-2 is not used: it has no room"),
        (UnitFailed(unit_id="a", path="x.tar", reason="gone"), "failed", "x.tar: unit a stays without a result: gone"),
        (RowQuarantined(unit_id="a", path="x.tar", position=3, reason="eats"), "quarantine", "row 3 of unit a: eats"),
    ],
)
def test_event_has_a_message_which_is_kept(state: RunState, event: object, name: str, words: str) -> None:
    progress = state.observe(event)  # type: ignore[arg-type]
    assert progress.event == name
    assert words in progress.message
    assert len(state.problems) == 1


def test_number_of_kept_problems_is_limited(state: RunState) -> None:
    for _ in range(1100):
        state.observe(committed("a", errors=2, quarantined={"r": "x", "s": "x"}))
        state.observe(ENDED)
    assert len(state.quarantined) == len(state.problems) == 1000
    assert state.quarantined_rows == 2200


def test_every_event_has_a_name(state: RunState) -> None:
    for event in RUN:
        assert f"`{state.observe(event).event}`" in (Progress.__doc__ or "")


def test_run_with_errors_only_warns_once(state: RunState) -> None:
    assert not state.observe(committed("a", rows=99, errors=99, example="there is no file /x/1.jpg")).message
    progress = state.observe(committed("b", rows=901, errors=901, example="there is no file /x/2.jpg"))
    assert progress.message == "all 1,000 rows so far have an error, such as: there is no file /x/2.jpg"
    assert not state.observe(committed("c", rows=100, errors=100)).message
    assert state.problems == [progress.message]


def test_json_line_can_be_decoded() -> None:
    state = RunState(Clock())
    for event in RUN:
        progress = state.observe(event)
        assert decode(Progress, json.loads(json.dumps(encode(progress)))) == progress
