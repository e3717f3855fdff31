"""Where a text lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring.sources.places import LocalStorage, ObjectStorage, locate


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
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(GraphkilnError):
        locate(text)


def test_an_address_is_named_without_its_secrets() -> None:
    with pytest.raises(GraphkilnError, match=r"'https://host/a\.jpg' cannot be read \(paths, s3://"):
        locate("https://me:secret@host/a.jpg")
