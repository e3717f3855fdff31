"""Which folders are versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.repository.version_folders import confuses_triton, is_version, version_folders, version_number


@pytest.mark.parametrize(("name", "number"), [("1", 1), ("0", 0), ("10", 10), ("9223372036854775807", 2**63 - 1)])
def test_a_number_is_one(name: str, number: int) -> None:
    assert version_number(name) == number


@pytest.mark.parametrize(
    "name", ["", "01", "-1", "1.old", "v1", " 1", "\u0663", "\u00b2", "1_0", "+1", "9223372036854775808", "9" * 200]
)
def test_what_triton_ignores_is_none(name: str) -> None:
    assert version_number(name) is None


def test_folders_by_number(tmp_path: Path) -> None:
    for name in ("10", "9", "011", "drafts"):
        (tmp_path / name).mkdir()
    (tmp_path / "12").touch()
    assert list(version_folders(tmp_path.iterdir()).items()) == [(9, tmp_path / "9"), (10, tmp_path / "10")]


@pytest.mark.parametrize("name", ["1.old", "+1", " 1", "-1", "2_backup", "01", "9223372036854775808"])
def test_what_triton_takes_for_a_version_and_does_not_find(name: str) -> None:
    assert confuses_triton(name)
    assert not is_version(name)


@pytest.mark.parametrize("name", ["1", "0", "v1", "drafts", "\u0663", ".1"])
def test_what_confuses_nobody(name: str) -> None:
    assert not confuses_triton(name)
