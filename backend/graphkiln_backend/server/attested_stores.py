"""The stores of a server that serves nothing but what trusted keys have signed, and how they follow while it runs.

Triton and everything that decides what it sees are given the copies (`server.attested_copy`), in every control mode and
for models of every backend. What was refused is put beside what the copies hold, so that readiness and the list of
models name it with the reason.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.cache.trust import find_distrust, make_private
from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError, ServerSetupError
from graphkiln_backend.graph.files import open_regular
from graphkiln_backend.repository.attestation import HOW_TO_SIGN, check_hash, find_signer, hash_stream
from graphkiln_backend.repository.signing_keys import TrustedKeys, key_files, short
from graphkiln_backend.repository.stores import StoredModel, scan_stores
from graphkiln_backend.repository.version_folders import is_version
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.rollout import AdmissionStopped, Keeper
from graphkiln_backend.system.owned_folder import OwnedFolder, remove_dead

# A copy of one store that holds nothing but what trusted keys have signed.
#
# A file is hashed while it is copied, so that what is served later is what was checked: nobody can exchange it between
# the check and its loading, nor before a restart. A version that is not signed, or not as it was signed, does not get
# into the copy; where its older files did, they stay.

_OWN, _SHARED = "own", "shared"


@dataclass(frozen=True, slots=True)
class VersionCopy:
    """The copy of a version that is signed.

    Attributes:
        folder: Holds `own`, the version folder, and `shared`, what it shares with the model's other versions.
        stamps: Of its files in the store, and of those that it shares, before they were copied.
        shared: SHA-256 of those that it shares, by path below the model's folder.
    """

    folder: Path
    stamps: tuple[str, str]
    shared: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Taken:
    """What the copy holds of a model.

    Attributes:
        stored: What the store held when it was looked at last.
        versions: The versions that are shown.
        refused: Version number -> why it did not get into the copy.
        shown: The folder that holds them together.
    """

    stored: StoredModel
    versions: Mapping[int, VersionCopy] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)
    shown: Path | None = None

    @property
    def folders(self) -> set[Path]:
        """Where all of that lies."""
        shown = {self.shown} if self.shown else set()
        return shown | {version.folder for version in self.versions.values()}


class AttestedCopy:
    """The copy.

    Args:
        folder: Where it lies; empty.
        trusted: Whose signature counts.

    Attributes:
        store: The folder to serve.
    """

    def __init__(self, folder: Path, trusted: TrustedKeys) -> None:
        self.store = folder / "store"
        self._contents = folder / "contents"
        self._refused = Mirror(folder / "refused")
        self._trusted = trusted
        self._taken: dict[str, Taken] = {}
        self._numbers = count()
        for each in (self.store, self._contents):
            each.mkdir()

    def is_known(self, stored: StoredModel) -> bool:
        """Whether a model is as it was when it was looked at last."""
        taken = self._taken.get(stored.name)
        return taken is not None and taken.stored == stored

    def names(self) -> set[str]:
        """The models of which there is anything in the copy, or was refused."""
        return set(self._taken)

    def refused(self) -> Mapping[str, Taken]:
        """The models of which a version was refused, or nothing can be shown."""
        return {name: taken for name, taken in self._taken.items() if taken.refused or not taken.versions}

    def remove(self, name: str) -> None:
        """Shows nothing of a model."""
        taken = self._taken.pop(name)
        (self.store / name).unlink(missing_ok=True)
        self._refused.remove(name)
        _discard(taken.folders)

    def take(self, stored: StoredModel, pass_on: Callable[[], None] = lambda: None) -> None:
        """Takes over what is signed of a model.

        Args:
            stored: The model as it lies in the store.
            pass_on: Called for each MiB; may raise to give up.

        Raises:
            OSError: The copy cannot be written.
        """
        before = self._taken.get(stored.name) or Taken(stored)
        made: set[Path] = set()
        try:
            good, reasons = self._copy_versions(stored, before, made, pass_on)
            versions, refused = _merge(stored, before, good, reasons)
            shown = self._show(stored, versions, refused, before)
        except BaseException:
            _discard(made)
            raise
        after = self._taken[stored.name] = Taken(stored, versions, refused, shown)
        _discard((before.folders | made) - after.folders)
        _tell(stored, before, after, reasons)

    def _copy_versions(
        self, stored: StoredModel, before: Taken, made: set[Path], pass_on: Callable[[], None]
    ) -> tuple[dict[int, VersionCopy], dict[int, str]]:
        """The copies of the versions that are signed with the same shared files, and why the others are not served."""
        good: dict[int, VersionCopy] = {}
        reasons = dict(stored.faults)
        for version in sorted(stored.versions.keys() - stored.faults.keys(), reverse=True):
            stamps = stored.versions[version], stored.stamp
            known = before.versions.get(version)
            try:
                copy = known if known and known.stamps == stamps else self._copy(stored, version, made, pass_on)
                if any(copy.shared != newer.shared for newer in good.values()):
                    raise RepositoryError("a newer version was signed with another config.pbtxt", hint=HOW_TO_SIGN)
                good[version] = copy
            except (GraphkilnError, NotRead) as error:
                reasons[version] = str(error)
        return good, reasons

    def _copy(self, stored: StoredModel, version: int, made: set[Path], pass_on: Callable[[], None]) -> VersionCopy:
        """The copy of a version and of what it shares.

        Raises:
            RepositoryError: It is not signed, or not as it was signed.
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
            check_hash(name, _copy_file(stored.folder / name, target, pass_on), sha256)
            if not target.is_relative_to(folder / _OWN):
                shared[name] = sha256
        who = self._trusted.names[key_id]
        _log.info("%s version %d is signed by %s (%s)", stored.name, version, who, short(key_id))
        return VersionCopy(folder, (stored.versions[version], stored.stamp), shared)

    def _show(
        self, stored: StoredModel, versions: Mapping[int, VersionCopy], refused: Mapping[int, str], before: Taken
    ) -> Path | None:
        """Shows versions beside the files that they share; returns the folder that holds them."""
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
        """Has the store show a folder, in one step."""
        new = self._contents / f"{name}.next"
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(self.store / name)

    def _new_folder(self) -> Path:
        folder = self._contents / str(next(self._numbers))
        folder.mkdir()
        return folder


