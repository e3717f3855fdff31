"""Local copies of stores, which are served instead of the stores and updated while the server runs.

Copied are remote stores (`s3://BUCKET/PATH`), and with `--trusted-keys` all stores, restricted to signed versions.
Copies are made before the server starts, and updated every `--repository-poll-secs` in poll and explicit mode. If a
store cannot be read, its copy stays.

Copies of remote stores are kept in the artifact cache's folder: the next start downloads changes only, and works
without network. Copies of signed versions are made at each start, because only this server has verified them: files are
hashed while they are copied, so that exactly the verified bytes are served, also after a restart. A version that is
unsigned, or differs from what was signed, is not copied; an earlier copy of it stays.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.cache.trust import find_distrust, make_private
from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError, ServerSetupError
from graphkiln_backend.graph.files import open_regular
from graphkiln_backend.repository.remote_copy import Changes, RemoteCopy
from graphkiln_backend.repository.remote_model import is_model
from graphkiln_backend.repository.signing import check_hash, find_signer, hash_stream
from graphkiln_backend.repository.signing_keys import HOW_TO_SIGN, TrustedKeys, key_files
from graphkiln_backend.repository.stores import StoredModel, scan_stores
from graphkiln_backend.repository.version_folders import is_version
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFiles
from graphkiln_backend.system.locks import locked
from graphkiln_backend.system.owned_folder import OwnedFolder, remove_dead
from graphkiln_backend.system.signals import ServerStopping

_log = logging.getLogger("graphkiln.server")

_POLL_S = 0.1
_SOON_S = 1.0  # before the next look at a store that is still changing
_UNUSED_S = 30 * 24 * 3600.0  # copies of remote stores unused for longer are removed
_SLOTS = 64  # maximum copies of one remote store, one for each running server of the user


@contextmanager
def copied_stores(
    folders: Sequence[Path],
    addresses: Sequence[RemoteAddress],
    trusted: TrustedKeys | None,
    cache: CacheSettings,
    every_s: float,
) -> Iterator[tuple[list[Path], StoreCopies]]:
    """Copy remote stores, and with trusted keys all stores.

    Args:
        folders: Local stores.
        addresses: Remote stores.
        trusted: Keys whose signatures are accepted; None for no check.
        cache: The artifact cache, whose folder holds the copies; without a folder they are temporary.
        every_s: Seconds between updates.

    Yields:
        The folders to serve, and the copies among them.

    Raises:
        RemoteStoreError: A remote store cannot be read.
        ServerSetupError: A store cannot be copied.
    """
    with ExitStack() as stack:
        copies: list[StoreCopy] = [*stack.enter_context(open_remote_stores(addresses, cache))]
        for remote in copies:
            _begin(remote)
        stores = [*folders, *(remote.folder for remote in copies)]
        if trusted:
            parent = _private_folder(cache, "attested")
            if parent:
                remove_dead(parent)
            temporary = stack.enter_context(OwnedFolder(parent)).path
            attested = [AttestedStore(source, temporary / str(index), trusted) for index, source in enumerate(stores)]
            for store in attested:
                _begin(store)
            copies += attested
            stores = [store.folder for store in attested]
        yield stores, StoreCopies(copies, every_s)


def _begin(store: StoreCopy) -> None:
    try:
        store.begin()
    except OSError as error:
        raise ServerSetupError(
            f"{store.source} cannot be copied to {store.folder}: {error}",
            hint="--cache DIR names a folder with room for all models",
        ) from error


class StoreCopy(ABC):
    """A store and its copy.

    Attributes:
        source: The store.
        folder: The copy.
    """

    source: Path | RemoteAddress
    folder: Path
    _trouble = ""

    @abstractmethod
    def begin(self) -> None:
        """Make the first copy.

        Raises:
            RemoteStoreError: The store cannot be read.
            OSError: It cannot be listed, or the copy cannot be written.
        """

    @abstractmethod
    def update(self, stopped: Callable[[], bool]) -> bool:
        """Copy changes; return true if the store is still changing.

        Raises:
            ServerStopping: `stopped` was true.
            GraphkilnError, OSError: The store cannot be read, or the copy cannot be written.
        """

    def follow(self, stopped: Callable[[], bool]) -> bool:
        """Copy changes; return true if the store is still changing. Errors are logged once, and when they end."""
        try:
            changing = self.update(stopped)
        except (GraphkilnError, OSError) as error:
            self._report_trouble(f"{self.source} cannot be copied, its models keep serving: {error}")
            return False
        self._report_trouble("")
        return changing

    def refused(self) -> Mapping[str, CopiedModel]:
        """Models with refused versions, or without any version to show."""
        return {}

    def _report_trouble(self, trouble: str) -> None:
        if trouble and not self._trouble:
            _log.warning("%s", trouble)
        elif self._trouble and not trouble:
            _log.info("%s can be read again", self.source)
        self._trouble = trouble


@dataclass(slots=True)
class StoreCopies:
    """All copies of a server, kept across its restarts.

    Attributes:
        copies: In the order of updates: a copy may be made from another one.
        every_s: Seconds between updates.
    """

    copies: Sequence[StoreCopy] = ()
    every_s: float = 15.0
    _due_at: float = 0.0

    @property
    def sources(self) -> dict[Path, str | Path]:
        """Store of each copy, by folder."""
        sources: dict[Path, str | Path] = {}
        for copy in self.copies:  # a copy may be made from another one
            known = copy.source if isinstance(copy.source, Path) else str(copy.source)
            sources[copy.folder] = sources.get(Path(known), known)
        return sources

    def follow(self, stopped: Callable[[], bool]) -> float:
        """Update the copies if it is time.

        Returns:
            Seconds until the next update.

        Raises:
            ServerStopping: `stopped` was true.
        """
        if not self.copies:
            return math.inf
        if time.monotonic() >= self._due_at:
            changing = [copy.follow(stopped) for copy in self.copies]
            pause = min(_SOON_S, self.every_s) if any(changing) else self.every_s
            self._due_at = time.monotonic() + pause
        return max(0.0, self._due_at - time.monotonic())

    def mark(self, found: dict[str, StoredModel]) -> dict[str, StoredModel]:
        """Add refused versions as faults, so that readiness and the list of models report them."""
        refused = {name: model for copy in self.copies for name, model in copy.refused().items()}
        return {name: _mark(stored, refused[name]) if name in refused else stored for name, stored in found.items()}


def _mark(stored: StoredModel, copied: CopiedModel) -> StoredModel:
    source = copied.stored
    if not source.versions:
        return replace(stored, versions={}, problem=source.problem)
    kept = {version: stamp for version, stamp in stored.versions.items() if version in copied.versions}
    refused = {version: f"refused {source.versions.get(version, '')}" for version in copied.refused}
    versions = dict(sorted({**kept, **refused}.items()))
    return replace(stored, versions=versions, faults={**stored.faults, **copied.refused})


def _private_folder(cache: CacheSettings, name: str) -> Path | None:
    """Make a folder for copies beside the artifacts; return None, with a warning, if that is impossible."""
    if cache.folder is None:
        return None
    folder = cache.folder / name
    reason = find_distrust(folder)
    problem = f"{folder} is not trusted, because {reason}" if reason else ""
    try:
        if not problem:
            make_private(folder)
            with OwnedFolder(folder):
                return folder
    except (OSError, ServerSetupError) as error:
        problem = str(error)
    _log.warning("stores are copied to temporary files: %s", problem)
    return None


# Copies of remote stores: one folder for each running server.


class RemoteStore(StoreCopy):
    """A remote store and its copy."""

    def __init__(self, copy: RemoteCopy) -> None:
        self.copy = copy
        self.source = copy.files.address
        self.folder = copy.store

    def begin(self) -> None:
        """Make or update the copy; if the store is unreachable but a copy exists, log a warning."""
        begun = time.monotonic()
        try:
            changes = self.copy.fetch(settled=True)
            self._refuse_model(changes)
            self.copy.take_over(changes)
            for model, version in sorted(changes.waiting):
                _log.warning("%s: %s %s is incomplete or still changing", self.source, model, version)
            if self.copy.is_empty and not changes.waiting:
                _log.warning("%s contains no model: is that the right address?", self.source)
        except RemoteStoreError as error:
            if self.copy.is_empty or not error.passing:
                raise
            self._report_trouble(f"{error}; the previous copy is served")
        except SystemExit:  # by a signal: log the progress for a start that a probe ends again and again
            _log.warning("%s: stopped after %.0f s, before it was copied", self.source, time.monotonic() - begun)
            raise
        size = self.copy.size_bytes() / 1e6
        _log.info("%s is served from its copy in %s, %.1f MB", self.source, self.folder, size)

    def _refuse_model(self, changes: Changes) -> None:
        """Refuse the address of a model or version instead of a store."""
        if is_model(changes.listing):
            above, name = self.copy.files.address.split()
            raise RemoteStoreError(
                f"{self.source} is a model, not a store of models",
                hint=f"to serve it alone: --model-store {above} --model-control-mode=explicit --load-model={name}",
            )

    def update(self, stopped: Callable[[], bool]) -> bool:
        """Copy changes; return true if the store is still changing."""
        changes = _call_until(self.copy.fetch, stopped)
        self.copy.take_over(changes)
        for outcome, units in (("copied", changes.changed), ("removed there", changes.gone)):
            for model, version in sorted(units):
                what = f"version {version}" if version else "configuration"
                _log.info("%s: %s %s: %s", self.source, model, what, outcome)
        return bool(changes.waiting)


def _call_until(call: Callable[[], Changes], stopped: Callable[[], bool]) -> Changes:
    """Wait for a call until the server stops: an unresponsive service must not delay the end."""
    ended: list[Changes | BaseException] = []

    def run() -> None:
        try:
            ended.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            ended.append(error)

    thread = threading.Thread(target=run, name="remote-store", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        if stopped():
            raise ServerStopping
    (outcome,) = ended
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


@contextmanager
def open_remote_stores(addresses: Sequence[RemoteAddress], cache: CacheSettings) -> Iterator[list[RemoteStore]]:
    """Open and lock the copies of remote stores, without updating them.

    Raises:
        ServerSetupError: The folder of a copy cannot be made.
    """
    with ExitStack() as stack:
        parent = _private_folder(cache, "stores") if addresses else None
        if parent:
            remove_unused(parent, time.time())
        yield [
            RemoteStore(RemoteCopy(RemoteFiles(address), stack.enter_context(_remote_folder(parent, address))))
            for address in addresses
        ]


@contextmanager
def _remote_folder(parent: Path | None, address: RemoteAddress) -> Iterator[Path]:
    """Open the folder of a copy that no other process uses."""
    if parent is None:
        with OwnedFolder(prefix="graphkiln-store-") as vanishing:
            yield vanishing.path
        return
    digest = hashlib.sha256(f"{address.scheme} {address.options} {address.root}".encode()).hexdigest()[:16]
    for slot in range(_SLOTS):
        place = parent / (f"{digest}-{slot}" if slot else digest)
        try:
            place.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ServerSetupError(f"cannot make {place}: {error.strerror}", hint="--cache DIR") from error
        with locked(place) as is_ours:
            if is_ours:
                os.utime(place)
                (place / "address").write_text(f"{address}\n", encoding="utf-8")
                yield place
                return
    raise ServerSetupError(f"{_SLOTS} servers serve {address} already", hint="name another folder: --cache DIR")


def remove_unused(parent: Path, now_s: float) -> None:
    """Remove unlocked copies of remote stores that were not used for a month.

    Args:
        parent: Folder of all copies.
        now_s: Seconds since the epoch.
    """
    for place in parent.iterdir():
        with suppress(OSError):
            if place.is_dir() and now_s - place.stat().st_mtime > _UNUSED_S:
                with locked(place) as is_ours:
                    if is_ours:
                        address = (place / "address").read_text("utf-8").strip()
                        _log.info("removing a copy of %s, unused for a month", address)
                        shutil.rmtree(place, ignore_errors=True)


# Copies of signed versions.

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


class AttestedStore(StoreCopy):
    """A store and the copy of its signed versions.

    Args:
        source: The store.
        place: Empty or missing folder for the copy.
        trusted: Keys whose signatures are accepted.
    """

    source: Path

    def __init__(self, source: Path, place: Path, trusted: TrustedKeys) -> None:
        self.source = source
        self.folder = place / "store"
        self._contents = place / "contents"
        self._refused = Mirror(place / "refused")
        self._trusted = trusted
        self._taken: dict[str, CopiedModel] = {}
        self._numbers = count()
        self._seen: dict[str, StoredModel] = {}
        self._gone: frozenset[str] = frozenset()
        for each in (self.folder, self._contents):
            each.mkdir()

    def begin(self) -> None:
        """Copy the signed versions."""
        self._seen = scan_stores([self.source])
        for stored in self._seen.values():
            self.take(stored)

    def update(self, stopped: Callable[[], bool]) -> bool:
        """Copy changes that two scans confirm; return true if the store is still changing."""

        def give_up() -> None:
            if stopped():
                raise ServerStopping

        before, self._seen = self._seen, scan_stores([self.source])
        present = {name: stored for name, stored in self._seen.items() if stored.versions or stored.unreadable}
        # A model without versions is not present, but not removed either.
        known = {name for name, taken in self._taken.items() if taken.stored == self._seen.get(name)}
        missing = frozenset(self._taken.keys() - present.keys() - known)
        for name in missing & self._gone:  # missing in two scans: a folder replaced by renaming is missing for a moment
            self._remove(name)
        self._gone = missing - self._gone
        changed = [stored for name, stored in present.items() if not stored.unreadable and name not in known]
        settled = [stored for stored in changed if before.get(stored.name) == stored]
        for stored in settled:
            self.take(stored, give_up)
        return bool(self._gone or len(settled) < len(changed))

    def refused(self) -> Mapping[str, CopiedModel]:
        """Models with refused versions, or without any version to show."""
        return {name: taken for name, taken in self._taken.items() if taken.refused or not taken.versions}

    def _remove(self, name: str) -> None:
        taken = self._taken.pop(name)
        (self.folder / name).unlink(missing_ok=True)
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
            except (GraphkilnError, _NotReadError) as error:
                reasons[version] = str(error)
        return good, reasons

    def _copy(self, stored: StoredModel, version: int, made: set[Path], on_chunk: Callable[[], None]) -> VersionCopy:
        """Copy a version and its shared files.

        Raises:
            RepositoryError: It is unsigned, or differs from what was signed.
            _NotReadError: A file cannot be read.
        """
        try:
            statement = find_signer(stored.folder, version, self._trusted)
        except OSError as error:
            raise _NotReadError(f"its signature cannot be read: {error}") from error
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
        _log.info("%s version %d is signed %s", stored.name, version, statement.signer)
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
        new.replace(self.folder / name)

    def _new_folder(self) -> Path:
        folder = self._contents / str(next(self._numbers))
        folder.mkdir()
        return folder


class _NotReadError(Exception):
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
        _NotReadError: The source cannot be read.
        OSError: The target cannot be written.
    """
    try:
        file = open_regular(source)
    except OSError as error:
        raise _NotReadError(f"{source} cannot be read: {error.strerror or error}") from error
    with file, target.open("wb") as copy:

        def write(chunk: bytes) -> None:
            copy.write(chunk)
            on_chunk()

        return hash_stream(file, write)


def read_trusted(place: Path | None) -> TrustedKeys | None:
    """Read the keys of `--trusted-keys`; warn if other users can write them.

    Raises:
        ServerSetupError: They cannot be read.
    """
    if place is None:
        return None
    try:
        trusted, files = TrustedKeys.read(place), key_files(place)
    except GraphkilnError as error:
        raise ServerSetupError(f"--trusted-keys: {error.message}", hint=error.hint) from error
    for file in files:  # read-only mounts, such as a pod's ConfigMap, are safe
        if not os.statvfs(file).f_flag & os.ST_RDONLY and (reason := find_distrust(file)):
            _log.warning("--trusted-keys: %s: other users could change the trusted keys", reason)
    return trusted
