"""The claim of the run that is writing, made of nothing but exclusive creation.

Claims are numbered, and the one with the highest number counts. A claim is taken over by creating the next number,
which one of several succeeds in; the highest is never deleted, so that nobody can begin the count anew. It is over when
it was released, when its process is seen to be gone on this machine, or when the store's own clock says that it was not
renewed for `LEASE_S` seconds: the clocks of two machines are never compared. A damaged claim is over by that clock;
who holds it writes it again before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from graphkiln_backend.scoring.destinations.store import Store
from graphkiln_backend.scoring.errors import ClaimLost, DestinationBusy, StoreError

# Which process holds a claim, told so that others can see whether it still lives.

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process.

    Attributes:
        run_id: What its run is called.
        host: Name of its machine, for people.
        machine: Where its number means what it says: the boot of a kernel and a namespace of processes.
        pid: Its number.
        started: When it started, in ticks since the boot: numbers are used again.
    """

    run_id: str
    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls, run_id: str) -> Holder:
        """This one."""
        pid = os.getpid()
        started = _started(pid) or 0
        return cls(run_id=run_id, host=socket.gethostname(), machine=_machine(), pid=pid, started=started)

    def __str__(self) -> str:
        return f"run {self.run_id} (process {self.pid} on {self.host})"


def is_gone(holder: Holder) -> bool:
    """Whether a process is seen to have ended; False where this process could not see it."""
    return holder.machine == _machine() and _started(holder.pid) != holder.started


def _machine() -> str:
    return f"{_BOOT_ID.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> int | None:
    """Ticks between the boot and a process's start; None where there is none. Source: proc(5), `starttime`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def writer_token() -> str:
    """What a file that this process writes carries in its name, for `is_dead_writer`."""
    pid = os.getpid()
    return f"{_machine_digest()}-{pid}-{_started(pid) or 0}"


def is_dead_writer(token: str) -> bool:
    """Whether the process that carries a token is seen to have ended; False where this process could not see it."""
    machine, pid, started = token.split("-")
    return machine == _machine_digest() and _started(int(pid)) != int(started)


def _machine_digest() -> str:
    return hashlib.sha256(_machine().encode()).hexdigest()[:12]


LEASE_S = 60.0  # how long a claim is believed without being renewed, where nobody can see whether its process lives
_RENEWALS = 4
_PREFIX = "_claim."
_NAME = re.compile(rf"{re.escape(_PREFIX)}(\d{{8}})\.json")
_log = logging.getLogger("graphkiln.scoring")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Claim:
    holder: Holder
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)  # no other claim has the same bytes
    released: bool = False

    def encode(self) -> memoryview:
        return memoryview(json.dumps(asdict(self)).encode())

    @classmethod
    def decode(cls, content: bytes) -> _Claim | None:
        """None where it is damaged."""
        try:
            document = json.loads(content)
            return cls(holder=Holder(**document["holder"]), nonce=document["nonce"], released=document["released"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


class StoreLease:
    """A claim that was made; see `claim`.

    Args:
        store: Where.
        number: Of the claim.
        made: The claim.
    """

    def __init__(self, store: Store, number: int, made: _Claim) -> None:
        self._store, self._number, self._claim = store, number, made
        self._renewed = time.monotonic()

    def renew(self) -> None:
        """Writes the claim again when a quarter of its time is over."""
        age_s = time.monotonic() - self._renewed
        if self._claim.released or age_s < LEASE_S / _RENEWALS:
            return
        try:
            self._check()
            self._store.replace(_name(self._number), self._claim.encode())
        except StoreError as error:
            if age_s >= LEASE_S:
                raise
            _log.warning("the claim on the destination could not be renewed yet: %s", error)
        else:
            self._renewed = time.monotonic()

    def release(self) -> None:
        """Marks the claim as over. Where that fails it ends by itself: a run is what it came to without it."""
        if self._claim.released:
            return
        self._claim = replace(self._claim, released=True)
        try:
            self._store.replace(_name(self._number), self._claim.encode())
        except StoreError as error:
            _log.warning("the claim on the destination could not be given back; it ends by itself: %s", error)

    def _check(self) -> None:
        if (newest := max(_numbers(self._store), default=self._number)) > self._number:
            other = _read(self._store, newest)
            name = other.holder if other else "another run"
            raise ClaimLost(
                f"this run was not heard of for {LEASE_S:.0f} s, and {name} took over",
                hint="what was committed counts; let the other run finish, or run the same command after it",
            )


def claim(store: Store, run_id: str) -> StoreLease:
    """Claims a store for this process.

    Args:
        store: What is claimed.
        run_id: What the run is called in messages.

    Raises:
        DestinationBusy: Another process holds it.
        StoreError: The store fails.
    """
    made = _Claim(holder=Holder.of_this_process(run_id))
    newest = max(_numbers(store), default=0)
    _check_free(store, newest)
    number = newest + 1
    if not store.create(_name(number), made.encode()):
        _refuse(store, number)
    numbers = sorted(_numbers(store))
    if numbers[-1] > number:  # the count went on while this process stood still
        store.delete(_name(number))
        _refuse(store, numbers[-1])
    for old in numbers[:-1]:
        store.delete(_name(old))
    return StoreLease(store, number, made)


def _check_free(store: Store, number: int) -> None:
    found = _read(store, number) if number else None
    if found and (found.released or is_gone(found.holder)):
        return
    age_s = store.age_s(_name(number)) if number else None
    if age_s is not None and age_s < LEASE_S:
        _refuse(store, number)


def _refuse(store: Store, number: int) -> None:
    found, age_s = _read(store, number), store.age_s(_name(number)) or 0.0
    rest = f"it is forgotten in {max(LEASE_S - age_s, 1):.0f} s"
    if found is None:
        raise DestinationBusy(
            f"{store.place(_name(number))} says who writes there, but is damaged or has just gone",
            hint=f"if no run writes there, {rest}, or delete it; a run that does writes it anew",
        )
    raise DestinationBusy(
        f"{store.place('')} is being written by {found.holder}", hint=f"let it finish; if it is dead, {rest}"
    )


def _read(store: Store, number: int) -> _Claim | None:
    content = store.read(_name(number))
    return None if content is None else _Claim.decode(content)


def _numbers(store: Store) -> list[int]:
    return [int(found[1]) for name in store.names(_PREFIX) if (found := _NAME.fullmatch(name))]


def _name(number: int) -> str:
    return f"{_PREFIX}{number:08}.json"
