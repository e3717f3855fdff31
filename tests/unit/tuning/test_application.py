"""`--apply`: proven, written in one step, with a way back."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from digits_subject import digits_subject

from graphkiln.tuning import application
from graphkiln.tuning.application import apply, check_writable
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.questions import Questions, read_questions
from graphkiln.tuning.subject import Subject, read_subject, vanishing_cache
from graphkiln_backend.graph.errors import RepositoryError, VerificationError
from graphkiln_backend.repository.config import read_config

CHOSEN = Candidate.of(
    {"engine": "onnxruntime", "precision": "fp32", "threads": 1, "instances": 2, "max_batch_size": 8, "spin": False}
)


@pytest.fixture
def subject(digits: Path, tmp_path: Path) -> Subject:
    model = tmp_path / "digits"
    shutil.copytree(digits, model)
    with vanishing_cache() as cache:
        return read_subject(model / "1", cache)


def read_again(subject: Subject) -> Subject:
    """The model as it is now."""
    with vanishing_cache() as cache:
        return read_subject(subject.folder / "1", cache)


@pytest.fixture(scope="module")
def questions(repository: Path) -> Questions:
    return read_questions(digits_subject(repository))


def test_a_configuration_is_written_and_the_server_would_take_it(subject: Subject, questions: Questions) -> None:
    before = (subject.folder / "config.pbtxt").read_text()
    applied = apply(CHOSEN, subject, questions)
    config = read_config(applied.config)
    assert config.max_batch_size == 8
    assert config.instance_group[0].count == 2
    assert config.parameters["threads"].string_value == "1"
    assert "preprocess" in config.parameters
    assert config.model_warmup[0].name == "one sample"
    assert applied.backup is not None
    assert applied.backup.read_text() == before
    with vanishing_cache() as cache:
        assert read_subject(subject.folder / "1", cache).deployment.plan.configs[0].threads == 1
    assert sorted(path.name for path in subject.folder.iterdir()) == ["1", "config.pbtxt", "config.pbtxt.untuned"]


def test_smaller_batches_are_told(subject: Subject, questions: Questions) -> None:
    assert apply(CHOSEN, subject, questions).notes == (
        "requests of more than 8 rows are refused from now on; it was 32",
    )


def test_versions_that_were_not_tuned_are_told(subject: Subject, questions: Questions) -> None:
    shutil.copytree(subject.folder / "1", subject.folder / "2")
    assert apply(CHOSEN, subject, questions).notes[1:] == (
        "version 2 is served with it, too: only version 1 was measured and proven",
    )


def test_whoever_could_read_it_still_can(subject: Subject, questions: Questions) -> None:
    (subject.folder / "config.pbtxt").chmod(0o604)
    assert apply(CHOSEN, subject, questions).config.stat().st_mode & 0o777 == 0o604


def test_the_way_back_goes_back(subject: Subject, questions: Questions) -> None:
    before = (subject.folder / "config.pbtxt").read_text()
    applied = apply(CHOSEN, subject, questions)
    undo, load = applied.commands_back
    subprocess.run(["bash", "-c", undo], check=True)
    assert (subject.folder / "config.pbtxt").read_text() == before
    assert load == "graphkiln load digits"


def test_a_model_without_a_configuration_goes_back_to_none(subject: Subject, questions: Questions) -> None:
    (subject.folder / "config.pbtxt").unlink()
    applied = apply(CHOSEN, read_again(subject), questions)
    assert applied.backup is None
    subprocess.run(["bash", "-c", applied.commands_back[0]], check=True)
    assert not applied.config.exists()


def test_no_backup_is_written_over(subject: Subject, questions: Questions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "_prove", lambda *_: None)
    backups = [apply(CHOSEN, read_again(subject), questions).backup for _ in range(3)]
    assert [backup.name for backup in backups if backup] == [
        "config.pbtxt.untuned", "config.pbtxt.untuned.1", "config.pbtxt.untuned.2",
    ]  # fmt: skip


def test_what_was_tuned_for_another_configuration_is_not_written(subject: Subject, questions: Questions) -> None:
    with (subject.folder / "config.pbtxt").open("a") as config:
        config.write("# changed meanwhile\n")
    before = (subject.folder / "config.pbtxt").read_text()
    with pytest.raises(RepositoryError, match="was changed while it was tuned"):
        apply(CHOSEN, subject, questions)
    assert (subject.folder / "config.pbtxt").read_text() == before


def test_what_cannot_be_proven_is_not_written(subject: Subject, questions: Questions) -> None:
    before = (subject.folder / "config.pbtxt").read_text()
    wrong = replace(questions, answers=tuple(reversed(questions.answers)))
    with pytest.raises(VerificationError, match="not written"):
        apply(CHOSEN, subject, wrong)
    with pytest.raises(VerificationError, match="no bf16 kernels"):
        apply(CHOSEN.with_values({"precision": "bf16"}), subject, questions)
    assert (subject.folder / "config.pbtxt").read_text() == before
    assert len(list(subject.folder.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writable(subject)
    monkeypatch.setattr(application.os, "access", lambda path, _: path != subject.folder)
    with pytest.raises(RepositoryError, match=r"cannot be written, where --apply replaces config.pbtxt \(leave"):
        check_writable(subject)


def test_a_link_that_is_replaced_is_told(
    subject: Subject, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_prove", lambda *_: None)
    path = subject.folder / "config.pbtxt"
    shared = path.rename(subject.folder.parent / "shared.pbtxt")
    path.symlink_to(shared)
    before = shared.read_text()
    applied = apply(CHOSEN, subject, questions)
    assert "config.pbtxt was a link" in applied.notes[-1]
    assert shared.read_text() == before
    subprocess.run(["bash", "-c", applied.commands_back[0]], check=True)
    assert path.read_text() == before


def test_on_a_running_server_its_address_is_told(
    subject: Subject, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_prove", lambda *_: None)
    applied = apply(CHOSEN, subject, questions, "http://h:1")
    assert applied.commands_back[1] == applied.load_command == "graphkiln load digits --url http://h:1"


def test_where_the_cpp_backend_would_serve_it_that_is_told(
    subject: Subject, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_prove", lambda *_: None)
    path = subject.folder / "config.pbtxt"
    path.write_text(path.read_text().replace('backend: "graphkiln"', 'backend: "onnxruntime"'))
    for installed, notes in (({"graphkiln"}, 1), ({"graphkiln", "onnxruntime"}, 0)):
        monkeypatch.setattr(application, "installed_backend_names", lambda found=installed: frozenset(found))
        found = apply(CHOSEN, read_again(subject), questions).notes
        assert len([note for note in found if "--replace-onnxruntime" in note]) == notes


def test_what_somebody_wrote_beside_it_stays(
    subject: Subject, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_prove", lambda *_: None)
    path = subject.folder / "config.pbtxt"
    text = path.read_text().replace("max_batch_size: 32", "max_batch_size: 32  # as clients send them")
    path.write_text(f"{text}\n# by the vision team\n")
    applied = apply(CHOSEN, read_again(subject), questions)
    written = applied.config.read_text()
    assert "max_batch_size: 8  # as clients send them\n" in written
    assert "\n# by the vision team\n" in written
    assert read_config(path).instance_group[0].count == 2