class NotRead(Exception):
    """A file of the store cannot be read, unlike one of the copy that cannot be written."""


def _merge(
    stored: StoredModel, before: Taken, good: dict[int, VersionCopy], reasons: dict[int, str]
) -> tuple[dict[int, VersionCopy], dict[int, str]]:
    """What is shown from now on, and what is refused: earlier copies stay where what they share does.

    A version that was shown and is no more has gone, rather than failed: it must not keep what serves from changing.
    """
    kept = {number: before.versions[number] for number in reasons if number in before.versions}
    if good:
        shared = next(iter(good.values())).shared
        kept = {number: copy for number, copy in kept.items() if copy.shared == shared}
    elif stored.versions:
        kept = dict(before.versions)
    versions = dict(sorted({**kept, **good}.items()))
    return versions, {number: why for number, why in reasons.items() if number not in {*versions, *before.versions}}


def _tell(stored: StoredModel, before: Taken, after: Taken, reasons: dict[int, str]) -> None:
    """Says what became of versions that were served before; of those that are refused, whoever serves them says so."""
    for version, reason in sorted(reasons.items()):
        if version in before.versions:
            stays = version in after.versions
            outcome = "what was checked before serves on" if stays else "it is no longer served"
            _log.error("%s version %d: %s; %s", stored.name, version, reason, outcome)


