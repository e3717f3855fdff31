"""The first moments of the command."""

from __future__ import annotations

import os
import signal
import sys
from types import ModuleType

import pytest

from graphkiln.cli.command import main

pytestmark = pytest.mark.alone


@pytest.fixture
def _stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command gets a signal before it does anything."""
    module = ModuleType("graphkiln.cli.main")
    module.main = lambda: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "graphkiln.cli.main", module)


@pytest.mark.usefixtures("_stopped_at_once")
def test_a_server_ends_in_good_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["graphkiln", "serve", "--model-store", "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


@pytest.mark.usefixtures("_stopped_at_once")
def test_other_verbs_end_as_programs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["graphkiln", "convert", "serve"])
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM]
