"""Paths, addresses and patterns."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring.sources.objects import ObjectStorage
from graphkiln_backend.scoring.sources.places import PathPattern, locate
from graphkiln_backend.scoring.sources.storage import LocalStorage


def test_paths_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("photos", "./photos/", f"file://{tmp_path}/photos"):
        place = locate(text)
        assert isinstance(place.storage, LocalStorage)
        assert place.path == place.text == str(tmp_path / "photos")
    assert place.below("a.jpg").path == str(tmp_path / "photos" / "a.jpg")


def test_addresses_of_one_service_share_its_client() -> None:
    one, two = locate("s3://host:9000/bucket/photos/a"), locate("s3://host:9000/bucket/b.jpg")
    assert isinstance(one.storage, ObjectStorage)
    assert one.storage is two.storage
    assert one.storage is not locate("s3://bucket/photos").storage
    assert (one.path, one.text) == ("bucket/photos/a", "s3://host:9000/bucket/photos/a")
    assert one.below("1.jpg").text == "s3://host:9000/bucket/photos/a/1.jpg"


@pytest.mark.parametrize("text", ["hf://owner/data/x", "ftp://host/x", "S3://bucket/x", "s3://"])
def test_unsupported_addresses_are_refused(text: str) -> None:
    with pytest.raises(GraphkilnError):
        locate(text)


def test_error_shows_no_password() -> None:
    with pytest.raises(GraphkilnError, match=r"'https://host/a\.jpg' cannot be read"):
        locate("https://me:secret@host/a.jpg")


# Patterns

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
