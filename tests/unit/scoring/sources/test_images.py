"""Image files: found below a folder, read as they were planned, planned anew where they changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scored_inputs import files_source, ids_of, plan, read_all, read_unit

from graphkiln_backend.scoring.errors import InputChanged, ScoringError
from graphkiln_backend.scoring.sources import storage
from graphkiln_backend.scoring.sources.storage import LocalStorage


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for name in ("b.jpg", "a/2.PNG", "a/1.jpg", "c.webp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    (folder / "notes.txt").write_text("not an image")
    return folder


def test_images_at_any_depth_are_rows_named_by_their_paths(photos: Path) -> None:
    rows = read_all(files_source(photos))
    assert [row.id for row in rows] == ["a/1.jpg", "a/2.PNG", "b.jpg", "c.webp"]
    assert [row.content for row in rows] == [row.id.encode() for row in rows]


def test_unit_sizes(photos: Path) -> None:
    assert sum(unit.size_bytes for unit in plan(files_source(photos))) == len("a/1.jpga/2.PNGb.jpgc.webp")


def test_notation_of_a_folder_does_not_change_the_plan(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos.parent)
    assert plan(files_source("photos/")) == plan(files_source(photos)) == plan(files_source(f"file://{photos}"))


def test_relative_source_is_read_from_another_working_directory(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos.parent)
    source = files_source("photos")
    units = plan(source)
    monkeypatch.chdir("/")
    assert [row.error for unit in units for row in read_unit(source, unit)] == [""] * 4


def test_image_above_the_size_limit_is_not_read(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos / "a/1.jpg").write_bytes(b"x" * 9)
    source = files_source(photos)
    (unit,) = plan(source, 10**9)
    monkeypatch.setattr(storage, "IMAGE_LIMIT", 8)
    monkeypatch.setattr(LocalStorage, "read", lambda _, path, __: path.encode())
    assert [row.id for row in read_unit(source, unit) if "maximum of 8 bytes" in row.error] == ["a/1.jpg"]


def test_columns_are_refused(photos: Path) -> None:
    with pytest.raises(ScoringError, match="image files have no columns"):
        plan(files_source(photos, kept=("label",)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(names=st.sets(st.integers(0, 60), min_size=1), extra=st.integers(100, 999), rows=st.integers(1, 9))
def test_one_new_file_changes_at_most_two_units(tmp_path: Path, names: set[int], extra: int, rows: int) -> None:
    folder = tmp_path / "many"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in names:
        (folder / f"{name:03}.jpg").touch()
    before = {unit.id for unit in plan(files_source(folder), rows)}
    (folder / f"{extra:03}.jpg").touch()
    after = {unit.id for unit in plan(files_source(folder), rows)}
    assert len(after - before) <= 2
    assert ids_of(files_source(folder), rows) == sorted([*(f"{name:03}.jpg" for name in names), f"{extra:03}.jpg"])


def test_changed_file_fails_its_unit_and_is_planned_again(photos: Path) -> None:
    source = files_source(photos)
    (unit,) = plan(source, 10**9)
    (photos / "b.jpg").write_bytes(b"another")
    with pytest.raises(InputChanged, match=r"b\.jpg has changed since it was planned"):
        read_unit(source, unit)
    (again,) = plan(source, 10**9)
    assert again.id != unit.id
    assert read_unit(source, again)[2].content == b"another"


def test_deleted_file_fails_its_unit(photos: Path) -> None:
    source = files_source(photos)
    (unit,) = plan(source, 10**9)
    (photos / "b.jpg").unlink()
    with pytest.raises(InputChanged, match=r"b\.jpg was deleted"):
        read_unit(source, unit)


def test_dangling_link_is_a_row_error(photos: Path) -> None:
    (photos / "d.jpg").symlink_to("nowhere")
    source = files_source(photos)
    row = read_all(source)[-1]
    assert (row.id, row.content) == ("d.jpg", None)
    assert "No such file" in row.error


def test_name_that_is_not_utf8(photos: Path) -> None:
    Path(os.fsdecode(bytes(photos) + b"/caf\xe9.jpg")).write_bytes(b"coffee")
    row = read_all(files_source(photos))[-1]
    assert (row.id, row.content) == (r"caf\xe9.jpg", b"coffee")


def test_line_end_in_a_name_and_empty_file(photos: Path) -> None:
    (photos / "two\nlines.jpg").write_bytes(b"")
    (row,) = (row for row in read_all(files_source(photos), 10**9) if "two" in row.id)
    assert (row.id, row.content) == ("two\nlines.jpg", b"")
