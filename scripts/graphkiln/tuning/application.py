"""`--apply`: the chosen configuration becomes the model's own, proven once more, with a way back."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from graphkiln.tuning.bare_session import BareJob, probe_session
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.questions import Questions
from graphkiln.tuning.serving_keys import changes_of
from graphkiln.tuning.subject import Subject, check_unchanged
from graphkiln.tuning.trials import Failed
from graphkiln_backend.graph.errors import RepositoryError, VerificationError
from graphkiln_backend.repository.config import DROP_IN_BACKEND, DROP_IN_PLATFORM, ModelConfigProto, read_config
from graphkiln_backend.repository.config_changes import changed_text
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.repository.version_folders import version_folders
from graphkiln_backend.repository.version_policy import select_versions
from graphkiln_backend.server.installed_names import installed_backend_names

_DEADLINE_S = 600.0
_BACKUP = f"{CONFIG_FILE}.untuned"


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What was written.

    Attributes:
        config: The model's config.pbtxt.
        backup: What it was before; None where there was none.
        notes: What changes for clients, a line each.
        server: Address of the server that is to load it; empty where the commands find it by themselves.
    """

    config: Path
    backup: Path | None
    notes: tuple[str, ...] = ()
    server: str = ""

    @property
    def commands_back(self) -> tuple[str, str]:
        """The two commands that go back."""
        config = shlex.quote(str(self.config))
        undo = f"mv {shlex.quote(str(self.backup))} {config}" if self.backup else f"rm {config}"
        return undo, self.load_command

    @property
    def load_command(self) -> str:
        """What has a server in explicit mode serve the file as it is."""
        url = ["--url", self.server] if self.server else []
        return shlex.join(["graphkiln", "load", self.config.parent.name, *url])


def check_writable(subject: Subject) -> None:
    """Refuses what could not be written, before anything is measured.

    Raises:
        RepositoryError: The model's folder cannot be written.
    """
    if not os.access(subject.folder, os.W_OK | os.X_OK):
        raise RepositoryError(
            f"{subject.folder} cannot be written, where --apply replaces {CONFIG_FILE}",
            hint="leave --apply out, or let this user write there",
        )


def apply(candidate: Candidate, subject: Subject, questions: Questions, server: str = "") -> Applied:
    """Writes a candidate into the configuration of its model.

    The session is built and proven first, in the way that the server does it; the file is replaced in one step.

    Args:
        candidate: What to write.
        subject: The model, as it was when it was tuned.
        questions: What the session is asked.
        server: Address of the running server that it was tuned on; empty for none.

    Raises:
        VerificationError: The session cannot be built any more, or answers otherwise.
        RepositoryError: The file cannot be written, or was changed since.
    """
    check_unchanged(subject)
    _prove(candidate, subject, questions)
    path = subject.folder / CONFIG_FILE
    text, link = changed_text(path, changes_of(candidate, subject)), path.is_symlink()
    try:
        backup = _back_up(path)
        _replace(path, text)
    except OSError as error:
        raise RepositoryError(
            f"{path} cannot be written: {error.strerror or error}", hint="without --apply nothing is written"
        ) from error
    notes = [
        *_notes(candidate, subject),
        *([f"{CONFIG_FILE} was a link, and is a file of its own now"] if link else []),
    ]
    return Applied(config=path, backup=backup, notes=tuple(notes), server=server)


def _prove(candidate: Candidate, subject: Subject, questions: Questions) -> None:
    job = BareJob(subject=subject, session=candidate, batch_sizes=(1,), questions=questions)
    found = probe_session(job, _DEADLINE_S)
    reason = found.reason if isinstance(found, Failed) else found.accuracy
    if reason:
        raise VerificationError("the configuration is not written: it cannot be proven any more", report=reason)


def _back_up(path: Path) -> Path | None:
    """A copy beside it, that of an earlier one never written over."""
    if not path.exists():
        return None
    names = (path.with_name(_BACKUP + (f".{number}" if number else "")) for number in range(1 << 16))
    backup = next(name for name in names if not name.exists())
    backup.write_bytes(path.read_bytes())
    return backup


def _replace(path: Path, text: str) -> None:
    """Whoever reads it sees the old or the new one."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            new.chmod(path.stat().st_mode)  # a server of another user reads it
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _notes(candidate: Candidate, subject: Subject) -> list[str]:
    before, now = subject.config.max_batch_size, candidate.number("max_batch_size", subject.config.max_batch_size)
    notes = [f"requests of more than {now} rows are refused from now on; it was {before}"] if now < before else []
    config = read_config(subject.folder / CONFIG_FILE)
    if DROP_IN_BACKEND not in installed_backend_names() and _is_drop_in(config):
        notes.append("Triton's C++ backend serves it here, unless graphkiln serve is given --replace-onnxruntime")
    served = select_versions(config, [*version_folders(subject.folder.iterdir())])
    if others := ", ".join(str(number) for number in served if number != subject.version):
        notes.append(f"version {others} is served with it, too: only version {subject.version} was measured and proven")
    return notes


def _is_drop_in(config: ModelConfigProto) -> bool:
    """Whether a configuration names Triton's C++ backend of ONNX graphs, for which ours stands in."""
    return config.backend == DROP_IN_BACKEND or (not config.backend and config.platform == DROP_IN_PLATFORM)
