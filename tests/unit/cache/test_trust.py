"""Folders trusted to hold code: only this user and root can write them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from graphkiln_backend.cache.trust import close_to_others, find_distrust, find_distrust_inside, make_private


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "above" / "cache"
    make_private(path)
    return path


def give_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a file or folder, and nothing else, belong to another user; not everybody may call chown."""
    found = path.lstat()
    lstat = Path.lstat

    def pretend(self: Path) -> os.stat_result:
        status = lstat(self)
        if not os.path.samestat(status, found):
            return status
        return os.stat_result((*status[:4], os.geteuid() + 7, *status[5:]))

    monkeypatch.setattr(Path, "lstat", pretend)


def test_own_folder(folder: Path) -> None:
    assert find_distrust(folder) is None


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_folder_that_others_can_write(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert find_distrust(folder) == f"{folder} can be written by other users (mode {mode:o})"


def test_sticky_bit(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert find_distrust(folder) is None
    folder.chmod(0o1777)
    assert str(find_distrust(folder)).startswith(f"{folder} can be written")


def test_folder_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_to_another(folder, monkeypatch)
    assert find_distrust(folder) == f"{folder} belongs to another user ({os.geteuid() + 7})"


class TestLinks:
    def test_own_link_to_a_trusted_folder(self, tmp_path: Path, folder: Path) -> None:
        (tmp_path / "link").symlink_to(folder)
        (tmp_path / "relative").symlink_to("above/../link")
        assert find_distrust(tmp_path / "link") is None
        assert find_distrust(tmp_path / "relative") is None

    def test_link_to_an_untrusted_folder(self, tmp_path: Path, folder: Path) -> None:
        (tmp_path / "link").symlink_to(folder)
        folder.chmod(0o777)
        assert str(find_distrust(tmp_path / "link")).startswith(f"{folder} can be written")

    def test_link_of_another_user(self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        link = tmp_path / "link"
        link.symlink_to(folder)
        give_to_another(link, monkeypatch)
        assert str(find_distrust(link)).startswith(f"{link} belongs to another user")

    def test_circular_links(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        assert find_distrust(tmp_path / "a") == f"{tmp_path / 'a'} cannot be examined: {os.strerror(errno.ELOOP)}"


class TestInside:
    def test_own_content(self, folder: Path) -> None:
        make_private(folder / "deep")
        (folder / "deep" / "file").touch(0o644)
        assert find_distrust_inside(folder) is None

    def test_file_that_others_can_write(self, folder: Path) -> None:
        file = folder / "file"
        file.touch()
        file.chmod(0o666)
        assert find_distrust_inside(folder) == f"{file} can be written by other users (mode 666)"

    @pytest.mark.parametrize("kind", ["link", "fifo"])
    def test_neither_file_nor_folder(self, folder: Path, kind: str) -> None:
        path = folder / "odd"
        path.symlink_to("/etc/passwd") if kind == "link" else os.mkfifo(path)
        assert find_distrust_inside(folder) == f"{path} is neither a file nor a folder"


def test_created_folders_ignore_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
        (tmp_path / "a" / "b" / "file").touch()
    finally:
        os.umask(before)
    assert find_distrust(tmp_path / "a" / "b") is None
    assert find_distrust_inside(tmp_path / "a" / "b")
    close_to_others(tmp_path / "a" / "b")
    assert find_distrust_inside(tmp_path / "a" / "b") is None


def test_closing_follows_no_link(tmp_path: Path, folder: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    outside.chmod(0o666)
    (folder / "link").symlink_to(outside)
    close_to_others(folder)
    assert outside.stat().st_mode & 0o777 == 0o666


@pytest.fixture
def volume(folder: Path) -> Path:
    """A volume with the mode that Kubernetes gives to those of a pod."""
    folder.chmod(0o2777)
    return folder


def test_trusted_volume(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "can be written by other users (mode 2777)" in str(find_distrust(volume))
    monkeypatch.setenv("GRAPHKILN_TRUSTED_VOLUME", str(volume))
    assert find_distrust(volume) is None
    make_private(volume / "entries")
    assert find_distrust(volume / "entries") is None


def test_trusted_volume_opens_nothing_else(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_TRUSTED_VOLUME", str(volume))
    make_private(volume / "entries")
    (volume / "entries").chmod(0o777)
    assert str(find_distrust(volume / "entries")).startswith(f"{volume / 'entries'} can be written")
    volume.parent.chmod(0o777)
    assert str(find_distrust(volume)).startswith(f"{volume.parent} can be written")


def test_volume_of_another_user(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_TRUSTED_VOLUME", str(volume))
    give_to_another(volume, monkeypatch)
    assert "belongs to another user" in str(find_distrust(volume))
