"""Which versions a server serves, from its start to its end: one bad version takes no other with it.

Triton itself always runs in explicit mode over a mirror of the stores. At the start it loads everything; what fails
gives way to an older version, a model without any good one stays failed, and readiness says so.
`--model-control-mode=poll` is done here: see `server.polling`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

_log = logging.getLogger("graphkiln.server")

_SOON_S = 1.0  # until the next attempt after an error
_SETTLE_ATTEMPTS = 3
# Nothing that is under way when a server has ended takes longer, but a store on a disk that does not answer.
_END_S = 10.0


class AdmissionStopped(Exception):
    """The server stops: the version was neither admitted nor refused."""


class Keeper(Protocol):
    """What one control mode does with a running server. Every method may raise OSError and AdmissionStopped."""

    @property
    def ticks(self) -> bool:
        """Whether there is anything to do once it is in order."""

    def is_settled(self) -> bool:
        """Whether a server that has just started is in order."""

    def settle(self) -> None:
        """Brings it in order."""

    def tick(self) -> float | None:
        """Looks after it; returns the seconds until the next time, or None for never."""


@dataclass(slots=True)
class Rollout:
    """Runs a keeper beside a server, in a thread, which `end` ends."""

    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _unforeseen: str = ""

    def begin(self, keeper: Keeper, on_settled: Callable[[], None]) -> None:
        """Begins when the server is live.

        Args:
            keeper: What to do.
            on_settled: Called once everything is as good as it gets: at once, where nothing need be done.
        """
        self._stop = stop = threading.Event()
        settled = self._check(keeper)
        if settled:
            on_settled()
        if not settled or keeper.ticks:
            steps = (keeper, None if settled else on_settled, stop)
            self._thread = threading.Thread(target=self._run, args=steps, name="rollout", daemon=True)
            self._thread.start()

    def halt(self) -> None:
        """Changes nothing from now on: the server is about to stop."""
        self._stop.set()

    def end(self) -> None:
        """Ends it; call it when the server has ended, which ends a load that is under way."""
        self.halt()
        if self._thread:
            self._thread.join(_END_S)
            if self._thread.is_alive():  # it does nothing more once the store answers
                _log.warning("a model store has not answered for %g s: going on without waiting for it", _END_S)
            self._thread = None

    def stopped(self) -> bool:
        """Whether `halt` was called."""
        return self._stop.is_set()

    def _check(self, keeper: Keeper) -> bool:
        try:
            return keeper.is_settled()
        except OSError as error:  # the user's own --http-restricted-api, or a server that ends at once
            _log.warning("cannot look after the models: %s", error)
            return True

    def _run(self, keeper: Keeper, on_settled: Callable[[], None] | None, stop: threading.Event) -> None:
        if on_settled:
            self._settle(keeper, stop)
            if stop.is_set():
                return
            on_settled()
        pause: float | None = 0.0
        while pause is not None and not stop.wait(pause):
            pause = self._try(keeper.tick)

    def _settle(self, keeper: Keeper, stop: threading.Event) -> None:
        for _ in range(_SETTLE_ATTEMPTS):
            if self._try(keeper.settle) is None or stop.wait(_SOON_S):
                return

    def _try(self, step: Callable[[], float | None]) -> float | None:
        try:
            return step()
        except AdmissionStopped:
            return None
        except OSError as error:
            self._tell(error)
            return _SOON_S
        except Exception as error:  # noqa: BLE001 - nobody foresaw it: no reason never to look at the models again
            self._tell(error, traceback=repr(error) != self._unforeseen)
            self._unforeseen = repr(error)
            return _SOON_S

    def _tell(self, error: Exception, *, traceback: bool = False) -> None:
        if not self.stopped():  # the server may have ended: the supervisor sees to that
            words = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            _log.warning("cannot look after the models just now: %s", words, exc_info=error if traceback else None)
