"""`--apply`: proof, atomic writes and restoring the backup."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from graphkiln.tuning import apply as application
from graphkiln.tuning.apply import Applied, prove, write
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.local_trials import run_job
from graphkiln.tuning.requests import Requests
from graphkiln.tuning.subject import Subject, read_subject, vanishing_cache
from graphkiln.tuning.trials import SessionTiming
from graphkiln_backend.graph.errors import RepositoryError, VerificationError
from graphkiln_backend.repository.config import read_config

CHOSEN = Candidate.of(
    {"engine": "onnxruntime", "precision": "fp32", "threads": 1, "instances": 2, "max_batch_size": 8, "spin": False}
)


@pytest.fixture
def subject(digits: Path, tmp_path: Path) -> Subject:
    """A model in a folder whose name needs quoting in a shell."""
    model = tmp_path / "it's a store" / "digits"
    shutil.copytree(digits, model)
    return read_again(model)


def read_again(model: Path) -> Subject:
    """Read the model again."""
    with vanishing_cache() as cache:
        return read_subject(model / "1", cache)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A successful proof without a child process."""
    monkeypatch.setattr(application, "probe_session", lambda *_: SessionTiming(batch_s={1: 0.001}))


def go_back(applied: Applied) -> None:
    subprocess.run(["bash", "-c", applied.commands_back[0]], check=True)


def test_configuration_is_written(subject: Subject, requests: Requests) -> None:
    before = (subject.folder / "config.pbtxt").read_text()
    prove(CHOSEN, subject, requests)
    applied = write(CHOSEN, subject)
    config = read_config(applied.config)
    assert config.max_batch_size == 8
    assert config.instance_group[0].count == 2
    assert config.parameters["threads"].string_value == "1"
    assert "preprocess" in config.parameters
    assert config.model_warmup[0].name == "one sample"
    assert applied.backup is not None
    assert applied.backup.read_text() == before
    assert read_again(subject.folder).deployment.plan.configs[0].threads == 1
    assert sorted(path.name for path in subject.folder.iterdir()) == ["1", "config.pbtxt", "config.pbtxt.untuned"]


def test_other_served_versions_are_noted(subject: Subject) -> None:
    shutil.copytree(subject.folder / "1", subject.folder / "2")

    notes = write(CHOSEN, subject).notes[1:]
    assert [note.partition(" is")[0] for note in notes] == ["version 2", "version 1 was measured but"]


