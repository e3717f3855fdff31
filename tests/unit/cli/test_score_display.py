"""Progress of `score`."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from score_events import RUN, Clock, committed

from graphkiln.cli.score_display import (
    JsonDisplay,
    LineDisplay,
    TerminalDisplay,
    draw,
    format_duration,
    format_progress,
)
from graphkiln.scoring.run_state import Progress, RunState, WorkerProgress

WORKER = WorkerProgress(node="node-1", pid=7, session="onnxruntime on cpu in fp32", units=2, rows=200, rows_per_s=50)
PROGRESS = Progress(
    event="unit", units=10, units_before=4, units_done=2, rows=1000, rows_before=400, rows_done=200, errors=3,
    rows_per_s=50.0, seconds_left=8.0, workers=(WORKER,),
)  # fmt: skip


def lines_of(progress: Progress, *messages: str) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=80).print(draw(progress, list(messages)))
    return file.getvalue().splitlines()


def test_progress_in_one_line() -> None:
    assert format_progress(PROGRESS) == "6/10 units, 600/1,000 rows, 50 rows/s, 3 errors, 8 s left"
    begun = replace(PROGRESS, units_done=0, rows_done=0, errors=1)
    assert format_progress(begun) == "4/10 units, 400/1,000 rows, 4 units by earlier runs, 1 error"


@pytest.mark.parametrize(("seconds", "text"), [(41.2, "41 s"), (720, "12 min"), (9000, "2.5 h"), (200_000, "2.3 d")])
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_live_table_fits_80_columns() -> None:
    drawn = lines_of(PROGRESS, "x" * 200)
    assert max(map(len, drawn)) <= 80
    assert any("node-1:7" in line and "onnxruntime on cpu in fp32" in line and "200" in line for line in drawn)


def test_number_of_drawn_workers_is_limited() -> None:
    gone = replace(WORKER, ended="killed")
    drawn = lines_of(replace(PROGRESS, workers=(gone, *[WORKER] * 400)))
    assert len(drawn) < 20
    assert "and 388 more" in "\n".join(drawn)
    assert "1 ended" in "\n".join(drawn)


def test_json_lines_of_units_are_limited_to_one_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    state, display = RunState(clock), JsonDisplay(clock)
    for event in RUN:
        display.show(state.observe(event))
    for second in (0.1, 0.2, 2.0):
        clock.now = second
        display.show(state.observe(committed(f"after {second} s")))
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events == ["planned", "node", "worker", "unit", "retry", "worker", "worker", "finished", "unit"]


def test_lines_have_messages_and_some_progress(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    state, display = RunState(clock), LineDisplay(clock)
    for event in RUN:
        display.show(state.observe(event))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "graphkiln: 4/10 units, 400/1,000 rows, 4 units by earlier runs, 0 errors\n" in captured.err
    assert "graphkiln: worker-1 on node-1 ended: killed by signal 11\n" in captured.err
    assert captured.err.count("rows/s") == 2


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    LineDisplay(Clock()).show(replace(PROGRESS, message="a\x1b[2Jb"))
    assert "a\\x1b[2Jb" in capsys.readouterr().err


def test_live_table_is_removed() -> None:
    file = io.StringIO()
    with TerminalDisplay(Console(file=file, force_terminal=True, width=80), Clock()) as display:
        display.show(PROGRESS)
        display.show(replace(PROGRESS, message="node-2 is gone"))
    text = file.getvalue()
    assert "6/10 units" in text
    assert "node-2 is gone" in text
    assert text.rstrip().endswith("\x1b[2K")
