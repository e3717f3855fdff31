"""Lock of a destination: one driver at a time plans, replaces and finishes there.

The lock is one object, `_claim.json`, created exclusively and renewed by a thread. It is free after its release, if its
process on this machine is dead, or if it was not renewed for `LOCK_S` seconds by the clock of the store: clocks of two
machines are never compared. Results do not depend on it, because each commit is exclusive: two drivers that take an
expired lock simultaneously lose no row and duplicate none.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from graphkiln_backend.scoring.destinations.store import Notes
from graphkiln_backend.scoring.errors import DestinationBusy, LockLost, StoreError
from graphkiln_backend.system.closing import Closeable

LOCK_S = 60.0  # until a lock that is not renewed expires
NAME = "_claim.json"
_RENEW_S = LOCK_S / 4
_SETTLE_S = 1.0  # time in which two drivers that found the same expired lock delete and create it
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_log = logging.getLogger("graphkiln.scoring")


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host: Name of its machine, for messages.
        machine: Boot of a kernel and namespace of processes, within which `pid` is unique.
        started: Start time in ticks since the boot: process ids are used again.
    """

    run_id: str
    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls, run_id: str) -> Holder:
        """Describe this process."""
        pid = os.getpid()
        started = _started(pid) or 0
        return cls(run_id=run_id, host=socket.gethostname(), machine=_machine(), pid=pid, started=started)

    @property
    def is_gone(self) -> bool:
        """True if the process ended; False if it is not a process of this machine."""
        return self.machine == _machine() and _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"run {self.run_id} (process {self.pid} on {self.host})"


class Lock(Closeable):
    """A lock that this process holds, renewed from a thread until it is released.

    Raises:
        DestinationBusy: Another run holds it.
        StoreError: The store fails.
    """

    def __init__(self, store: Notes, run_id: str) -> None:
        self._store = store
        document = {"holder": asdict(Holder.of_this_process(run_id)), "nonce": uuid.uuid4().hex, "released": False}
        self._content = json.dumps(document).encode()
        self._acquire()
        self._renewed = time.monotonic()
        self._renewing = threading.Lock()
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that the lock is held; call it before each step that must not run twice at the same time.

        A lock that has expired, because this process was suspended or the store hangs, is renewed first.

        Raises:
            LockLost: Another run has taken it.
            StoreError: It could not be renewed for so long that it has expired.
        """
        if self._failure:
            raise self._failure
        if self._has_expired:
            self._renew()

    def close(self) -> None:
        """Release the lock. If that fails, it expires."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        try:
            if self._store.read(NAME) == self._content:
                self._store.delete(NAME)
        except StoreError as error:
            _log.warning("the lock of the destination could not be released and expires by itself: %s", error)

    @property
    def _has_expired(self) -> bool:
        return time.monotonic() - self._renewed >= LOCK_S

    def _acquire(self) -> None:
        content = memoryview(self._content)
        if self._store.create(NAME, content):
            return
        if self._store.read(NAME) is not None:
            self._refuse_or_delete()
        created = self._store.create(NAME, content)
        if created:  # another driver may have found the same expired lock, and deleted ours after that
            time.sleep(_SETTLE_S)
        if not created or self._store.read(NAME) != self._content:
            self._refuse()

    def _refuse_or_delete(self) -> None:
        """Delete a lock whose holder is dead or does not renew it."""
        holder, age_s = _holder(self._store.read(NAME)), self._store.age_s(NAME)
        if age_s is None or age_s >= LOCK_S or (holder is not None and holder.is_gone):
            self._store.delete(NAME)
            return
        self._refuse()

    def _refuse(self) -> None:
        holder, age_s = _holder(self._store.read(NAME)), self._store.age_s(NAME) or 0.0
        rest = f"it expires in {max(LOCK_S - age_s, 1):.0f} s"
        if holder is None:
            raise DestinationBusy(
                f"{self._store.place(NAME)} names the run that writes there, but is damaged or was just deleted",
                hint=f"if no run writes there, {rest}, or delete it",
            )
        raise DestinationBusy(
            f"{self._store.place('')} is being written by {holder}", hint=f"let it finish; if it is dead, {rest}"
        )

    def _renew_until_released(self) -> None:
        while not self._over.wait(_RENEW_S):
            try:
                self._renew()
            except StoreError as error:
                if self._has_expired:
                    self._failure = error
                    return
                _log.warning("the lock of the destination could not be renewed yet: %s", error)
            except BaseException as error:  # noqa: BLE001 - raised by `check`
                self._failure = error
                return

    def _renew(self) -> None:
        with self._renewing:
            self._check_holder()
            begun = time.monotonic()
            self._store.replace(NAME, memoryview(self._content))
            if self._has_expired:  # another run may be taking it, and checks that after a while, as this one does
                if time.monotonic() - begun >= _SETTLE_S:  # the write may have replaced the lock of that run
                    raise self._lost("another run may have taken it")
                time.sleep(_SETTLE_S)
                self._check_holder()
            self._renewed = begun

    def _check_holder(self) -> None:
        content = self._store.read(NAME)
        if content != self._content:
            raise self._lost(f"{_holder(content) or 'another run'} took it")

    def _lost(self, reason: str) -> LockLost:
        lost = LockLost(
            f"the lock of this run was not renewed for {LOCK_S:.0f} s, and {reason}",
            hint="what was committed counts; let the other run finish, or run the same command after it",
        )
        self._failure = lost  # for good
        return lost


def _holder(content: bytes | None) -> Holder | None:
    """Read the holder of a lock; None if the lock is deleted or damaged."""
    try:
        return Holder(**json.loads(content or b"")["holder"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _machine() -> str:
    return f"{_BOOT_ID.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> int | None:
    """Ticks from the boot to the start of a process; None if there is no such process. Source: proc(5), `starttime`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])
