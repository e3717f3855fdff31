"""Interpretation of a source: a folder, a pattern, a file, and its kind."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scored_inputs import files_source, ids_of, plan, write_tar

from graphkiln_backend.scoring.errors import ScoringError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a/1.jpg", "a/2.png", "b/3.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"image")
    return tmp_path


def test_pattern_of_files(folder: Path) -> None:
    assert ids_of(files_source(folder / "a" / "*")) == ["1.jpg", "2.png"]
    assert ids_of(files_source(f"{folder}/**/*.jpg")) == ["a/1.jpg", "b/3.jpg"]


def test_folder_with_wildcards_in_its_name(folder: Path) -> None:
    (folder / "a").rename(folder / "[a]*")
    assert ids_of(files_source(folder / "[a]*")) == ["1.jpg", "2.png"]


def test_single_image(folder: Path) -> None:
    assert ids_of(files_source(folder / "a" / "1.jpg")) == ["1.jpg"]


def test_listing_in_a_folder_is_not_read(folder: Path) -> None:
    (folder / "all.txt").write_text("a/1.jpg\n")
    assert len(ids_of(files_source(folder))) == 3
    assert ids_of(files_source(folder / "all.txt")) == ["a/1.jpg"]


def test_missing_and_unsupported_files_are_refused(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "model.onnx").touch()
    for name, message in (
        ("empty", "no folder with files"),
        ("none", "no such file"),
        ("*.gif", "no files that can be scored"),
    ):
        with pytest.raises(ScoringError, match=message):
            plan(files_source(folder / name))
    with pytest.raises(ScoringError, match="unsupported format"):
        plan(files_source(folder / "model.onnx"))


def test_two_kinds_in_one_folder_are_refused(folder: Path) -> None:
    write_tar(folder / "c.tar", {"1.jpg": b"image"})
    with pytest.raises(ScoringError, match=r"mixes images and tar, such as c\.tar"):
        plan(files_source(folder))


@pytest.mark.parametrize("name", ["c.tar.gz", "c.tgz", "C.TAR.ZST"])
def test_compressed_tar_is_refused(folder: Path, name: str) -> None:
    (folder / name).touch()
    for text in (folder, folder / name):
        with pytest.raises(ScoringError, match="compressed archive"):
            plan(files_source(text))


def test_notes_are_skipped(tmp_path: Path) -> None:
    table = pa.table({"image": [b"1", b"2"]})
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": ["x"]}), tmp_path / "_plan.parquet")
    assert ids_of(files_source(tmp_path)) == ["a.parquet:0", "a.parquet:1"]


@pytest.mark.parametrize("name", ["_temporary/0/part-0.parquet", "_change_data/cdc.parquet", "a/_old/b.parquet"])
def test_unfinished_files_are_skipped(tmp_path: Path, name: str) -> None:
    table = pa.table({"image": [b"1"]})
    for path in (tmp_path / name, tmp_path / "_year=2026" / "a.parquet"):
        path.parent.mkdir(parents=True)
        pq.write_table(table, path)
    assert ids_of(files_source(tmp_path)) == ["_year=2026/a.parquet:0"]


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("year=2026/_delta_log/00000000000000000010.checkpoint.parquet", "Delta Lake"),
        ("metadata/v3.metadata.json", "Iceberg"),
        ("metadata/00003-1b0cb1a6-72a1-4a0c-9a5e-0a4d5b0ce9b1.metadata.json", "Iceberg"),
    ],
)
def test_files_of_table_formats_are_refused(tmp_path: Path, log: str, kind: str) -> None:
    """Some of them may be of an older version; who means all files says so by a pattern."""
    pq.write_table(pa.table({"image": [b"1"]}), tmp_path / "part-0.parquet")
    (tmp_path / log).parent.mkdir(parents=True)
    (tmp_path / log).write_bytes(b"{}")
    with pytest.raises(ScoringError, match=rf"is a table of {kind}.*\*\*/\*\.parquet"):
        plan(files_source(tmp_path))
    assert ids_of(files_source(tmp_path / "**" / "*.parquet")) == ["part-0.parquet:0"]


def test_skipped_files_are_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a/1.heic", "b/2.heic", "_SUCCESS", "b/.hidden"):
        (folder / name).touch()
    for text in (folder, folder, f"{folder}/**/*.jpg"):
        plan(files_source(text))
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: skipped 2 files of other formats, such as a/1.heic"
    ]


def test_other_suffixes_of_jpeg(folder: Path) -> None:
    for name in ("b/4.JFIF", "b/5.jpe"):
        (folder / name).write_bytes(b"image")
    assert ids_of(files_source(folder / "b")) == ["3.jpg", "4.JFIF", "5.jpe"]


def test_pattern_of_listings_is_refused(folder: Path) -> None:
    (folder / "all.txt").write_text("a/1.jpg\n")
    with pytest.raises(ScoringError, match="a listing must be given by its path"):
        plan(files_source(folder / "*.txt"))
