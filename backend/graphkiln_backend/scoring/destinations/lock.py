"""The lock that keeps other drivers away from a destination while a run plans, replaces and finishes there.

It is one object, `_claim.json`, made by exclusive creation and renewed from a thread. It is free again when it was
released, when its process is seen to be gone on this machine, or when it was not renewed for `LOCK_S` seconds by the
store's own clock: the clocks of two machines are never compared. Results do not depend on it: a commit is exclusive by
itself, so that two drivers who both took an expired lock at one moment lose no row and double none.
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

LOCK_S = 60.0  # how long a lock is believed without being renewed
NAME = "_claim.json"
_RENEW_S = LOCK_S / 4
_SETTLE_S = 1.0  # how long two drivers that found the same expired lock may take to delete and create
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
        """True if the process is seen to have ended; False where this machine could not see it."""
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
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise where the lock is lost; to be called before anything that no other run may do at the same time.

        Raises:
            LockLost: Another run has taken it.
            StoreError: It could not be renewed for so long that it has expired.
        """
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """Release the lock, so that the next run need not wait. Where that fails it expires by itself."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        try:
            if self._store.read(NAME) == self._content:
                self._store.delete(NAME)
        except StoreError as error:
            _log.warning("the lock of the destination could not be released; it expires by itself: %s", error)

    def _acquire(self) -> None:
        content = memoryview(self._content)
        if self._store.create(NAME, content):
            return
        if self._store.read(NAME) is not None:
            if not self._is_free():
                self._refuse()
            self._store.delete(NAME)
        created = self._store.create(NAME, content)
        if created:  # another driver may have found the same expired lock, and deleted ours after that
            time.sleep(_SETTLE_S)
        if not created or self._store.read(NAME) != self._content:
            self._refuse()

    def _is_free(self) -> bool:
        """True if the lock that is there has no living holder."""
        holder, age_s = _holder(self._store.read(NAME)), self._store.age_s(NAME)
        return age_s is None or age_s >= LOCK_S or (holder is not None and holder.is_gone)

    def _refuse(self) -> None:
        holder, age_s = _holder(self._store.read(NAME)), self._store.age_s(NAME) or 0.0
        rest = f"it expires in {max(LOCK_S - age_s, 1):.0f} s"
        if holder is None:
            raise DestinationBusy(
                f"{self._store.place(NAME)} says who writes there, but is damaged or has just gone",
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
                if time.monotonic() - self._renewed >= LOCK_S:
                    self._failure = error
                    return
                _log.warning("the lock of the destination could not be renewed yet: %s", error)
            except BaseException as error:  # noqa: BLE001 - raised by `check`
                self._failure = error
                return

    def _renew(self) -> None:
        content = self._store.read(NAME)
        if content != self._content:
            name = _holder(content) or "another run"
            raise LockLost(
                f"the lock of this run was not renewed for {LOCK_S:.0f} s, and {name} took it",
                hint="what was committed counts; let the other run finish, or run the same command after it",
            )
        self._store.replace(NAME, memoryview(self._content))
        self._renewed = time.monotonic()


def _holder(content: bytes | None) -> Holder | None:
    """The holder that a lock names; None where the lock is gone or damaged."""
    try:
        return Holder(**json.loads(content or b"")["holder"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _machine() -> str:
    return f"{_BOOT_ID.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> int | None:
    """Ticks between the boot and a process's start; None where there is none. Source: proc(5), `starttime`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])
