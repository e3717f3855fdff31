"""Ratios of two results, and what they mean."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from comparing import Change, compare, format_changes


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"title": "t", "rows": rows}))
    return path


def verdicts(old: Path, new: Path) -> dict[str, str]:
    return {change.row: change.verdict for change in compare(old, new)}


def row(ratio: object, spread: float | None = None, **names: object) -> dict[str, object]:
    spreads = {} if spread is None else {"spread": spread}
    return {"model": "m", "set-up": "s", **names, "requests/s": 123.4, "ratio": ratio, **spreads}


@pytest.mark.parametrize(
    ("old", "new", "spread", "verdict"),
    [
        (1.0, 0.98, 0.0, "same"),
        (1.0, 0.96, 0.0, "REGRESSION"),
        (1.0, 0.96, 0.05, "same"),
        (1.0, 0.9, 0.05, "REGRESSION"),  # 7.1% are two spreads of 5%
        (1.0, 0.93, 0.05, "same"),
        (1.0, 1.2, 0.05, "better"),
        (1.0, 0.92, None, "same"),
        (1.0, 0.88, None, "REGRESSION"),
    ],
)
def test_the_rounds_spread_decides(tmp_path: Path, old: float, new: float, spread: float | None, verdict: str) -> None:
    files = write(tmp_path / "a.json", row(old, spread)), write(tmp_path / "b.json", row(new, spread))
    assert verdicts(*files) == {"b: m, s": verdict}


@pytest.mark.parametrize("name", ["memory", "start", "loading", "overhead", "session"])
def test_of_times_and_memory_more_is_worse(tmp_path: Path, name: str) -> None:
    old = write(tmp_path / "old" / f"{name}.json", row(1.0))
    new = write(tmp_path / "new" / f"{name}.json", row(1.5))
    assert list(verdicts(old, new).values()) == ["REGRESSION"]
    assert list(verdicts(new, old).values()) == ["better"]


def test_figures_of_machines_do_not_count(tmp_path: Path) -> None:
    old = write(tmp_path / "a.json", {**row(1.0), "requests/s": 1000.0})
    assert set(verdicts(old, write(tmp_path / "b.json", row(1.0))).values()) == {"same"}


def test_rows_that_came_or_went(tmp_path: Path) -> None:
    old = write(tmp_path / "a.json", row(1.0), row(2.0, model="old"))
    new = write(tmp_path / "b.json", row(1.0), row(2.0, model="new"), row("-", model="none"))
    assert verdicts(old, new) == {"b: m, s": "same", "b: old, s": "gone", "b: new, s": "new"}
    shown = format_changes(compare(old, new))
    assert [line["change"] for line in shown] == ["+0.0%", "-", "-"]
    assert (shown[1]["old"], shown[1]["new"]) == ("2", "-")


def test_folders_are_compared_by_what_they_have_in_common(tmp_path: Path) -> None:
    for folder, names in (("old", "ab"), ("new", "bc")):
        for name in names:
            write(tmp_path / folder / f"{name}.json", row(1.0))
    assert verdicts(tmp_path / "old", tmp_path / "new") == {"b: m, s": "same"}
    (tmp_path / "old" / "b.json").unlink()
    with pytest.raises(SystemExit, match="no benchmark in common"):
        compare(tmp_path / "old", tmp_path / "new")


def test_an_engine_that_was_found_does_not_name_a_row(tmp_path: Path) -> None:
    old = write(tmp_path / "a.json", row(1.0, engine="openvino", batch=1), row(1.0, engine="openvino", batch=8))
    new = write(tmp_path / "b.json", row(0.5, engine="onnxruntime", batch=1), row(1.0, engine="openvino", batch=8))
    assert verdicts(old, new) == {"b: m, s, 1": "REGRESSION", "b: m, s, 8": "same"}


def test_unless_rows_differ_by_nothing_else(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}.json", row(1.0, engine="openvino"), row(ratio, engine="onnxruntime"))
        for name, ratio in (("a", 1.0), ("b", 0.5))
    ]
    assert verdicts(*files) == {"b: m, s, openvino": "same", "b: m, s, onnxruntime": "REGRESSION"}


def test_a_table_of_phases_with_ratios_to_two_peers(tmp_path: Path) -> None:
    for name, ratio in (("old", 1.5), ("new", 3.0)):
        (tmp_path / name).mkdir()
        peers = ({"phase": "ratio", "x": 5.0}, {"phase": "ratio to C++ backend", "x": ratio})
        write(tmp_path / name / "start.json", *peers)
    changes = compare(tmp_path / "old", tmp_path / "new")
    told = [(change.row, change.verdict) for change in changes]
    assert told == [("start: x", "same"), ("start: x to C++ backend", "REGRESSION")]


def test_a_table_of_phases_has_its_ratios_in_a_row(tmp_path: Path) -> None:
    old = write(tmp_path / "old" / "start.json", {"phase": "ready s", "x": 2.0}, {"phase": "ratio", "x": 5.0, "y": 3.0})
    new = write(tmp_path / "new" / "start.json", {"phase": "ready s", "x": 9.0}, {"phase": "ratio", "x": 5.1, "y": 4.0})
    assert verdicts(old, new) == {"start: x": "same", "start: y": "REGRESSION"}


def test_steps_of_the_story(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}.json", {"step": "3: parallel", "images/s": 1.0, "own": "-", "all so far": ratio})
        for name, ratio in (("a", "12.87x"), ("b", "9.00x"))
    ]
    assert verdicts(*files) == {"b: 3: parallel": "REGRESSION"}


def test_every_kept_result_is_the_same_as_itself(repository: Path) -> None:
    folder = repository / "docs" / "benchmarks"
    found = compare(folder, folder)
    assert {change.verdict for change in found} == {"same"}
    counted = {"kills", "devices", "models"}  # nothing there is a ratio
    assert {change.row.partition(":")[0] for change in found} == {path.stem for path in folder.glob("*.json")} - counted


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}', '{"rows": [1]}'])
def test_what_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SystemExit, match=r"a\.json is no result"):
        compare(tmp_path / "a.json", tmp_path / "a.json")
    with pytest.raises(SystemExit, match=r"nowhere\.json is no result"):
        compare(tmp_path / "nowhere.json", tmp_path / "a.json")


def test_a_ratio_of_nothing() -> None:
    assert math.isnan(Change(row="r", old=0.0, new=1.0, noise=0.1).change)
    assert [Change(row="r", old=0.0, new=new, noise=0.1).verdict for new in (0.0, 1.0)] == ["same", "new"]
