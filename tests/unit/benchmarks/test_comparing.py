"""Ratios of two results, and what they mean."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from comparing import Change, compare, format_changes

from graphkiln_backend.graph.errors import ManifestError


def write(path: Path, *rows: dict[str, Any], **fields: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"title": "t", "rows": rows, **fields}))
    return path


def verdicts(old: Path, new: Path) -> dict[str, str]:
    return {change.row: change.verdict for change in compare(old, new).changes}


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


@pytest.mark.parametrize("name", ["memory", "start", "loading", "overhead", "session", "container", "queue"])
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
    shown = format_changes(compare(old, new).changes)
    assert [line["change"] for line in shown] == ["+0.0%", "-", "-"]
    assert (shown[1]["old"], shown[1]["new"]) == ("2", "-")


def test_folders_are_compared_by_what_they_have_in_common(tmp_path: Path) -> None:
    for folder, names in (("old", "ab"), ("new", "bc")):
        for name in names:
            write(tmp_path / folder / f"{name}.json", row(1.0))
    assert verdicts(tmp_path / "old", tmp_path / "new") == {"b: m, s": "same"}
    (tmp_path / "old" / "b.json").unlink()
    with pytest.raises(ManifestError, match="no benchmark in common"):
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
    changes = compare(tmp_path / "old", tmp_path / "new").changes
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
    found = compare(folder, folder).changes
    assert {change.verdict for change in found} == {"same"}
    counted = {"kills", "devices", "models", "scenes"}  # nothing there is a ratio
    assert {change.row.partition(":")[0] for change in found} == {path.stem for path in folder.glob("*.json")} - counted


def test_a_ratio_of_nothing() -> None:
    assert math.isnan(Change(row="r", old=0.0, new=1.0, noise=0.1).change)
    assert [Change(row="r", old=0.0, new=new, noise=0.1).verdict for new in (0.0, 1.0)] == ["same", "new"]


def of(benchmark: str, machine: str = "A", rounds: int = 2, title: str = "t") -> dict[str, Any]:
    """What a result says of itself."""
    command = f"scripts/benchmark {benchmark} --rounds {rounds}"
    return {"command": command, "facts": {"machine": machine, "gpu": "none"}, "title": title}


def test_a_file_is_of_the_benchmark_that_its_command_names(tmp_path: Path) -> None:
    """A start that takes longer is worse, whatever the files are called."""
    old = write(tmp_path / "before.json", row(1.0), **of("start"))
    new = write(tmp_path / "after.json", row(1.5), **of("start"))
    assert verdicts(old, new) == {"start: m, s": "REGRESSION"}
    with pytest.raises(ManifestError, match="different benchmarks: start and light"):
        compare(old, write(tmp_path / "light.json", row(1.5), **of("light")))


def test_ratios_of_another_machine_are_shown_and_not_judged(tmp_path: Path) -> None:
    old = write(tmp_path / "a.json", row(1.0), row(1.0, model="old"), **of("light", "A"))
    new = write(tmp_path / "b.json", row(0.1), **of("light", "B"))
    found = compare(old, new)
    assert [change.verdict for change in found.changes] == ["other machine", "gone"]
    assert format_changes(found.changes)[0]["change"] == "-90.0%"
    assert found.notes == ["light: not judged, ratios of different machines: A; B"]
    assert found.exit_code == 2  # what judged nothing found no regression


def test_other_ways_of_measuring_are_told(tmp_path: Path) -> None:
    old = write(tmp_path / "a.json", row(1.0), **of("light", rounds=2))
    new = write(tmp_path / "b.json", row(1.0), **of("light", rounds=9, title="u"))
    found = compare(old, new)
    assert found.notes == [
        "light: its ratios may be to something else: 't'; 'u'",
        "light: measured by scripts/benchmark light --rounds 2; scripts/benchmark light --rounds 9",
    ]
    assert (found.summary, found.exit_code) == ("1 same", 0)


def test_benchmarks_of_one_folder_alone_are_told(tmp_path: Path) -> None:
    for folder, names in (("old", "abc"), ("new", "bd")):
        for name in names:
            write(tmp_path / folder / f"{name}.json", row(1.0))
    old, new = tmp_path / "old", tmp_path / "new"
    assert compare(old, new).notes == [f"only in {old}, not compared: a, c", f"only in {new}, not compared: d"]


def test_a_column_of_another_name_is_no_ratio(tmp_path: Path) -> None:
    old = write(tmp_path / "a.json", row(1.0))
    renamed = write(tmp_path / "b.json", {"model": "m", "set-up": "s", "speed": 1.0})
    assert verdicts(old, renamed) == {"b: m, s": "gone"}
    nothing = compare(renamed, renamed)
    assert (nothing.changes, nothing.notes) == ([], ["b: has no ratio, not compared"])
    assert (nothing.summary, nothing.exit_code) == ("no ratio to compare", 2)


@pytest.mark.parametrize("broken", [math.nan, math.inf, None, True, "-", "soon"])
def test_what_is_no_number_is_no_ratio(tmp_path: Path, broken: object) -> None:
    old, new = write(tmp_path / "a.json", row(1.0)), write(tmp_path / "b.json", row(broken))
    assert verdicts(old, new) == {"b: m, s": "gone"}
    assert verdicts(new, old) == {"a: m, s": "new"}
    assert verdicts(new, new) == {}


def test_a_figure_that_is_no_number_does_not_name_the_row(tmp_path: Path) -> None:
    old = write(tmp_path / "a.json", row(1.0))
    new = write(tmp_path / "b.json", {**row(1.0), "requests/s": math.nan})
    assert verdicts(old, new) == {"b: m, s": "same"}


def test_rows_that_are_called_alike_are_compared_one_by_one(tmp_path: Path) -> None:
    old = write(tmp_path / "a.json", row(1.0), row(1.0))
    new = write(tmp_path / "b.json", row(0.5), row(1.0))
    assert verdicts(old, new) == {"b: m, s": "REGRESSION", "b: m, s (2)": "same"}
