"""Writing an entry, and what a disk that fails means for it. Looking for one is tested with the store."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from graphkiln_backend.cache.store import Entry, Reservation, explained_errors
from graphkiln_backend.graph.errors import CacheError, LoweringError

ENTRY = Entry(kind="engine", model="m/1", key={"graph": "abc"})


@pytest.fixture
def reservation(tmp_path: Path) -> Reservation:
    for name in ("entries", "partial"):
        (tmp_path / name).mkdir()
    return Reservation(tmp_path, ENTRY, None)


def test_what_is_written_is_the_entry_and_closed_to_others(reservation: Reservation, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with reservation.write() as folder:
            (folder / "file").write_bytes(b"x")
    finally:
        os.umask(before)
    path = tmp_path / "entries" / ENTRY.name
    assert reservation.path == path
    assert [file.name for file in sorted(path.iterdir())] == ["entry.json", "file"]
    assert not any(place.stat().st_mode & 0o022 for place in (path, *path.iterdir()))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "is full.*graphkiln cache prune"),
        (errno.EDQUOT, "is full.*graphkiln cache prune"),
        (errno.EROFS, "cannot be written: Read-only.*--cache off"),
        (errno.EIO, "cannot be written: Input/output error"),
    ],
)
def test_errors_of_the_disk_say_what_to_do(tmp_path: Path, number: int, words: str) -> None:
    with pytest.raises(CacheError, match=words), explained_errors(tmp_path):
        raise OSError(number, os.strerror(number))


def fail_to_compile(reservation: Reservation) -> None:
    with reservation.write():
        raise LoweringError("cannot save", attempts=())


def test_a_runtime_that_fails_over_a_quota_is_told_apart(
    reservation: Reservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(CacheError, match="is full: Disk quota exceeded"):
        fail_to_compile(reservation)


def test_a_runtime_that_fails_on_a_folder_that_is_gone_is_told_apart(reservation: Reservation, tmp_path: Path) -> None:
    def vanish() -> None:
        with reservation.write() as folder:
            folder.rmdir()
            raise LoweringError("cannot save", attempts=())

    with pytest.raises(CacheError, match="cannot be written: No such file"):
        vanish()
    assert list((tmp_path / "entries").iterdir()) == []


def test_a_runtime_that_refuses_a_graph_is_passed_on(reservation: Reservation, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="cannot save"):
        fail_to_compile(reservation)
    assert reservation.path is None
    assert list((tmp_path / "partial").iterdir()) == []
