"""CSV and TSV listings."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scored_inputs import files_source, ids_of, plan, read_all, read_unit

from graphkiln_backend.scoring.errors import InputChanged, ScoringError
from graphkiln_backend.scoring.sources import listing as records

CELL = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=6)


def table(folder: Path, text: str, name: str = "photos.csv") -> Path:
    path = folder / name
    path.write_text(text, newline="")
    return path


def test_rows_have_ids_images_and_kept_columns(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"one")
    path = table(tmp_path, 'n,file,caption\r\n7,1.jpg,"a ""b"",\r\nc"\r\n\r\n8,2.jpg,\r\n')
    one, two = read_all(files_source(path, image="file", id="n", kept=("caption",)))
    assert (one.id, one.content, one.kept) == ("7", b"one", {"caption": 'a "b",\r\nc'})
    assert (two.id, two.content, two.kept) == ("8", None, {"caption": ""})


def test_the_path_is_the_id_and_one_column_is_the_image(tmp_path: Path) -> None:
    assert ids_of(files_source(table(tmp_path, "path\na.jpg\nb.jpg\n"))) == ["a.jpg", "b.jpg"]
    path = table(tmp_path, "path\tlabel\na.jpg\tx,y\n", "photos.tsv")
    assert read_all(files_source(path, image="path", kept=("label",)))[0].kept == {"label": "x,y"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(cells=st.lists(CELL, max_size=12), rows=st.integers(1, 5), block=st.integers(1, 40))
def test_ranges_cover_each_row_once(tmp_path: Path, cells: list[str], rows: int, block: int) -> None:
    path = tmp_path / "photos.csv"
    with path.open("w", newline="") as file:
        written = csv.writer(file, lineterminator="\n")
        written.writerows([["path", "text"], *([f"{index}.jpg", cell] for index, cell in enumerate(cells))])
    source = files_source(path, image="path", kept=("text",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_BLOCK", block)
        if not cells:
            with pytest.raises(ScoringError, match="has no rows"):
                plan(source, rows)
            return
        assert [row.kept["text"] for row in read_all(source, rows)] == cells


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("a,b\n1,2\n", {}, "several columns"),
        ("a,b\n1,2\n", {"image": "c"}, r"no column 'c' \(it has a, b\)"),
        ("a,b\n1,2\n", {"image": "a", "kept": ("d",)}, "no column 'd'"),
        ("a,a\n1,2\n", {"image": "a"}, "duplicate column names"),
        ("a,b\n1,2\n3\n", {"image": "a"}, r"\['3'\] has 1 fields, expected 2"),
        ("a,b\n,2\n", {"image": "a"}, "empty id column, 'a'"),
        ('a\n""\n', {}, "empty id column"),
        ("a,b\nx,1\ny,1\n", {"image": "a", "id": "b"}, "1 id occurs more than once: '1'"),
        ("a\nftp://x/y\n", {}, "'ftp://x/y' cannot be read"),
        ("a\n1\r2\n", {}, "line endings"),
        ("a\n1\0\n", {}, "null bytes"),
        ('a\n"1\n2\n', {}, "a quotation .* never ends"),
        ('a,b\n"1"x,2\n', {"image": "a"}, "not a CSV file"),
        ("", {}, "has no header"),
        ("\na,b\n1,2\n", {"image": "a"}, "has no header"),
        ('a,b\n5" x,1\n6" y,2\n', {"image": "a"}, r"double quote"),
    ],
)
def test_invalid_tables_are_refused(tmp_path: Path, text: str, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ScoringError, match=message):
        plan(files_source(table(tmp_path, text), **columns))


def test_other_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos.csv").write_bytes(b"path\n\xe9.jpg\n")
    with pytest.raises(ScoringError, match="not a CSV file in UTF-8"):
        plan(files_source(tmp_path / "photos.csv"))


def test_a_table_that_changed_ends_the_run(tmp_path: Path) -> None:
    source = files_source(table(tmp_path, "a\n1.jpg\n"))
    (unit,) = plan(source, 10**9)
    table(tmp_path, "a\n2.jpg\n")
    with pytest.raises(InputChanged):
        read_unit(source, unit)


def test_a_header_that_changed_makes_other_units(tmp_path: Path) -> None:
    ids = [plan(files_source(table(tmp_path, f"{name}\n1.jpg\n")), 10**9)[0].id for name in ("a", "b")]
    assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path;price\na.jpg;3\n", r"appear to be separated by ';'"),
        ("path\tprice\na.jpg\t3\n", r"appear to be separated by '\\t'"),
        ("photos/1.JPG\nphotos/2.jpg\n", r"no header: the first line is an image, photos/1\.JPG"),
    ],
)
def test_missing_header_or_wrong_separator_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ScoringError, match=message):
        plan(files_source(table(tmp_path, text)))


def test_named_columns_may_have_any_name(tmp_path: Path) -> None:
    path = table(tmp_path, "thumb.jpg,a;b\na.jpg,b.jpg\n")
    assert ids_of(files_source(path, image="thumb.jpg")) == ["a.jpg"]
    assert ids_of(files_source(path, image="a;b")) == ["b.jpg"]
