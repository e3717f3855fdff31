"""The stores of a server that serves nothing but what trusted keys have signed, and how they follow while it runs.

Triton and everything that decides what it sees are given the copies (`server.attested_copy`), in every control mode and
for models of every backend. What was refused is put beside what the copies hold, so that readiness and the list of
models name it with the reason.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.cache.trust import find_distrust, make_private
from graphkiln_backend.graph.errors import GraphkilnError, ServerSetupError
from graphkiln_backend.repository.signing_keys import TrustedKeys, key_files
from graphkiln_backend.repository.stores import StoredModel, scan_stores
from graphkiln_backend.server.attested_copy import AttestedCopy, Taken
from graphkiln_backend.server.rollout import AdmissionStopped, Keeper
from graphkiln_backend.system.owned_folder import OwnedFolder, remove_dead

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
