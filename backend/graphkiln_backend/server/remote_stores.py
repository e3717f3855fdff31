"""Remote model stores: where their local copies lie, and how they follow while the server runs.

A server that is asked for `s3://BUCKET/PATH` serves a copy, which lies in the artifact cache's folder and lasts: the
next start fetches only what changed, and can serve without the network. In poll mode, and in the user's explicit mode,
the copies follow every `--repository-poll-secs`. A store that cannot be read takes nothing away.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.cache.trust import find_distrust, make_private
from graphkiln_backend.graph.errors import GraphkilnError, ServerSetupError
from graphkiln_backend.repository.remote_copy import Changes, RemoteCopy
from graphkiln_backend.repository.remote_model import is_model
from graphkiln_backend.server.rollout import AdmissionStopped, Keeper
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFiles
from graphkiln_backend.system.owned_folder import OwnedFolder

# Where the local copies of remote stores lie: beside the artifacts, one for each process that serves a store.

_FOLDER = "stores"
_UNUSED_S = 30 * 24 * 3600.0  # A copy that no server has used for so long is removed
_SLOTS = 64  # servers of one user that serve the same store at once: each has a copy of its own


def copies_folder(cache: CacheSettings) -> Path | None:
    """Where copies last; None where they cannot."""
    if cache.folder is None:
        return None
    folder = cache.folder / _FOLDER
    if reason := find_distrust(folder):
        _log.warning("remote stores are copied anew at each start: %s is not trusted, because %s", folder, reason)
        return None
    try:
        make_private(folder)
        with OwnedFolder(folder):
            return folder
    except (OSError, ServerSetupError) as error:
        _log.warning("remote stores are copied anew at each start: %s", error)
        return None


@contextmanager
def copy_folder(folder: Path | None, address: RemoteAddress) -> Iterator[Path]:
    """A folder for one copy that no other process uses."""
    if folder is None:
        with OwnedFolder(prefix="graphkiln-store-") as vanishing:
            yield vanishing.path
        return
    digest = hashlib.sha256(f"{address.scheme} {address.options} {address.root}".encode()).hexdigest()[:16]
    for slot in range(_SLOTS):
        place = folder / (f"{digest}-{slot}" if slot else digest)
        with _locked(place) as is_ours:
            if is_ours:
                (place / "address").write_text(f"{address}\n", encoding="utf-8")
                yield place
                return
    raise ServerSetupError(f"{_SLOTS} servers serve {address} already", hint="name another folder: --cache DIR")


@contextmanager
def _locked(place: Path) -> Iterator[bool]:
    """Makes a folder and locks it; gives whether nobody else holds it."""
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ServerSetupError(f"{place} cannot be made: {error.strerror}", hint="--cache DIR") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            raise
        yield False
    else:
        os.utime(place)
        yield True
    finally:
        os.close(descriptor)


def remove_unused(folder: Path, now_s: float) -> None:
    """Removes copies that nobody has used for a month, as far as no process holds them.

    Args:
        folder: Where all copies lie.
        now_s: Seconds of the epoch.
    """
    for place in folder.iterdir():
        with suppress(OSError):
            is_old = place.is_dir() and now_s - place.stat().st_mtime > _UNUSED_S
            if is_old and _nobody_holds(place):
                _log.info("removing a copy of %s, unused for a month", (place / "address").read_text("utf-8").strip())
                shutil.rmtree(place, ignore_errors=True)


def _nobody_holds(place: Path) -> bool:
    with _locked(place) as is_ours:
        return is_ours


_log = logging.getLogger("graphkiln.server")

_LOOK_S = 0.1
_SOON_S = 1.0


@dataclass(slots=True)
class RemoteStore:
    """A remote store and its copy.

    Args:
        copy: The copy.
    """

    copy: RemoteCopy
    _trouble: str = ""

    def begin(self) -> None:
        """Copies what is there at the start.

        Raises:
            RemoteStoreError: It cannot be read; where it is only out of reach and was copied before, that is a warning.
            OSError: The copy cannot be written.
        """
        begun = time.monotonic()
        try:
            changes = self.copy.fetch(settled=True)
            _check_store(self.copy.files.address, changes)
            self.copy.take_over(changes)
            for model, version in sorted(changes.waiting):
                _log.warning("%s: %s %s is not whole or still changes there", self.copy.files.address, model, version)
            if self.copy.is_empty and not changes.waiting:
                _log.warning("%s holds no model: is that the right address?", self.copy.files.address)
        except RemoteStoreError as error:
            if self.copy.is_empty or not error.passing:
                raise
            self._say(f"{error}; what was copied before is served")
        except SystemExit:  # of a signal; what a probe ends again and again must have its reason in the log
            seconds, address = time.monotonic() - begun, self.copy.files.address
            _log.warning("%s: stopped after %.0f s, before it was copied", address, seconds)
            raise
        size = self.copy.size_bytes() / 1e6
        _log.info("%s is served from its copy in %s, %.1f MB", self.copy.files.address, self.copy.store, size)

    def follow(self, stopped: Callable[[], bool]) -> bool:
        """Takes over what changed; trouble is said once, and once more when it is over.

        Args:
            stopped: Whether to give up, although the network is waited for.

        Returns:
            Whether something still changes there.

        Raises:
            AdmissionStopped: `stopped` said so.
        """
        try:
            changes = call_until(self.copy.fetch, stopped)
            self.copy.take_over(changes)
        except (GraphkilnError, OSError) as error:
            self._say(f"{error}; what is served stays")
            return False
        self._say("")
        self._report(changes)
        return bool(changes.waiting)

    def _say(self, trouble: str) -> None:
        if trouble and not self._trouble:
            _log.warning("%s", trouble)
        elif self._trouble and not trouble:
            _log.info("%s can be read again", self.copy.files.address)
        self._trouble = trouble

    def _report(self, changes: Changes) -> None:
        for words, units in (("copied", changes.changed), ("removed there", changes.gone)):
            for model, version in sorted(units):
                what = f"version {version}" if version else "configuration"
                _log.info("%s: %s %s: %s", self.copy.files.address, model, what, words)


@dataclass(frozen=True, slots=True)
class RemoteStores:
    """The remote stores of a server.

    Attributes:
        stores: Each of them.
        every_s: Seconds between two looks at them.
    """

    stores: Sequence[RemoteStore] = ()
    every_s: float = 15.0

    def follow(self, keeper: Keeper, stopped: Callable[[], bool]) -> Keeper:
        """A keeper that brings the copies up to date before it looks at them."""
        return FollowingKeeper(keeper, self, stopped) if self.stores else keeper


@dataclass(slots=True)
class FollowingKeeper:
    """Does what another keeper does, after the copies were brought up to date.

    Args:
        keeper: The other.
        remote: The stores.
        stopped: Whether the server stops.
    """

    keeper: Keeper
    remote: RemoteStores
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
        """Follows the remote stores when it is time, then does what the other does.

        Raises:
            OSError: See the other.
            AdmissionStopped: The server stops.
        """
        if self.ticks and time.monotonic() >= self._next:
            waiting = [store.follow(self.stopped) for store in self.remote.stores]
            self._next = time.monotonic() + (min(_SOON_S, self.remote.every_s) if any(waiting) else self.remote.every_s)
        pause = self.keeper.tick()
        return None if pause is None else min(pause, max(_LOOK_S, self._next - time.monotonic()))


def call_until(call: Callable[[], Changes], stopped: Callable[[], bool]) -> Changes:
    """Waits for a call, but not longer than the server runs: what a service does not answer must not delay its end.

    Raises:
        AdmissionStopped: `stopped` said so; the call goes on by itself, and what it brings is for nobody.
        Exception: What the call raised.
    """
    ended: list[Changes | BaseException] = []

    def run() -> None:
        try:
            ended.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            ended.append(error)

    thread = threading.Thread(target=run, name="remote-store", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        if stopped():
            raise AdmissionStopped
    (outcome,) = ended
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


@contextmanager
def copy_stores(
    addresses: Sequence[RemoteAddress], cache: CacheSettings, every_s: float
) -> Iterator[tuple[list[Path], RemoteStores]]:
    """The folders to serve in place of remote stores, which are copied first.

    Args:
        addresses: The stores.
        cache: The artifact cache, beside which copies lie.
        every_s: Seconds between two looks at remote stores.

    Raises:
        RemoteStoreError: A remote store cannot be read.
        ServerSetupError: It cannot be copied.
    """
    with open_remote_stores(addresses, cache) as remote:
        for store in remote:
            try:
                store.begin()
            except OSError as error:
                raise ServerSetupError(f"{store.copy.files.address} cannot be copied: {error}") from error
        yield [store.copy.store for store in remote], RemoteStores(remote, every_s)


@contextmanager
def open_remote_stores(addresses: Sequence[RemoteAddress], cache: CacheSettings) -> Iterator[list[RemoteStore]]:
    """Copies of remote stores, locked for this process; not yet brought up to date.

    Args:
        addresses: The stores.
        cache: The artifact cache, beside which copies lie; where there is none, they vanish with the server.

    Raises:
        ServerSetupError: No folder for a copy can be made.
    """
    with ExitStack() as stack:
        folder = copies_folder(cache) if addresses else None
        if folder:
            remove_unused(folder, time.time())
        yield [
            RemoteStore(RemoteCopy(RemoteFiles(address), stack.enter_context(copy_folder(folder, address))))
            for address in addresses
        ]


def _check_store(address: RemoteAddress, changes: Changes) -> None:
    """Tells a model, or its version, from a store.

    Raises:
        RemoteStoreError: It is none.
    """
    if is_model(changes.listing):
        above, name = address.split()
        raise RemoteStoreError(
            f"{address} is a model, not a store of models",
            hint=f"to serve it alone: --model-store {above} --model-control-mode=explicit --load-model={name}",
        )
