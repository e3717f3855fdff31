"""How far models are, on a terminal and in a log."""

from __future__ import annotations

import pytest

from graphkiln.cli import serve as load_display
from graphkiln.cli.serve import LoadDisplay
from graphkiln_backend.server.load_progress import LoadProgress


def row(activity: str, seconds: float, model: str = "m") -> LoadProgress:
    return LoadProgress(model=model, version=2, activity=activity, seconds=seconds)


def test_a_log_has_a_line_for_each_activity_of_a_slow_model(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [("lowering", 0.2), ("lowering", 1.1), ("lowering", 1.2), ("proving onnxruntime on cpu", 2.0)]
    with LoadDisplay(live=False) as display:
        for step in (*steps, ("ready", 2.5), ("ready", 2.5)):
            display.show([row(*step), row("ready", 0.1, model="fast")])
    assert capsys.readouterr().err.splitlines() == [
        "graphkiln: m version 2: lowering",
        "graphkiln: m version 2: proving onnxruntime on cpu",
        "graphkiln: m version 2: ready in 2.5 s",
    ]


def test_the_next_start_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    display = LoadDisplay(live=False)
    for _ in range(2):
        display.show([row("lowering", 5)])
        display.close()
    assert capsys.readouterr().err.count("m version 2: lowering") == 2


def test_a_terminal_has_a_table_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_display, "_REFRESH_S", -1)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    with LoadDisplay(live=True) as display:
        display.show([])
        display.show([row("lowering", 0.1)])
        display.show([row("ready", 3.21), row("lowering", 0.5, model="[odd]")])
    shown = capsys.readouterr().err
    for words in ("lowering", "3.2", "[odd]"):
        assert words in shown
    assert "\x1b[2K" in shown, "erased"
