"""The folder of the cache, and its checks."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from graphkiln_backend.cache.settings import CacheSettings, user_cache_folder
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.errors import CacheError


class TestUserFolder:
    @pytest.fixture(autouse=True)
    def _home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def test_default_folder(self, tmp_path: Path) -> None:
        assert user_cache_folder() == tmp_path / "home" / ".cache" / "graphkiln"

    def test_xdg_cache_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert user_cache_folder() == tmp_path / "xdg" / "graphkiln"

    def test_relative_xdg_cache_home_is_ignored(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Source: XDG Base Directory Specification, "should consider the path invalid and ignore it"."""
        monkeypatch.setenv("XDG_CACHE_HOME", "cache")
        assert user_cache_folder() == tmp_path / "home" / ".cache" / "graphkiln"

    def test_missing_home_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", refuse)
        with pytest.raises(CacheError, match=r"no home folder.*set HOME"):
            user_cache_folder()


class TestSettings:
    def test_named_folder_lasts(self, tmp_path: Path) -> None:
        with CacheSettings(folder=tmp_path / "mine").open(tmp_path / "vanishing") as cache:
            assert (cache.folder, cache.lasting) == (tmp_path / "mine", True)


def get(cache: ArtifactCache) -> Path:
    return cache.get("engine", "m/1", {"graph": "abc"}, lambda path: (path / "f").touch())


class TestUsability:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> CacheSettings:
        return CacheSettings(folder=tmp_path / "mine", limit_bytes=7)

    def test_missing_folder_is_created(self, settings: CacheSettings, logged: list[str]) -> None:
        assert settings.checked() == settings
        assert settings.folder
        assert settings.folder.stat().st_mode & 0o022 == 0
        assert logged == []

    def test_folder_that_others_can_write(self, settings: CacheSettings, logged: list[str]) -> None:
        assert settings.folder
        settings.folder.mkdir()
        settings.folder.chmod(0o777)
        assert settings.checked() == CacheSettings(limit_bytes=7)
        (line,) = logged
        assert line.startswith(f"no artifact cache: {settings.folder} is not trusted, because {settings.folder} can be")
        assert "--cache DIR" in line

    @pytest.mark.parametrize("name", ["entries", "locks", "partial"])
    def test_subfolder_that_others_can_write(self, settings: CacheSettings, name: str) -> None:
        assert settings.folder
        (settings.folder / name).mkdir(parents=True)
        (settings.folder / name).chmod(0o777)
        assert settings.checked().folder is None

    @pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
    def test_empty_read_only_folder(
        self, settings: CacheSettings, number: int, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        refuse_to_write(monkeypatch, number)
        assert settings.checked().folder is None
        assert len(logged) == 1
        assert os.strerror(number) in logged[0]

    def test_filled_read_only_folder(
        self, settings: CacheSettings, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        assert settings.folder
        with ArtifactCache(settings.folder) as cache:
            get(cache)
        refuse_to_write(monkeypatch, errno.EROFS)
        assert settings.checked() == settings
        assert logged == []

    def test_folder_opened_to_others_later(self, settings: CacheSettings, tmp_path: Path, logged: list[str]) -> None:
        assert settings.folder
        settings.folder.mkdir()
        settings.folder.chmod(0o777)
        with settings.open(tmp_path / "vanishing") as cache:
            assert get(cache).is_relative_to(tmp_path / "vanishing")
        assert len(logged) == 1


class TestFilling:
    def test_filling_an_untrusted_folder(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine").chmod(0o777)
        with pytest.raises(CacheError, match=r"cannot be filled: .* is not trusted"):
            CacheSettings(folder=tmp_path / "mine").open_to_fill()

    def test_filling_without_a_folder(self) -> None:
        with pytest.raises(CacheError, match="no artifact cache to fill"):
            CacheSettings().open_to_fill()

    def test_filling_an_unwritable_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(CacheError, match=r"cannot be filled: .*file cannot be written"):
            CacheSettings(folder=tmp_path / "file").open_to_fill()


def refuse_to_write(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
