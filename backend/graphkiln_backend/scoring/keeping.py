"""A claim is renewed while the driver waits in one call: for a listing, or for thousands of removals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from graphkiln_backend.scoring.destinations.base import Lease

_ASKED_S = 1.0


@contextmanager
def kept(lease: Lease) -> Iterator[Callable[[], None]]:
    """Renews a lease, and again in a thread of its own as long as a block runs, which does not renew it itself.

    Args:
        lease: What is kept.

    Yields:
        To be called before something is done that no other run may do: raises what ended the lease, if anything did.

    Raises:
        ClaimLost: Another run took it over meanwhile.
        StoreError: It could not be renewed for so long that it has ended.
    """
    over, ended = threading.Event(), Future[None]()

    def check() -> None:
        if ended.done():
            ended.result()

    lease.renew()
    thread = threading.Thread(target=_renew, args=(lease, over, ended), name="lease", daemon=True)
    thread.start()
    try:
        yield check
    finally:
        over.set()
        thread.join()
    check()


def _renew(lease: Lease, over: threading.Event, ended: Future[None]) -> None:
    try:
        while not over.wait(_ASKED_S):
            lease.renew()
    except BaseException as error:  # noqa: BLE001 - raised where it is asked for
        ended.set_exception(error)