@pytest.mark.usefixtures("built")
def test_other_version_that_would_not_load_prevents_writing(
    subject: Subject, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that does not load today either is ignored."""
    shutil.copytree(subject.folder / "1", subject.folder / "2")

    checked: list[tuple[int, bool]] = []

    def refusal(version: int, changes: application.ConfigChanges, _: Subject) -> str:

        checked.append((version, bool(changes.parameters)))
        return "its graph takes no batches" if changes.parameters or broken else ""

    monkeypatch.setattr(application, "_refusal", refusal)
    broken = False
    with pytest.raises(VerificationError, match=r"version 2.*takes no batches.*version_policy"):
        prove(CHOSEN, subject, requests)

    assert checked == [(2, True), (2, False)]
    broken = True
    prove(CHOSEN, subject, requests)


def test_invalidated_signature_is_noted(subject: Subject) -> None:
    (subject.folder / "1" / "attestation.json").write_text("{}")
    note = write(CHOSEN, subject).notes[-1]

    assert "signature" in note
    quoted = note[note.index("graphkiln sign ") :]

    printed = subprocess.run(["bash", "-c", f"set -- {quoted}; echo $3"], check=True, capture_output=True, text=True)

    assert printed.stdout.strip() == str(subject.folder)


def test_undo_restores_the_files(subject: Subject) -> None:
    """The mode is kept as well, independent of the umask."""
    path = subject.folder / "config.pbtxt"
    path.chmod(0o604)
    before, umask = path.read_bytes(), os.umask(0o077)
    try:
        applied = write(CHOSEN, subject)
    finally:
        os.umask(umask)
    assert path.read_bytes() != before
    assert path.stat().st_mode & 0o777 == 0o604
    go_back(applied)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o604
    assert sorted(path.name for path in subject.folder.iterdir()) == ["1", "config.pbtxt"]
    assert applied.commands_back[1] == "graphkiln load digits"


def test_backups_are_not_overwritten(subject: Subject) -> None:
    backups = [write(CHOSEN, read_again(subject.folder)).backup for _ in range(3)]
    assert [backup.name for backup in backups if backup] == [
        "config.pbtxt.untuned", "config.pbtxt.untuned.1", "config.pbtxt.untuned.2",
    ]  # fmt: skip


def test_changed_configuration_is_not_overwritten(subject: Subject, requests: Requests) -> None:
    with (subject.folder / "config.pbtxt").open("a") as config:
        config.write("# changed meanwhile\n")
    before = (subject.folder / "config.pbtxt").read_text()
    for attempt in (lambda: prove(CHOSEN, subject, requests), lambda: write(CHOSEN, subject)):
        with pytest.raises(RepositoryError, match="was changed"):
            attempt()
    assert (subject.folder / "config.pbtxt").read_text() == before


def test_failed_proof_is_refused(subject: Subject, requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "probe_session", lambda job, _deadline_s: run_job(job))
    wrong = replace(requests, answers=tuple(reversed(requests.answers)))
    with pytest.raises(VerificationError, match="not written"):
        prove(CHOSEN, subject, wrong)
    with pytest.raises(VerificationError, match="no bf16 kernels"):
        prove(CHOSEN.with_values({"precision": "bf16"}), subject, requests)
    assert len(list(subject.folder.iterdir())) == 2


def test_full_disk_changes_nothing(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = (subject.folder / "config.pbtxt").read_text()
    monkeypatch.setattr(application.os, "fsync", fail)
    with pytest.raises(RepositoryError, match="No space left on device"):
        write(CHOSEN, subject)
    assert sorted(path.name for path in subject.folder.iterdir()) == ["1", "config.pbtxt"]
    assert (subject.folder / "config.pbtxt").read_text() == before


def test_undo_restores_a_link(subject: Subject) -> None:
    path = subject.folder / "config.pbtxt"
    shared = path.rename(subject.folder.parent / "shared.pbtxt")
    path.symlink_to("../shared.pbtxt")
    before = shared.read_text()
    applied = write(CHOSEN, subject)
    assert "config.pbtxt was a link" in applied.notes[-1]
    assert shared.read_text() == before
    assert read_config(path).max_batch_size == 8
    go_back(applied)
    assert path.is_symlink()
    assert path.read_text() == before


def test_cpp_backend_is_noted(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    path = subject.folder / "config.pbtxt"
    path.write_text(path.read_text().replace('backend: "graphkiln"', 'backend: "onnxruntime"'))
    for installed, notes in (({"graphkiln"}, 1), ({"graphkiln", "onnxruntime"}, 0)):
        monkeypatch.setattr(application, "installed_backend_names", lambda found=installed: frozenset(found))
        found = write(CHOSEN, read_again(subject.folder)).notes
        assert len([note for note in found if "--replace-onnxruntime" in note]) == notes


def test_lost_comments_are_noted(subject: Subject) -> None:
    path = subject.folder / "config.pbtxt"
    path.write_text(f"{path.read_text()}\n# by the vision team\n")
    applied = write(CHOSEN, read_again(subject.folder))
    assert applied.backup
    assert "by the vision team" in applied.backup.read_text()
    assert [note for note in applied.notes if "comments" in note and applied.backup.name in note]
    assert read_config(path).instance_group[0].count == 2


def test_int8_graph_becomes_the_next_version(subject: Subject) -> None:
    """The graph is a copy here."""
    before = (subject.folder / "config.pbtxt").read_text()
    int8 = subject.folder.parent / "made" / "1"
    shutil.copytree(subject.folder / "1", int8)
    (subject.folder / "6").mkdir()
    applied = write(CHOSEN.with_values({"precision": "int8"}), replace(subject, int8=int8))
    assert applied.version == subject.folder / "7"
    assert (subject.folder / "7" / "model.onnx").read_bytes() == (int8 / "model.onnx").read_bytes()
    assert "precision" not in read_config(applied.config).parameters
    assert sorted(path.name for path in subject.folder.iterdir()) == [
        "1", "6", "7", "config.pbtxt", "config.pbtxt.untuned",
    ]  # fmt: skip
    go_back(applied)
    assert sorted(path.name for path in subject.folder.iterdir()) == ["1", "6", "config.pbtxt"]
    assert (subject.folder / "config.pbtxt").read_text() == before
