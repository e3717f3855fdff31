"""Unreadable and missing images are errors of their rows; the others are read."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

import pytest
from scored_inputs import Answerable, files_source, plan, read_unit, write_tar

from graphkiln_backend.scoring.sources import storage as local_storage

CLOSED, GONE = "2.jpg", "4.jpg"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for number in range(5):
        (tmp_path / "photos" / f"{number}.jpg").write_bytes(b"%d" % number)
    return tmp_path / "photos"


@pytest.fixture
def _closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deny access to one file, also for root."""
    opened = local_storage.open_regular

    def refuse(path: str, *more: int | None) -> BinaryIO:
        if path.endswith(CLOSED):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, *more)

    monkeypatch.setattr(local_storage, "open_regular", refuse)


def read(source: Path, **columns: str) -> dict[str, Answerable]:
    """The rows of a source that is listed before an image of it is deleted."""
    opened = files_source(source, **columns)
    units = plan(opened, 10**9)
    (source.parent / "photos" / GONE).unlink()
    return {Path(row.id).name: row for unit in units for row in read_unit(opened, unit)}


def check(rows: dict[str, Answerable]) -> None:
    assert {name for name, row in rows.items() if row.error} == {CLOSED, GONE}
    assert "Permission denied" in rows[CLOSED].error
    assert "No such file" in rows[GONE].error
    assert [row.content for name, row in sorted(rows.items()) if not row.error] == [b"0", b"1", b"3"]


@pytest.mark.usefixtures("_closed")
def test_unreadable_image_of_a_folder_is_an_error(folder: Path) -> None:
    """A removed image changes the input: the unit is planned again without it, see `test_images`."""
    source = files_source(folder)
    rows = {row.id: row for unit in plan(source, 10**9) for row in read_unit(source, unit)}
    assert {name for name, row in rows.items() if row.error} == {CLOSED}
    assert "Permission denied" in rows[CLOSED].error


@pytest.mark.usefixtures("_closed")
def test_unreadable_and_missing_images_of_a_listing_are_errors(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("".join(f"{path}\n" for path in folder.iterdir()))
    check(read(tmp_path / "all.txt"))


def test_rows_of_an_unreadable_tar_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tar that may not be read any more: its rows are errors, also where a text of them is carried along."""
    for tar in "ab":
        write_tar(tmp_path / f"{tar}.tar", {"1.jpg": b"one", "1.txt": b"text", "2.jpg": b"two"})
    source = files_source(tmp_path, kept=("txt",))
    units = plan(source, 10**9)
    opened = local_storage.open_regular

    def refuse(path: str, *more: int | None) -> BinaryIO:
        if path.endswith("a.tar"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, *more)

    monkeypatch.setattr(local_storage, "open_regular", refuse)
    rows = {row.id: row for unit in units for row in read_unit(source, unit)}
    assert {name for name, row in rows.items() if "Permission denied" in row.error} == {"a.tar/1", "a.tar/2"}
    assert (rows["b.tar/1"].content, rows["b.tar/1"].kept["txt"], rows["b.tar/2"].content) == (b"one", "text", b"two")
