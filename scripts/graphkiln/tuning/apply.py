"""`--apply`: prove the chosen configuration again and write it to config.pbtxt, with a backup."""

from __future__ import annotations

import os
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from graphkiln.tuning.candidate import Candidate, changes_of, version_of
from graphkiln.tuning.local_trials import ProbeJob, probe_session
from graphkiln.tuning.requests import Requests
from graphkiln.tuning.subject import Subject, check_unchanged, read_subject, served_versions, stage, vanishing_cache
from graphkiln.tuning.trials import Failed
from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError, VerificationError
from graphkiln_backend.repository.config import DROP_IN_BACKEND, DROP_IN_PLATFORM, read_config
from graphkiln_backend.repository.config_changes import ConfigChanges, changed_text
from graphkiln_backend.repository.signing import is_signed
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.repository.version_folders import version_folders
from graphkiln_backend.server.run_folder import installed_backend_names

_DEADLINE_S = 600.0
_BACKUP = f"{CONFIG_FILE}.untuned"


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """Written files.

    Attributes:
        config: The model's config.pbtxt.
        backup: Copy of the previous file; None if there was none.
        version: Added version folder; None if none was added.
        notes: Consequences for clients and servers.
    """

    config: Path
    backup: Path | None
    version: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def commands_back(self) -> tuple[str, str]:
        """Two commands: restore the files, and reload them in explicit mode."""
        config = shlex.quote(str(self.config))
        back = f"mv {shlex.quote(str(self.backup))} {config}" if self.backup else f"rm {config}"
        if self.version:
            back += f" && rm -r {shlex.quote(str(self.version))}"
        return back, self.load_command

    @property
    def load_command(self) -> str:
        """Command that reloads the model on a server in explicit mode."""
        return shlex.join(["graphkiln", "load", self.config.parent.name])


def check_writable(subject: Subject) -> None:
    """Check that the model's folder is writable.

    Raises:
        RepositoryError: The folder is not writable.
    """
    if not os.access(subject.folder, os.W_OK | os.X_OK):
        raise RepositoryError(
            f"{subject.folder} is not writable, but --apply replaces {CONFIG_FILE} there",
            hint="grant this user write access, or leave --apply out",
        )


def prove(candidate: Candidate, subject: Subject, requests: Requests) -> None:
    """Build and prove a candidate, as the server does, without writing anything.

    Raises:
        VerificationError: The session cannot be built or fails its proof, or another served version does not load with
            the new configuration.
        RepositoryError: config.pbtxt was changed during tuning.
    """
    check_unchanged(subject)
    job = ProbeJob(subject=subject, session=candidate, batch_sizes=(1,), requests=requests)
    found = probe_session(job, _DEADLINE_S)
    if reason := found.reason if isinstance(found, Failed) else found.accuracy:
        raise VerificationError("the configuration is not written: its proof failed", report=reason)
    changes = changes_of(candidate, subject)
    added = [max(version_folders(subject.folder.iterdir())) + 1] if version_of(candidate, subject) else []
    for version in sorted({*served_versions(subject, added)} - {*(added or [subject.version])}):
        # a version that does not load with today's configuration either is ignored
        if (reason := _refusal(version, changes, subject)) and not _refusal(version, ConfigChanges(), subject):
            raise VerificationError(
                f"the configuration is not written: version {version}, which is served as well, does not load with it",
                report=reason,
                hint=f"exclude version {version} by version_policy, or tune a copy of version "
                f"{subject.version} under another name",
            )


def write(candidate: Candidate, subject: Subject) -> Applied:
    """Write a proven candidate to config.pbtxt atomically.

    Raises:
        RepositoryError: The file is not writable or was changed during tuning.
    """
    check_unchanged(subject)
    path = subject.folder / CONFIG_FILE
    text, link = changed_text(path, changes_of(candidate, subject)), path.is_symlink()
    comments = path.exists() and path.read_text(encoding="utf-8-sig").count("#") > text.count("#")
    backup, version = None, None
    try:
        backup = _back_up(path)
        version = _add_version(version_of(candidate, subject), subject.folder)
        _replace(path, text)
    except OSError as error:
        if backup:
            backup.unlink(missing_ok=True)
        if version:
            shutil.rmtree(version, ignore_errors=True)
        raise RepositoryError(
            f"{path} cannot be written: {error.strerror or error}", hint="without --apply nothing is written"
        ) from error
    notes = _notes(candidate, subject, int(version.name) if version else subject.version)
    if link:
        notes.append(f"{CONFIG_FILE} was a link and is now a regular file; the backup is the link")
    if comments and backup:
        notes.append(f"{CONFIG_FILE} was rewritten without its comments, which are in the backup, {backup.name}")
    return Applied(config=path, backup=backup, version=version, notes=tuple(notes))


def _refusal(version: int, changes: ConfigChanges, subject: Subject) -> str:
    """Return why a version does not load with changes; "" if it does."""
    try:
        with stage(replace(subject, version=version), changes) as store, vanishing_cache() as cache:
            staged = read_subject(store / subject.name / str(version), cache)
            proven = staged.deployment.build(cache)
            with proven.session:
                pass
    except GraphkilnError as error:
        return str(error)
    return ""


def _add_version(version: Path | None, model: Path) -> Path | None:
    """Copy a version under the next number, atomically."""
    if version is None:
        return None
    number = max(version_folders(model.iterdir())) + 1
    hidden = model / f".{number}.{os.getpid()}"
    try:
        shutil.copytree(version, hidden)
        return hidden.rename(model / str(number))
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _back_up(path: Path) -> Path | None:
    """Copy a file beside itself without overwriting an earlier backup; a link stays a link."""
    if not path.is_symlink() and not path.exists():
        return None
    names = (path.with_name(_BACKUP + (f".{number}" if number else "")) for number in range(1 << 16))
    backup = next(name for name in names if not os.path.lexists(name))
    if path.is_symlink():
        backup.symlink_to(path.readlink())
        return backup
    try:
        backup.write_bytes(path.read_bytes())
        _give_rights_of(path, backup)
    except OSError:
        backup.unlink(missing_ok=True)  # incomplete, for example on a full disk
        raise
    return backup


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            _give_rights_of(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _give_rights_of(path: Path, other: Path) -> None:
    """Copy owner (as root) and mode, for servers that run as another user."""
    status = path.stat()
    with suppress(OSError):
        shutil.chown(other, status.st_uid, status.st_gid)
    other.chmod(status.st_mode)


def _notes(candidate: Candidate, subject: Subject, own: int) -> list[str]:
    before, now = subject.config.max_batch_size, candidate.number("max_batch_size", subject.config.max_batch_size)
    notes = [f"requests with more than {now} rows are refused now; the limit was {before}"] if now < before else []
    config = read_config(subject.folder / CONFIG_FILE)
    is_drop_in = config.backend == DROP_IN_BACKEND or (not config.backend and config.platform == DROP_IN_PLATFORM)
    if is_drop_in and DROP_IN_BACKEND not in installed_backend_names():
        notes.append("Triton's C++ backend serves this model unless graphkiln serve runs with --replace-onnxruntime")
    served = served_versions(subject)
    if others := ", ".join(str(version) for version in served if version != own):
        notes.append(f"version {others} is served with this configuration, too, but only version {own} was measured")
    if own not in served:
        notes.append(f"version {own} was measured but is not served: see version_policy")
    if any(is_signed(subject.folder, version) for version in served):
        notes.append(
            "the signature is no longer valid: servers with trusted keys keep the old configuration until "
            f"graphkiln sign {shlex.quote(str(subject.folder))}"
        )
    return notes
