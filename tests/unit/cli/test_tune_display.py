"""What `graphkiln tune` tells before it measures, and meanwhile."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from digits_subject import digits_subject
from tuned import measured, tuning

from graphkiln.cli.tune import doubts, progress_report, show_space
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import OpenLoop
from graphkiln.tuning.tuner import Progress


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


def test_the_space_is_told_beside_a_result_and_is_that_of_a_dry_run(
    subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tuning(subject, tmp_path)
    for as_json, dry_run, told in ((False, False, "err"), (False, True, "out"), (True, True, "out"), (True, False, "")):
        show_space(asked, as_json=as_json, dry_run=dry_run)
        captured = capsys.readouterr()
        assert [name for name in ("out", "err") if "candidates" in getattr(captured, name)] == list(
            filter(None, [told])
        )


def test_nothing_is_doubtful_where_nothing_is(subject: Subject, tmp_path: Path) -> None:
    assert list(doubts(tuning(subject, tmp_path))) == []


def test_what_is_doubtful_is_told_before(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    few = replace(asked.questions, targets=np.zeros(8, np.int64))
    floor = replace(asked, questions=few, target=Target(p99_s=0.05, accuracy_floor=0.01))
    (told,) = doubts(floor)
    assert "is not decided by 8 labelled samples" in told


def test_a_version_that_is_not_served_is_told(subject: Subject, tmp_path: Path) -> None:
    model = tmp_path / "digits"
    shutil.copytree(subject.folder, model)
    shutil.copytree(model / "1", model / "3")
    (told,) = doubts(tuning(replace(subject, folder=model), tmp_path))
    assert told.startswith("version 1 is not among those that are served (version_policy: 3)")


def test_each_measurement_is_a_line_where_no_terminal_is(
    subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tuning(subject, tmp_path)
    candidate = asked.spanned.space.default
    with progress_report(asked) as report:
        report(Progress(number=1, spent_s=12.0, candidate=candidate, load=OpenLoop(80), outcome=measured(80, 0.02)))
    told = capsys.readouterr().err
    assert told == "graphkiln: 12 of 1200 s: as it is served today, 80/s: 80/s, p99 20 ms\n"
