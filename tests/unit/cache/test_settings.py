"""Where caches lie, and which one is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.cache.settings import CacheSettings, user_cache_folder
from graphkiln_backend.cache.store import DEFAULT_LIMIT_BYTES


class TestUserFolder:
    @pytest.fixture(autouse=True)
    def _home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def test_is_below_the_home_folder(self, tmp_path: Path) -> None:
        assert user_cache_folder() == tmp_path / "home" / ".cache" / "graphkiln"

    def test_is_where_the_desktop_says(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert user_cache_folder() == tmp_path / "xdg" / "graphkiln"

    def test_an_empty_variable_is_as_good_as_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Source: XDG Base Directory Specification, "either not set or empty"."""
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        assert user_cache_folder() == tmp_path / "home" / ".cache" / "graphkiln"

    def test_other_purposes_have_folders_of_their_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert user_cache_folder("graphkiln-story") == tmp_path / "graphkiln-story"

    def test_is_not_made_by_asking(self, tmp_path: Path) -> None:
        user_cache_folder()
        assert not (tmp_path / "home").exists()


class TestSettings:
    def test_a_named_folder_lasts(self, tmp_path: Path) -> None:
        with CacheSettings(folder=tmp_path / "mine").open(tmp_path / "vanishing") as cache:
            assert (cache.folder, cache.lasting) == (tmp_path / "mine", True)

    def test_without_one_it_vanishes_with_the_server(self, tmp_path: Path) -> None:
        with CacheSettings().open(tmp_path / "vanishing") as cache:
            assert (cache.folder, cache.lasting) == (tmp_path / "vanishing", False)

    def test_opening_writes_nothing(self, tmp_path: Path) -> None:
        with CacheSettings(folder=tmp_path / "mine").open(tmp_path / "vanishing"):
            pass
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("folder", ["mine", None])
    def test_the_limit_is_handed_on(self, tmp_path: Path, folder: str | None) -> None:
        settings = CacheSettings(folder=tmp_path / folder if folder else None, limit_bytes=150)
        with settings.open(tmp_path / "vanishing") as cache:
            for number in range(3):
                cache.get("engine", "m/1", {"number": str(number)}, lambda path: (path / "f").write_bytes(bytes(100)))
                cache.close()
            assert len(cache.entries()) == 1

    def test_the_default_limit_is_what_the_help_says(self) -> None:
        assert CacheSettings().limit_bytes == DEFAULT_LIMIT_BYTES == 20 * 1024**3
