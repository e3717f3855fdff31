"""A whole run with fake trials: journal, resuming, identity and temporary files."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from tuned import measured, tuning

from graphkiln.tuning import tuner
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.journal import Journal, Progress
from graphkiln.tuning.measure import Arriving
from graphkiln.tuning.space import narrow
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import LoadShape, Measured, SessionTiming
from graphkiln.tuning.tuner import Tuning, search_folder
from graphkiln_backend.graph.errors import MeasurementError, RepositoryError


class FakeTrials:
    """Trials in which smaller batches are better, with an optional Ctrl-C."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        self.open = False
        self.interrupt_at = 1 << 30

    def __enter__(self) -> Self:
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False

    def probe(self, _: Candidate) -> SessionTiming:
        assert self.open
        return SessionTiming(batch_s={1: 0.001, **dict.fromkeys(self.facts["batch_sizes"], 0.001)})

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured:
        del load, seconds, seed
        self.interrupt_at -= 1
        if self.interrupt_at < 0:
            raise KeyboardInterrupt
        return measured(100, 0.001 * candidate.number("max_batch_size"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeTrials]:
    found: list[FakeTrials] = []

    def make(**facts: Any) -> FakeTrials:
        found.append(FakeTrials(**facts))
        return found[-1]

    monkeypatch.setattr(tuner, "LocalTrials", make)
    return found


def small(subject: Subject, folder: Path, **changes: Any) -> Tuning:
    """A search of three candidates at a given rate."""
    asked = tuning(subject, folder, target=Target(p99_s=0.05, rate=100.0, objective=Objective.LATENCY), **changes)
    space = narrow(asked.space, ["max_batch_size"], {})
    axes = tuple(
        replace(axis, values=(32, 4, 2) if axis.key == "max_batch_size" else axis.values[:1]) for axis in space.axes
    )
    return replace(asked, space=replace(space, axes=axes))


def test_best_is_found_and_measurements_are_reported(subject: Subject, tmp_path: Path, made: list[FakeTrials]) -> None:
    reported: list[Progress] = []
    result = small(subject, tmp_path).run(reported.append)
    assert result.candidate is not None
    assert result.candidate["max_batch_size"] == 2
    assert len(reported) == result.measurements
    assert not made[0].open


def test_same_command_measures_nothing_twice(subject: Subject, tmp_path: Path, made: list[FakeTrials]) -> None:
    first = small(subject, tmp_path).run(lambda _: None)
    reported: list[Progress] = []
    second = small(subject, tmp_path).run(reported.append)

    assert reported == []
    assert second.candidate == first.candidate
    assert len(made) == 2


def test_running_search_is_not_disturbed(subject: Subject, tmp_path: Path, made: list[FakeTrials]) -> None:
    asked = small(subject, tmp_path)
    with Journal(asked.journal, asked.identity()), pytest.raises(MeasurementError, match="locked"):
        asked.run(lambda _: None)
    assert made == [], "no server was started"


def test_replaced_graph_is_detected(
    subject: Subject, tmp_path: Path, made: list[FakeTrials], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "sha256_of", lambda _: f"digest {len(made)}")
    with pytest.raises(RepositoryError, match="was replaced"):
        small(subject, tmp_path).run(lambda _: None)


def test_ctrl_c_and_resume(
    subject: Subject, tmp_path: Path, made: list[FakeTrials], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[Progress] = []
    small(subject, tmp_path / "whole").run(whole.append)

    monkeypatch.setattr(FakeTrials, "__init__", interrupted)
    before: list[Progress] = []
    with pytest.raises(KeyboardInterrupt):
        small(subject, tmp_path).run(before.append)
    assert not made[-1].open
    monkeypatch.undo()
    monkeypatch.setattr(tuner, "LocalTrials", FakeTrials)
    after: list[Progress] = []
    result = small(subject, tmp_path).run(after.append)
    assert before
    assert len(before) + len(after) == len(whole) == result.measurements


def interrupted(self: FakeTrials, **facts: Any) -> None:
    self.facts, self.open, self.interrupt_at = facts, False, 3


@pytest.mark.parametrize(
    "change",
    [
        lambda t: replace(t, target=Target(p99_s=0.06)),
        lambda t: replace(t, subject=replace(t.subject, cores=1)),
        lambda t: replace(t, arriving=Arriving(trace=np.array([0.0, 1.0]))),
        lambda t: replace(t, requests=replace(t.requests, feeds=t.requests.feeds[:2])),
        lambda t: replace(t, space=narrow(t.space, ["engine"], {})),
    ],
)
def test_journal_depends_on_the_search(subject: Subject, tmp_path: Path, change: Any) -> None:
    asked = tuning(subject, tmp_path)
    assert change(asked).journal != asked.journal
    assert change(asked).journal.parent == tmp_path


# Temporary files of killed and running searches.

SEARCH = """
import sys, tempfile
from graphkiln.tuning.tuner import search_folder
tempfile.tempdir = sys.argv[1]
with search_folder() as folder:
    tempfile.mkdtemp(prefix="graphkiln-")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_running_search_is_reported_and_files_of_a_killed_one_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(tuner, "OTHER_PARENTS", ())
    monkeypatch.setattr(tuner, "remove_leftovers", partial(tuner.remove_leftovers, [tmp_path]))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", SEARCH, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        folder = Path(process.stdout.readline().strip())
        (tmp_path / "graphkiln-search-mine").mkdir()
        with search_folder():
            assert str(folder) in logged[0]
        assert list(folder.iterdir())
        process.kill()
        process.wait()
        with search_folder():
            assert not folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["graphkiln-search-mine"], "not made by a search"


def test_budget_does_not_change_the_journal(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    assert replace(asked, budget_s=9999).journal == asked.journal
    assert json.loads(json.dumps(asked.identity())) == asked.identity()