def _discard(folders: set[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_file(source: Path, target: Path, pass_on: Callable[[], None]) -> str:
    """Copies a file; returns the SHA-256 of what was written.

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
            pass_on()

        return hash_stream(file, write)


_log = logging.getLogger("graphkiln.server")

_FOLDER = "attested"
_SOON_S = 1.0


@dataclass(slots=True)
class AttestedStore:
    """A store and its copy.

    Args:
        source: The store.
        copy: The copy.
    """

    source: Path
    copy: AttestedCopy
    _seen: dict[str, StoredModel] = field(default_factory=dict)
    _gone: frozenset[str] = frozenset()
    _trouble: str = ""

    def begin(self) -> None:
        """Copies what is there at the start.

        Raises:
            OSError: The store cannot be listed, or the copy cannot be written.
        """
        self._seen = scan_stores([self.source])
        for stored in self._seen.values():
            self.copy.take(stored)

    def follow(self, stopped: Callable[[], bool]) -> bool:
        """Takes over what changed and then stayed the same for two looks; trouble is said once.

        Args:
            stopped: Whether to give up.

        Returns:
            Whether something still changes there.

        Raises:
            AdmissionStopped: `stopped` said so.
        """
        try:
            return self._follow(stopped)
        except OSError as error:
            if str(error) != self._trouble:
                _log.warning("%s cannot be copied, what is served stays: %s", self.source, error)
            self._trouble = str(error)
            return False

    def _follow(self, stopped: Callable[[], bool]) -> bool:
        before, self._seen = self._seen, scan_stores([self.source])
        present = {name: stored for name, stored in self._seen.items() if stored.versions or stored.unreadable}
        missing = frozenset(self.copy.names() - present.keys() - self._refused_as_wholes())
        for name in missing & self._gone:  # seen twice: what is replaced by renaming is missing for a moment
            self.copy.remove(name)
        self._gone = missing - self._gone
        changed = [stored for stored in present.values() if not (stored.unreadable or self.copy.is_known(stored))]
        settled = [stored for stored in changed if before.get(stored.name) == stored]
        for stored in settled:
            self.copy.take(stored, lambda: _give_up_if(stopped()))
        self._trouble = ""
        return bool(self._gone or len(settled) < len(changed))

    def _refused_as_wholes(self) -> set[str]:
        """The models that have had no version from the start: they are not there, but have not gone either."""
        return {name for name in self._seen if self.copy.is_known(self._seen[name])}


@dataclass(frozen=True, slots=True)
class AttestedStores:
    """All stores of a server; without any, everything is served as it is.

    Attributes:
        stores: Each of them.
        every_s: Seconds between two looks at them.
    """

    stores: Sequence[AttestedStore] = ()
    every_s: float = 15.0

    def mark(self, found: dict[str, StoredModel]) -> dict[str, StoredModel]:
        """What lies in the copies, with what was refused as faults."""
        refused = {name: taken for store in self.stores for name, taken in store.copy.refused().items()}
        return {name: _mark(stored, refused[name]) if name in refused else stored for name, stored in found.items()}

    def follow(self, keeper: Keeper, stopped: Callable[[], bool]) -> Keeper:
        """A keeper that brings the copies up to date before it looks at them."""
        return AttestingKeeper(keeper, self, stopped) if self.stores else keeper


@dataclass(slots=True)
class AttestingKeeper:
    """Does what another keeper does, after the copies were brought up to date.

    Args:
        keeper: The other.
        attested: The stores.
        stopped: Whether the server stops.
    """

    keeper: Keeper
    attested: AttestedStores
    stopped: Callable[[], bool]
    _next: float = field(default=0.0)

    @property
    def ticks(self) -> bool:
        """Whether the other does."""
        return self.keeper.ticks

    def is_settled(self) -> bool:
        """See the other."""
        return self.keeper.is_settled()

    def settle(self) -> None:
        """See the other."""
        self.keeper.settle()

    def tick(self) -> float | None:
        """Follows the stores when it is time, then does what the other does.

        Raises:
            OSError: See the other.
            AdmissionStopped: The server stops.
        """
        if self.ticks and time.monotonic() >= self._next:
            changing = [store.follow(self.stopped) for store in self.attested.stores]
            pause = min(_SOON_S, self.attested.every_s) if any(changing) else self.attested.every_s
            self._next = time.monotonic() + pause
        wait = self.keeper.tick()
        return None if wait is None else max(0.0, min(wait, self._next - time.monotonic()))


def read_trusted(place: Path | None) -> TrustedKeys | None:
    """The keys that an option names; None where it names none.

    Raises:
        ServerSetupError: They cannot be read.
    """
    if place is None:
        return None
    try:
        trusted = TrustedKeys.read(place)
        _warn_if_others_choose(key_files(place))
    except GraphkilnError as error:
        raise ServerSetupError(f"--trusted-keys: {error.message}", hint=error.hint) from error
    return trusted


def _warn_if_others_choose(files: Sequence[Path]) -> None:
    """Warns where others can write the trusted keys. What is read-only here, such as a pod's ConfigMap, is safe."""
    for file in files:
        if not os.statvfs(file).f_flag & os.ST_RDONLY and (reason := find_distrust(file)):
            _log.warning("--trusted-keys: %s: who can do that decides what is served", reason)


@contextmanager
def attested_stores(
    stores: Sequence[Path], trusted: TrustedKeys | None, cache: CacheSettings, every_s: float
) -> Iterator[tuple[list[Path], AttestedStores]]:
    """The folders to serve in place of stores: copies of what is signed; without keys, the stores themselves.

    Args:
        stores: Folders of models.
        trusted: Whose signature counts; None for no check.
        cache: The artifact cache, beside which the copies lie; where there is none, among temporary files.
        every_s: Seconds between two looks at the stores.

    Raises:
        ServerSetupError: A store cannot be listed, or copied.
    """
    if trusted is None:
        yield list(stores), AttestedStores()
        return
    with OwnedFolder(_copies_folder(cache)) as temporary:
        opened = []
        for index, source in enumerate(stores):
            folder = temporary.path / str(index)
            try:
                folder.mkdir()
                opened.append(store := AttestedStore(source, AttestedCopy(folder, trusted)))
                store.begin()
            except OSError as error:
                hint = "--cache DIR names a folder with room for all models"
                raise ServerSetupError(f"{source} cannot be copied to {folder}: {error}", hint=hint) from error
        yield [store.copy.store for store in opened], AttestedStores(opened, every_s)


def _copies_folder(cache: CacheSettings) -> Path | None:
    """Where copies lie as long as a server runs; those of dead servers are removed."""
    folder = cache.folder / _FOLDER if cache.folder else None
    if folder is None or find_distrust(folder):
        return None
    try:
        make_private(folder)
    except OSError:  # a read-only cache
        return None
    remove_dead(folder)
    return folder


def _mark(stored: StoredModel, taken: Taken) -> StoredModel:
    if not taken.stored.versions:
        return replace(stored, versions={}, problem=taken.stored.problem)
    stamps: Mapping[int, str] = {version: taken.stored.versions.get(version, "") for version in taken.refused}
    kept = {version: stamp for version, stamp in stored.versions.items() if version in taken.versions}
    versions = dict(sorted({**kept, **{version: f"refused {stamp}" for version, stamp in stamps.items()}}.items()))
    return replace(stored, versions=versions, faults={**stored.faults, **taken.refused})


def _give_up_if(stopped: bool) -> None:
    if stopped:
        raise AdmissionStopped
