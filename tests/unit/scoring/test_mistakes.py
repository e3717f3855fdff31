"""Mistakes that are told before anything is started or written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from graphkiln.scoring.mistakes import check_places, check_source
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.units import InputRange

UNIT = InputRange(path="a", part="b", identity="c", rows=1).unit("d").id


def request(source: Path | str, destination: Path | str) -> ScoreRequest:
    return ScoreRequest(source=str(source), model="/store/m", destination=str(destination))


def test_places_of_their_own_are_fine(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    check_places(request(tmp_path / "photos", tmp_path / "photos-scored"))
    check_places(request("s3://bucket/photos", "s3://bucket/photos-scored"))
    check_places(request("postgresql://host/shop", "postgresql://host/shop"))


@pytest.mark.parametrize(
    ("source", "destination", "words"),
    [
        ("photos", "photos", "both source and destination"),
        ("photos", "link", "both source and destination"),
        ("photos", "photos/answers", "is inside the source"),
        ("out/photos", "out", "is inside the destination"),
    ],
)
def test_source_and_destination_do_not_lie_in_each_other(
    tmp_path: Path, source: str, destination: str, words: str
) -> None:
    (tmp_path / source).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    with pytest.raises(ScoringError, match=words):
        check_places(request(tmp_path / source, tmp_path / destination))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("s3://bucket/a", "s3://bucket/a/"),
        ("s3://bucket/a", "s3://bucket/a/b"),
        ("s3://HOST:9000/bucket/a", "s3://http://host:9000/bucket/a/b"),
    ],
)
def test_nor_do_they_in_a_store_however_it_is_written(source: str, destination: str) -> None:
    with pytest.raises(ScoringError):
        check_places(request(source, destination))


def test_a_place_that_cannot_be_looked_at_is_told(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ScoringError, match="cannot look at"):
        check_source(request(loop, tmp_path / "out"))
    check_places(request(loop, tmp_path / "out"))  # it fails later, with the words above
    with pytest.raises(ScoringError, match=r"cannot look at the destination .*File name too long"):
        check_places(request(tmp_path / "in", tmp_path / ("a" * 300)))


def test_what_an_earlier_run_left_is_ours(tmp_path: Path) -> None:
    for name in (f"{UNIT}.parquet", "_plan.parquet", "_run.json", ".unfinished-abc"):
        (tmp_path / name).write_bytes(b"")
    check_places(request("/photos", tmp_path))


def test_a_folder_with_anything_else_is_not_written_to(tmp_path: Path) -> None:
    for name in ("thesis.docx", "a.parquet", "b", "c"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ScoringError, match=r"did not write: a\.parquet, b, c, \.\.\."):
        check_places(request("/photos", tmp_path))


def test_files_of_a_delta_table_are_known_by_its_log(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "part-00000.parquet").write_bytes(b"")
    check_places(request("/photos", tmp_path))


def test_a_file_is_no_destination(tmp_path: Path) -> None:
    (tmp_path / "out.parquet").write_bytes(b"")
    with pytest.raises(ScoringError, match="is a file"):
        check_places(request("/photos", tmp_path / "out.parquet"))


def test_a_source_without_images(tmp_path: Path) -> None:
    (tmp_path / "notes.txt.bak").write_text("no image")
    with pytest.raises(ScoringError, match="can be scored"):
        check_source(request(tmp_path, "/out"))
    (tmp_path / "a.png").write_bytes(b"is not looked into")
    check_source(request(tmp_path, "/out"))


def test_a_source_without_rows(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("\n\n")
    with pytest.raises(ScoringError, match=r"list\.txt has no rows"):
        check_source(request(tmp_path / "list.txt", "/out"))


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,price\na.png,3\n")
    with pytest.raises(ScoringError, match="no column 'prise'"):
        check_source(replace(request(tmp_path / "list.csv", "/out"), image_column="path", keep_columns=("prise",)))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("data/**/*.parquet", "data/answers"),
        ("data/*/*", "data/answers"),
        ("s3://bucket/data/**", "s3://bucket/data/answers/"),
        ("s3://[::1]:9000/bucket/*/*.parquet", "s3://[::1]:9000/bucket/answers"),
    ],
)
def test_a_pattern_does_not_mean_what_a_run_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, destination: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScoringError, match="the next run would read them as input"):
        check_places(request(source, destination))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("data/**/*.jpg", "data/answers"),
        ("data/*", "data/answers"),
        ("data/[ab]/*.parquet", "data/answers"),
        ("s3://[::1]:9000/bucket/photos", "s3://[::1]:9000/bucket/answers"),
        ("s3://bucket/**", "s3://other/answers"),
    ],
)
def test_a_pattern_may_stand_above_the_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, destination: str
) -> None:
    monkeypatch.chdir(tmp_path)
    check_places(request(source, destination))
