"""The numbers of versions: next, free, and of one conversion only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.version_number import check_free, claim, next_number


def made(folder: Path) -> Path:
    folder.mkdir()
    (folder / "graph").touch()
    return folder


def nothing(_: int) -> None: ...


def test_the_next_one_is_above_all_others(tmp_path: Path) -> None:
    assert next_number(tmp_path / "nowhere") == 1
    for name in ("2", "10", "x3", "4.old"):
        (tmp_path / name).mkdir()
    assert next_number(tmp_path) == 11


def test_one_that_is_taken_is_refused(tmp_path: Path) -> None:
    check_free(tmp_path, 1)
    (tmp_path / "1").touch()
    with pytest.raises(ConversionError, match="1 exists already"):
        check_free(tmp_path, 1)


def test_one_that_another_took_meanwhile(tmp_path: Path) -> None:
    """Between the question and the rename, another conversion takes the number: the next one is tried."""
    numbers: list[int] = []

    def another_is_faster(number: int) -> None:
        numbers.append(number)
        if number < 3:
            made(tmp_path / str(number))

    assert claim(made(tmp_path / "new"), tmp_path, None, another_is_faster) == 3
    assert numbers == [1, 2, 3]


def test_a_requested_one_is_never_replaced(tmp_path: Path) -> None:
    made(tmp_path / "7")
    with pytest.raises(ConversionError, match="7 exists already"):
        claim(made(tmp_path / "new"), tmp_path, 7, nothing)


def test_a_folder_that_cannot_be_renamed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        claim(tmp_path / "nowhere", tmp_path, None, nothing)


def test_many_at_once_get_one_each(tmp_path: Path) -> None:
    folders = [made(tmp_path / f"new{index}") for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(lambda folder: claim(folder, tmp_path, None, nothing), folders))
    assert sorted(numbers) == list(range(1, 17))
