"""Results as JSON, the page and tables that are generated from them, and saved parts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import reporting
from reporting import Parts

ROWS = [{"set-up": "one", "ratio": 1.5, "note": "-"}, {"set-up": "two", "ratio": 20, "note": "3.5x"}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write nothing into the repository."""
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(reporting, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(reporting, "MARKED", (tmp_path / "README.md",))
    return tmp_path


class TestResults:
    def test_have_rows_facts_and_the_command(self, folder: Path) -> None:
        reporting.save_result("first", "what it is", "scripts/benchmark first", ROWS)
        result = json.loads((folder / "results" / "first.json").read_text())
        assert (result["title"], result["command"], result["rows"]) == ("what it is", "scripts/benchmark first", ROWS)
        assert {"machine", "gpu", "system", "versions", "date", "commit"} == set(result["facts"])
        assert re.fullmatch(r"[0-9a-f]{7,}|unknown", result["facts"]["commit"])


class TestMarkedTables:
    def test_marked_tables_are_filled_and_all_else_stays(self) -> None:
        reporting.save_result("first", "t", "c", ROWS)
        begin = "a\n<!-- docs/benchmarks/first.json: ratio, set-up -->\n"
        text = f"{begin}old\n\nolder\n<!-- end -->\nb <!-- end -->\n"
        table = "| ratio | set-up |\n| ---: | --- |\n| 1.5 | one |\n| 20 | two |\n"
        assert reporting.fill_tables(text) == f"{begin}{table}<!-- end -->\nb <!-- end -->\n"


class TestPage:
    def test_a_section_for_each_result_in_order_of_their_names(self) -> None:
        for name in ("second", "first"):
            reporting.save_result(name, f"what {name} is", f"scripts/benchmark {name}", ROWS)
        page = reporting.render_page()
        assert page.startswith("# Benchmarks\n")
        assert re.findall(r"^## (\w+): what", page, re.M) == ["first", "second"]
        assert "    scripts/benchmark first\n\n| set-up |" in page

    def test_what_is_equal_is_written_once(self) -> None:
        for name, versions in (("first", "onnx 1, torch 2"), ("second", "onnx 1, torch 3")):
            reporting.save_result(name, "t", "c", [{**row, "load": "bench"} for row in ROWS])
            path = reporting.RESULTS / f"{name}.json"
            result = json.loads(path.read_text())
            result["facts"]["versions"] = versions
            path.write_text(json.dumps(result))
        page = reporting.render_page()
        assert re.search(r"^All of them: .*; GPU: .*; onnx 1\.$", page, re.M)
        assert re.findall(r"^load: bench;.* torch \d\.$", page, re.M) == [
            "load: bench; torch 2.",
            "load: bench; torch 3.",
        ]
        assert "| set-up | ratio | note |" in page

    def test_both_files_are_written(self, folder: Path) -> None:
        (folder / "README.md").write_text("<!-- docs/benchmarks/first.json: note -->\n<!-- end -->\n")
        reporting.save_result("first", "t", "c", ROWS)
        reporting.write_tables()
        assert "## first: t" in (folder / "page.md").read_text()
        assert "| 3.5x |" in (folder / "README.md").read_text()


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path / "parts", 5, 3.0)


def test_a_saved_part_is_measured_again_on_request_only(parts: Parts) -> None:
    numbers = iter(range(9))
    assert [parts.measure("one", lambda: next(numbers)) for _ in range(2)] == [0, 0]
    assert parts.measure("one", lambda: next(numbers), again=True) == 1
    assert parts.read("one") == 1
    assert parts.read("two") is None


def test_a_failure_keeps_the_saved_part(parts: Parts) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    parts.measure("one", lambda: [1])
    with pytest.raises(KeyboardInterrupt):
        parts.measure("one", fail, again=True)
    assert parts.read("one") == [1]


def test_parts_of_other_conditions_are_not_read(parts: Parts, tmp_path: Path) -> None:
    parts.measure("one", lambda: [1])
    assert Parts(tmp_path / "parts", 1, 3.0).read("one") is None
    assert Parts(tmp_path / "parts", 5, 3.0).read("one") == [1]
