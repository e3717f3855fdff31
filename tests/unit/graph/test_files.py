"""External files: regular, and of limited size."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from odd_files import ODD

from graphkiln_backend.graph.files import (
    GIB,
    KIB,
    MIB,
    UnusableFile,
    can_others_read,
    format_size,
    open_regular,
    read_bytes,
    read_stream,
    read_text,
)


@pytest.mark.parametrize("kind", ODD)
def test_unusable_files(tmp_path: Path, kind: str) -> None:
    make, reason = ODD[kind]
    make(tmp_path / "file")
    with pytest.raises(OSError, match=reason):
        read_bytes(tmp_path / "file", MIB)


def test_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(UnusableFile, match=r"^it has 5 bytes, which is more than the 4 bytes that"):
        read_bytes(path, 4)


def test_size_limit_of_proc_files() -> None:
    assert read_bytes("/proc/self/status", MIB)
    with pytest.raises(UnusableFile, match="more than the 10 bytes"):
        read_bytes("/proc/self/status", 10)


def test_size_limit_of_streams() -> None:
    assert read_stream(io.BytesIO(b"12345"), 5) == b"12345"
    with pytest.raises(UnusableFile, match=r"^it is more than the 4 bytes that such a file may have$"):
        read_stream(io.BytesIO(b"12345"), 4)


def test_endless_stream() -> None:
    with Path("/dev/zero").open("rb") as zeros, pytest.raises(UnusableFile):
        read_stream(zeros, MIB)


def test_open_without_a_limit(tmp_path: Path) -> None:
    ODD["huge"][0](tmp_path / "file")
    with open_regular(tmp_path / "file") as file:
        assert file.read(3) == bytes(3)


def test_name_with_a_null_character() -> None:
    with pytest.raises(OSError, match="it has no valid name"):
        open_regular("a\0b")


def test_read_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("größe")
    assert read_text(tmp_path / "file") == "größe"
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_text(tmp_path / "file")


@pytest.mark.parametrize(
    ("count", "text"), [(3, "3 bytes"), (KIB, "1 KiB"), (64 * MIB, "64 MiB"), (GIB * 3 // 2, "1.5 GiB")]
)
def test_format_size(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("mode", "ours", "somebody_elses"),
    [(0o600, False, False), (0o640, True, False), (0o440, True, False), (0o604, True, True), (0o444, True, True)],
)
def test_can_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, ours: bool, somebody_elses: bool
) -> None:
    """A pod reads its Secrets by their group: they are root's."""
    file = tmp_path / "key"
    file.write_text("")
    file.chmod(mode)
    assert can_others_read(file) is ours
    monkeypatch.setattr("os.geteuid", lambda: file.stat().st_uid + 1)
    assert can_others_read(file) is somebody_elses
