"""A run that was ended goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from conforming.cases import Case
from conforming.outcome import PASSED, Outcome, Verdict
from conforming.record import Record


def case(name: str) -> Case:
    return Case(kind="node", name=f"test_{name}", model=onnx.ModelProto(), samples=(), rtol=0, atol=0)


def test_what_is_known_is_not_asked_again(tmp_path: Path) -> None:
    one, two = case("one"), case("two")
    record = Record(tmp_path / "served.jsonl")
    assert record.pending([one, two]) == [one, two]
    record.add(one, Outcome(Verdict.FAILS, "why"))
    again = Record(tmp_path / "served.jsonl")
    assert again.pending([one, two]) == [two]
    assert again.outcomes == {"node_one": Outcome(Verdict.FAILS, "why")}


def test_half_a_line_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    Record(path).add(case("one"), PASSED)
    path.write_text(f'{path.read_text()}{{"case": "node_tw')
    assert list(Record(path).outcomes) == ["node_one"]


def test_reasons_have_one_line_and_no_folders_of_the_run() -> None:
    reason: Any = "cannot load /tmp/run1/store/a/1/model.onnx:\n  it is damaged\n\nAt:\n  /usr/lib/model.py(3): load"
    assert Outcome.of(Verdict.REFUSED, reason).reason == "cannot load the file: it is damaged"
