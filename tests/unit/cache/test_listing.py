"""What lies in a cache's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphkiln_backend.cache.entry import Entry
from graphkiln_backend.cache.store import is_left_over, list_entries


def write(folder: Path, number: int, used_s: int, *, locked: bool = True) -> Path:
    entry = Entry(kind="engine", model="m/1", key={"number": str(number)})
    path = folder / "entries" / entry.name
    path.mkdir(parents=True)
    entry.write(path)
    marked = path
    if locked:
        marked = folder / "locks" / entry.name
        marked.parent.mkdir(exist_ok=True)
        marked.touch()
    os.utime(marked, (used_s, used_s))
    return path


def test_the_least_recently_used_come_first(tmp_path: Path) -> None:
    paths = [write(tmp_path, 0, 30), write(tmp_path, 1, 10), write(tmp_path, 2, 20, locked=False)]
    (tmp_path / "entries" / "no entry").mkdir()
    found = list_entries(tmp_path / "entries", tmp_path / "locks")
    assert [stored.path for stored in found] == [paths[1], paths[2], paths[0]]
    assert [stored.used_s for stored in found] == [10, 20, 30]
    assert found[0].entry.key == {"number": "1"}


def test_a_cache_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert list_entries(tmp_path / "entries", tmp_path / "locks") == []


@pytest.mark.parametrize(
    ("text", "left_over"),
    [
        ('{"kind": "engine", "model": "m", "key": {}, "files": {}, "seconds": 0.0, "of a later release": 1}', False),
        ('{"kind": "engine"}', False),
        ("{}", True),
        ("[]", True),
        ('{"kind": "eng', True),
        ("", True),
        ("\xff", True),
    ],
)
def test_what_another_release_wrote_is_no_leftover(tmp_path: Path, text: str, left_over: bool) -> None:
    (tmp_path / "entry.json").write_text(text, encoding="latin-1")
    assert is_left_over(tmp_path) is left_over


def test_a_folder_that_says_nothing_is_one(tmp_path: Path) -> None:
    assert is_left_over(tmp_path)
