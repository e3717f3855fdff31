"""Listings of one path per line."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scored_inputs import files_source, ids_of, plan, read_all, read_unit

from graphkiln_backend.scoring.errors import InputChanged, ScoringError
from graphkiln_backend.scoring.sources import listing as records

LINES = st.lists(st.text("ab/ é", min_size=1, max_size=6).filter(lambda line: line.strip()), unique_by=str.strip)


def listing(folder: Path, *lines: str) -> Path:
    path = folder / "photos.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_lines_are_rows_relative_to_the_listing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"one")
    (tmp_path / "2.jpg").write_bytes(b"two")
    lines = ["a/1.jpg", str(tmp_path / "2.jpg"), f"file://{tmp_path}/2.jpg", "a/none.jpg", "as://x/y/z.jpg"]
    rows = read_all(files_source(listing(tmp_path, *lines[:4])))
    assert [row.id for row in rows] == lines[:4]
    assert [row.content for row in rows] == [b"one", b"two", b"two", None]
    assert "No such file" in rows[3].error


def test_line_ends_blank_lines_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "photos.txt"
    path.write_bytes(b"\xef\xbb\xbf\r\na.jpg\r\n\n  b.jpg \n\t\n\nc.jpg")
    assert ids_of(files_source(path), 1) == ["a.jpg", "b.jpg", "c.jpg"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(lines=LINES.filter(bool), blank=st.integers(0, 3), rows=st.integers(1, 12), block=st.integers(1, 60))
def test_ranges_cover_each_line_once(tmp_path: Path, lines: list[str], blank: int, rows: int, block: int) -> None:
    spaced = itertools.chain.from_iterable([line, *[""] * (blank * (index % 2))] for index, line in enumerate(lines))
    path = listing(tmp_path, *spaced)
    source = files_source(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_BLOCK", block)
        assert ids_of(source, rows) == [line.strip() for line in lines]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(lines=LINES.filter(bool), rows=st.integers(1, 12), data=st.data())
def test_one_new_line_changes_at_most_two_units(
    tmp_path: Path, lines: list[str], rows: int, data: st.DataObject
) -> None:
    before = {unit.id for unit in plan(files_source(listing(tmp_path, *lines)), rows)}
    position = data.draw(st.integers(0, len(lines)))
    more = [*lines[:position], "another.jpg", *lines[position:]]
    after = {unit.id for unit in plan(files_source(listing(tmp_path, *more)), rows)}
    assert len(after - before) <= 2
    assert len(before - after) <= 1


def test_planning_does_not_access_images(tmp_path: Path) -> None:
    lines = ("s3://bucket-that-is-not-there/a.jpg", "/none.jpg")
    (unit,) = plan(files_source(listing(tmp_path, *lines)), 10**9)
    assert (unit.rows, unit.size_bytes) == (2, 0)


def test_repeated_lines_are_named(tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match=r"1 id occurs more than once: 'a\.jpg'.*--id-column"):
        plan(files_source(listing(tmp_path, "a.jpg", "b.jpg", " a.jpg ")))


def test_unsupported_addresses_are_refused_by_the_plan(tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match=r"'https://host/b\.jpg' cannot be read"):
        plan(files_source(listing(tmp_path, "a.jpg", "https://host/b.jpg")))


def test_an_empty_listing_is_refused(tmp_path: Path) -> None:
    for lines in ((), ("", " ")):
        with pytest.raises(ScoringError, match="has no rows"):
            plan(files_source(listing(tmp_path, *lines)))


def test_changed_listing_fails_its_unit(tmp_path: Path) -> None:
    source = files_source(listing(tmp_path, "a.jpg", "b.jpg"))
    (unit,) = plan(source, 10**9)
    listing(tmp_path, "a.jpg", "c.jpg")
    with pytest.raises(InputChanged, match="between bytes 0 and 12"):
        read_unit(source, unit)


def test_appended_lines_do_not_change_planned_units(tmp_path: Path) -> None:
    source = files_source(listing(tmp_path, "a.jpg", "b.jpg"))
    (unit,) = plan(source, 10**9)
    listing(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    assert [row.id for row in read_unit(source, unit)] == ["a.jpg", "b.jpg"]


def test_path_that_is_not_utf8(tmp_path: Path) -> None:
    Path(os.fsdecode(bytes(tmp_path) + b"/\xe9.jpg")).write_bytes(b"image")
    path = tmp_path / "photos.lst"
    path.write_bytes(b"\xe9.jpg\n")
    (row,) = read_all(files_source(path))
    assert (row.id, row.content) == (r"\xe9.jpg", b"image")


def test_carriage_return_as_line_end_is_refused(tmp_path: Path) -> None:
    r"""Lines that end with \r alone were one row, with an error: a run ended with 0, none of their images answered."""
    (tmp_path / "a.txt").write_bytes(b"1.jpg\r2.jpg\r3.jpg\r")
    with pytest.raises(ScoringError, match=r"a\.txt has a \\r .*tr "):
        plan(files_source(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_bytes(b"1.jpg\r\n2.jpg\r\r\n\r\n3.jpg\r")
    assert ids_of(files_source(tmp_path / "a.txt")) == ["1.jpg", "2.jpg", "3.jpg"]


@pytest.mark.parametrize(("name", "content"), [("a.txt", "b" * 40), ("a.csv", '"' + "b\n" * 40)])
def test_endless_record_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str) -> None:
    monkeypatch.setattr(records, "_LONGEST", 20)
    monkeypatch.setattr(records, "_BLOCK", 7)
    (tmp_path / name).write_text(f"a\n{content}")
    with pytest.raises(ScoringError, match="more than 20 bytes at byte 2"):
        plan(files_source(tmp_path / name))
