"""What a trial serves: links, and another configuration."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from digits_subject import digits_subject

from graphkiln.tuning.subject import Subject, stage
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.config_changes import ConfigChanges


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_a_store_holds_the_version_and_the_changes(subject: Subject) -> None:
    before = digest(subject.folder)
    with stage(subject, ConfigChanges(max_batch_size=4)) as store:
        assert [path.name for path in store.iterdir()] == ["digits"]
        config = read_config(store / "digits" / "config.pbtxt")
        assert config.max_batch_size == 4
        assert "preprocess" in config.parameters
        assert (store / "digits" / "1").resolve() == subject.folder / "1"
    assert not store.exists()
    assert digest(subject.folder) == before


def test_only_the_version_that_is_tuned_is_there(subject: Subject, tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "config.pbtxt").write_text('version_policy { specific { versions: [7] } } name: "digits"')
    for version in ("1", "7"):
        (folder / version).symlink_to(subject.folder / "1")
    with stage(replace(subject, folder=folder), ConfigChanges()) as store:
        assert sorted(path.name for path in (store / "digits").iterdir()) == ["1", "config.pbtxt"]
        assert not read_config(store / "digits" / "config.pbtxt").HasField("version_policy")


def test_another_graph_may_stand_in_its_place(subject: Subject, repository: Path) -> None:
    other = repository / "model_repository" / "scenes-detector" / "1"
    with stage(subject, ConfigChanges(), other) as store:
        assert (store / "digits" / "1").resolve() == other
        assert sorted(path.name for path in (store / "digits").iterdir()) == ["1", "config.pbtxt"]
