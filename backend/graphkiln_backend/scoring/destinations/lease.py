"""The claim of the run that is writing, made of nothing but exclusive creation.

Claims are numbered, and the one with the highest number counts. A claim is taken over by creating the next number,
which one of several succeeds in; the highest is never deleted, so that nobody can begin the count anew. It is over when
it was released, when its process is seen to be gone on this machine, or when the store's own clock says that it was not
renewed for `LEASE_S` seconds: the clocks of two machines are never compared. A damaged claim is over by that clock;
who holds it writes it again before.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from dataclasses import asdict, dataclass, field, replace

from graphkiln_backend.scoring.destinations.holder import Holder, is_gone
from graphkiln_backend.scoring.destinations.store import Store
from graphkiln_backend.scoring.errors import ClaimLost, DestinationBusy, StoreError

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
