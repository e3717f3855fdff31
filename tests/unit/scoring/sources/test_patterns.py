"""Patterns mean what a shell's do."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from graphkiln_backend.scoring.sources.places import PathPattern, is_pattern, split_pattern

FILES = ("a.jpg", "b.png", "x/a.jpg", "x/y/a.jpg", "x/y/10.jpg", "z.d/c.jpg", "x/a*b.jpg")


@pytest.mark.parametrize(
    "pattern",
    [
        "*.jpg",
        "**/*.jpg",
        "x/*",
        "x/**",
        "x/**/*.jpg",
        "?/a.jpg",
        "*/*/*.jpg",
        "[az]*/*.jpg",
        "**/y/*",
        "[!x]*",
        "x/a[*]b.jpg",
    ],
)
def test_a_pattern_matches_what_glob_finds(tmp_path: Path, pattern: str) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = glob.glob(pattern, root_dir=tmp_path, recursive=True)  # noqa: PTH207 - Path has no such thing
    expected = {name for name in found if (tmp_path / name).is_file()}
    assert expected
    matcher = PathPattern(pattern)
    assert {name for name in FILES if matcher.matches(name)} == expected


def test_a_pattern_is_split_at_its_first_magic_name() -> None:
    assert split_pattern("/data/photos/2026-*/**/*.jpg") == ("/data/photos", "2026-*/**/*.jpg")
    assert split_pattern("/*.jpg") == ("/", "*.jpg")
    assert split_pattern("bucket/a?/b") == ("bucket", "a?/b")


def test_what_is_a_pattern() -> None:
    assert is_pattern("a/*.jpg")
    assert is_pattern("a/[ab].jpg")
    assert not is_pattern(os.fspath(Path("a/b.jpg")))
