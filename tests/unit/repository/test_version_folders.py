"""Which folders are versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.repository.version_folders import version_folders, version_number


@pytest.mark.parametrize(("name", "number"), [("1", 1), ("0", 0), ("10", 10)])
def test_a_number_is_one(name: str, number: int) -> None:
    assert version_number(name) == number


@pytest.mark.parametrize("name", ["", "01", "-1", "1.old", "v1", " 1", "\u0663", "\u00b2", "1_0"])
def test_what_triton_ignores_is_none(name: str) -> None:
    assert version_number(name) is None


def test_folders_by_number(tmp_path: Path) -> None:
    for name in ("10", "9", "011", "drafts"):
        (tmp_path / name).mkdir()
    (tmp_path / "12").touch()
    assert list(version_folders(tmp_path.iterdir()).items()) == [(9, tmp_path / "9"), (10, tmp_path / "10")]
