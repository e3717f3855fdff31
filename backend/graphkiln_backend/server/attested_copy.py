"""Copy the versions of a store that trusted keys have signed.

Files are hashed while they are copied, so that exactly the verified bytes are served, also after a restart. A version
that is unsigned, or differs from what was signed, is not copied; an earlier copy of it stays.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError
from graphkiln_backend.graph.files import open_regular
from graphkiln_backend.repository.attestation import HOW_TO_SIGN, check_hash, find_signer, hash_stream
from graphkiln_backend.repository.signing_keys import TrustedKeys, short
from graphkiln_backend.repository.stores import StoredModel
from graphkiln_backend.repository.version_folders import is_version
from graphkiln_backend.server.mirror import Mirror

_log = logging.getLogger("graphkiln.server")

_OWN, _SHARED = "own", "shared"


@dataclass(frozen=True, slots=True)
class VersionCopy:
    """The copy of a signed version.

    Attributes:
        folder: Contains `own`, the version folder, and `shared`, the files shared with other versions of the model.
        stamps: Stamps of the own and the shared files in the store, taken before the copy.
        shared: SHA-256 of the shared files, by path below the model's folder.
    """

    folder: Path
    stamps: tuple[str, str]
    shared: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CopiedModel:
    """A model in the copy.

    Attributes:
        stored: State of the model in the store at the last scan.
        versions: The shown versions.
        refused: Version number -> why it was not copied.
        shown: The model's folder in the copy.
    """

    stored: StoredModel
    versions: Mapping[int, VersionCopy] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)
    shown: Path | None = None

    @property
    def folders(self) -> set[Path]:
        """All folders of the model in the copy."""
        shown = {self.shown} if self.shown else set()
        return shown | {version.folder for version in self.versions.values()}


class AttestedCopy:
    """A copy of the signed versions of a store.

    Attributes:
        store: The folder to serve.
    """

    def __init__(self, folder: Path, trusted: TrustedKeys) -> None:
        self.store = folder / "store"
        self._contents = folder / "contents"
        self._refused = Mirror(folder / "refused")
        self._trusted = trusted
        self._taken: dict[str, CopiedModel] = {}
        self._numbers = count()
        for each in (self.store, self._contents):
            each.mkdir()

    def is_known(self, stored: StoredModel) -> bool:
        """True if a model is unchanged since the last scan."""
        taken = self._taken.get(stored.name)
        return taken is not None and taken.stored == stored

    def names(self) -> set[str]:
        """Names of all models that were copied or refused."""
        return set(self._taken)

    def refused(self) -> Mapping[str, CopiedModel]:
        """Models with refused versions, or without any version to show."""
        return {name: taken for name, taken in self._taken.items() if taken.refused or not taken.versions}

    def remove(self, name: str) -> None:
        """Remove a model from the copy."""
        taken = self._taken.pop(name)
        (self.store / name).unlink(missing_ok=True)
        self._refused.remove(name)
        _discard(taken.folders)

    def take(self, stored: StoredModel, on_chunk: Callable[[], None] = lambda: None) -> None:
        """Copy the signed versions of a model.

        Args:
            stored: The model in the store.
            on_chunk: Called after each MiB; may raise to abort.

        Raises:
            OSError: The copy cannot be written.
        """
        before = self._taken.get(stored.name) or CopiedModel(stored)
        made: set[Path] = set()
        try:
            good, reasons = self._copy_versions(stored, before, made, on_chunk)
            versions, refused = _merge(stored, before, good, reasons)
            shown = self._show(stored, versions, refused, before)
        except BaseException:
            _discard(made)
            raise
        after = self._taken[stored.name] = CopiedModel(stored, versions, refused, shown)
        _discard((before.folders | made) - after.folders)
        _log_refusals(stored, before, after, reasons)

    def _copy_versions(
        self, stored: StoredModel, before: CopiedModel, made: set[Path], on_chunk: Callable[[], None]
    ) -> tuple[dict[int, VersionCopy], dict[int, str]]:
        """Copy the versions signed with the same shared files; return the copies and the reasons of refusals."""
        good: dict[int, VersionCopy] = {}
        reasons = dict(stored.faults)
        for version in sorted(stored.versions.keys() - stored.faults.keys(), reverse=True):
            stamps = stored.versions[version], stored.stamp
            known = before.versions.get(version)
            try:
                copy = known if known and known.stamps == stamps else self._copy(stored, version, made, on_chunk)
                if any(copy.shared != newer.shared for newer in good.values()):
                    raise RepositoryError("a newer version was signed with another config.pbtxt", hint=HOW_TO_SIGN)
                good[version] = copy
            except (GraphkilnError, NotRead) as error:
                reasons[version] = str(error)
        return good, reasons

    def _copy(self, stored: StoredModel, version: int, made: set[Path], on_chunk: Callable[[], None]) -> VersionCopy:
        """Copy a version and its shared files.

        Raises:
            RepositoryError: It is unsigned, or differs from what was signed.
            NotRead: A file cannot be read.
        """
        try:
            statement, key_id = find_signer(stored.folder, version, self._trusted)
        except OSError as error:
            raise NotRead(f"its attestation cannot be read: {error}") from error
        folder = self._new_folder()
        made.add(folder)
        (folder / _OWN).mkdir()
        shared = {}
        for name, sha256 in statement.files.items():
            first, _, rest = name.partition("/")
            target = folder / _OWN / rest if rest and is_version(first) else folder / _SHARED / name
            target.parent.mkdir(parents=True, exist_ok=True)
            check_hash(name, _copy_file(stored.folder / name, target, on_chunk), sha256)
            if not target.is_relative_to(folder / _OWN):
                shared[name] = sha256
        who = self._trusted.names[key_id]
        _log.info("%s version %d is signed by %s (%s)", stored.name, version, who, short(key_id))
        return VersionCopy(folder, (stored.versions[version], stored.stamp), shared)

    def _show(
        self, stored: StoredModel, versions: Mapping[int, VersionCopy], refused: Mapping[int, str], before: CopiedModel
    ) -> Path | None:
        """Show versions together with their shared files; return the model's folder."""
        name = stored.name
        if not versions:
            self._refused.refuse(name, dict(refused) or {1: stored.problem})
            self._link(name, self._refused.path / name)
            return None
        if versions == before.versions:
            return before.shown
        folder = self._new_folder()
        newest = versions[max(versions)]
        for shared in newest.shared:
            (folder / shared).parent.mkdir(parents=True, exist_ok=True)
            (folder / shared).hardlink_to(newest.folder / _SHARED / shared)
        for version, copy in versions.items():
            (folder / str(version)).symlink_to(copy.folder / _OWN)
        self._link(name, folder)
        self._refused.remove(name)
        return folder

    def _link(self, name: str, target: Path) -> None:
        """Point a model of the store to a folder, atomically."""
        new = self._contents / f"{name}.next"
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(self.store / name)

    def _new_folder(self) -> Path:
        folder = self._contents / str(next(self._numbers))
        folder.mkdir()
        return folder


