"""`--html`: refused before anything is measured, written once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from graphkiln.cli.console import check_html, command_line, facts, write_html
from graphkiln_backend.graph.errors import EngineUnavailable, InvalidInput, MeasurementError


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    check_html(None)
    check_html(tmp_path / "report.html")
    with pytest.raises(InvalidInput, match="there is no folder"):
        check_html(tmp_path / "none" / "report.html")


def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match="is a folder"):
        check_html(tmp_path)
    monkeypatch.setattr("os.access", lambda path, *_, **__: Path(path) != tmp_path)
    with pytest.raises(InvalidInput, match="cannot be written"):
        check_html(tmp_path / "report.html")


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(EngineUnavailable, match=r"graphkiln\[report\]"):
        check_html(tmp_path / "report.html")


def test_it_is_written_or_said_why_not(tmp_path: Path) -> None:
    write_html(tmp_path / "a.html", "<p>")
    assert (tmp_path / "a.html").read_text() == "<p>"
    with pytest.raises(MeasurementError, match=r"Is a directory.*another file"):
        write_html(tmp_path, "<p>")


def test_what_a_report_ends_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["graphkiln", "bench", "--model", "a b"])
    assert command_line() == "graphkiln bench --model 'a b'"
    monkeypatch.setattr(sys, "argv", ["graphkiln", "bench", "--url", "http://me:s3cret@h:1"])
    assert command_line() == "graphkiln bench --url http://h:1"
    assert list(facts()) == ["this machine", "graphkiln", "date"]
    assert all(facts().values())
