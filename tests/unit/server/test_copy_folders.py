"""Folders for copies of remote stores: trusted, apart, and not for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.server.remote_stores import copies_folder, remove_unused


def test_copies_that_nobody_used_for_a_month_are_removed(tmp_path: Path) -> None:
    for name, age_days in (("old", 31), ("young", 29)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "address").write_text("s3://bucket/store\n")
        os.utime(tmp_path / name, (0, 100 * 86400 - age_days * 86400))
    remove_unused(tmp_path, 100 * 86400.0)
    assert [path.name for path in tmp_path.iterdir()] == ["young"]


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache" / "stores"
    folder.mkdir(parents=True)
    assert copies_folder(CacheSettings(folder=tmp_path / "cache")) == folder
    folder.chmod(0o777)
    assert copies_folder(CacheSettings(folder=tmp_path / "cache")) is None
    assert "not trusted" in caplog.text
