"""What a search found, in 80 columns."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from digits_subject import digits_subject
from rich.console import Console
from tuned import document

from graphkiln.tuning.report import print_result, print_space
from graphkiln.tuning.subject import Subject


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


def shown(show: Any, content: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(content, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 or line.endswith(".jsonl") for line in text.splitlines())
    return " ".join(text.split())


def test_the_answer_comes_first(subject: Subject, tmp_path: Path) -> None:
    text = shown(print_result, document(subject, tmp_path))
    assert text.startswith("digits 1: p99 within 50 ms, best throughput chosen: engine=openvino")
    assert "400 requests per second, p99 30 ms, at most 33 ms at 95%" in text
    assert "2.00 times the throughput (200 requests per second)" in text
    assert "knee: beyond 300 requests per second" in text
    assert "ran: openvino on cpu in bf16" in text
    assert "the load generator took 0.25 cores" in text
    assert "price of 1,000 requests: 0.0025" in text
    assert "note: the machine became slower" in text
    assert "42 measurements in 10.0 minutes, kept in" in text
    assert "compared under load: 7 answers" in text


def test_the_journal_can_be_copied(subject: Subject, tmp_path: Path) -> None:
    found = {**document(subject, tmp_path), "journal": "/a/folder" * 15 + ".jsonl"}
    assert found["journal"] in shown(print_result, found)


def test_each_runner_up_has_a_reason(subject: Subject, tmp_path: Path) -> None:
    text = shown(print_result, document(subject, tmp_path))
    assert "as it is served today: lost: 200 requests per second, the chosen one 400" in text
    assert "max_batch_size=4: lost: <b>slower</b> & worse" in text


def test_where_nothing_meets_the_target_the_closest_is_told(subject: Subject, tmp_path: Path) -> None:
    text = shown(print_result, document(subject, tmp_path, met=False))
    assert "no configuration was proven to meet the target" in text
    assert "closest: max_batch_size=4: 150 requests per second, p99 20 ms" in text
    assert "what limits it: the cores: busy" in text
    assert "the load generator took 0.25 cores" in text


def test_what_met_the_target_and_was_not_proven_is_told_apart(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    best = {**found["chosen"], "lost": "measured again, too few requests"}
    told = {**found, "chosen": None, "promise": None, "closest": best, "unproven": True}
    text = shown(print_result, told)
    assert "no configuration was proven to meet the target found, but not proven: engine=openvino" in text
    assert "why it is not proven: measured again, too few requests" in text
    assert "closest" not in text
    untold = shown(print_result, {**told, "closest": {**best, "lost": ""}})
    assert "why it is not proven: the budget was spent before it was measured again" in untold


def test_nothing_at_all_can_be_measured(subject: Subject, tmp_path: Path) -> None:
    found = {**document(subject, tmp_path, met=False), "closest": None, "rows": [], "refused": {"a run takes 9 ms": 4}}
    assert "no candidate could be measured 4 left out: a run takes 9 ms" in shown(print_result, found)


def test_what_was_not_tried_is_counted(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    every = found["space"]["candidates"]
    assert "not tried" not in shown(print_result, {**found, "untried": []})
    told = {**found, "untried": [{"changes": "instances=2", "reason": "no time"}]}
    assert f"not tried, for the budget: 1 of {every} candidates" in shown(print_result, told)


def test_more_rows_are_counted(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    text = shown(print_result, {**found, "rows": found["rows"] * 3})
    assert "... and 3 more (--json, --html)" in text


def test_the_space_is_shown_with_what_is_left_out(subject: Subject, tmp_path: Path) -> None:
    text = shown(print_space, document(subject, tmp_path)["space"])
    assert "max_batch_size" in text
    assert "on, off" in text
    assert "candidates of" in text
    assert "threads x instances > 2 cores" in text
    assert "not tried: precision int8" in text