class NotRead(Exception):
    """A file of the store cannot be read."""


def _merge(
    stored: StoredModel, before: CopiedModel, good: dict[int, VersionCopy], reasons: dict[int, str]
) -> tuple[dict[int, VersionCopy], dict[int, str]]:
    """Return the versions to show and those refused; earlier copies stay if their shared files are unchanged.

    A version that was shown before is not reported as refused, so that it does not block changes of the others.
    """
    kept = {number: before.versions[number] for number in reasons if number in before.versions}
    if good:
        shared = next(iter(good.values())).shared
        kept = {number: copy for number, copy in kept.items() if copy.shared == shared}
    elif stored.versions:
        kept = dict(before.versions)
    versions = dict(sorted({**kept, **good}.items()))
    return versions, {number: why for number, why in reasons.items() if number not in {*versions, *before.versions}}


def _log_refusals(stored: StoredModel, before: CopiedModel, after: CopiedModel, reasons: dict[int, str]) -> None:
    """Log refused versions that were shown before; others are logged when they are not served."""
    for version, reason in sorted(reasons.items()):
        if version in before.versions:
            stays = version in after.versions
            outcome = "the verified copy keeps serving" if stays else "it is no longer served"
            _log.error("%s version %d: %s; %s", stored.name, version, reason, outcome)


def _discard(folders: set[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_file(source: Path, target: Path, on_chunk: Callable[[], None]) -> str:
    """Copy a file; return the SHA-256 of the written bytes.

    Raises:
        NotRead: The source cannot be read.
        OSError: The target cannot be written.
    """
    try:
        file = open_regular(source)
    except OSError as error:
        raise NotRead(f"{source} cannot be read: {error.strerror or error}") from error
    with file, target.open("wb") as copy:

        def write(chunk: bytes) -> None:
            copy.write(chunk)
            on_chunk()

        return hash_stream(file, write)
