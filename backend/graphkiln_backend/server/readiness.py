"""Who decides what "ready" means: how a server is started so that it stays ready while versions come and go.

Triton's own readiness (24.10) is strict or says nothing. Strict, it is "no" while any version number is being loaded
that was not served before, although the older version answers; not strict, it is "yes" although a model has no version
at all. It can only be chosen at the start. So a server first starts without it, and ends by itself, before it opens a
port, if anything cannot be loaded: whenever it is live, every model has a version. If it does so, it is started again,
strict, and serves what can be served, while readiness says "no".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphkiln_backend.server.flags import TritonFlags

_FLAGS = ("--strict-readiness=false", "--exit-on-error=true")


@dataclass(slots=True)
class Readiness:
    """How the next server is started; outlives the server's restarts.

    Attributes:
        whole: Whether the server that was started last serves every model or none.
        endless: Versions whose loading did not end when they were last tried, as the watchdog names them.
    """

    whole: bool = False
    endless: set[str] = field(default_factory=set)
    _failed: bool = False

    def choose(self, flags: TritonFlags, *, loads: bool) -> None:
        """Chooses for a server that is about to start.

        Args:
            flags: The user's own.
            loads: Whether it is to load models, all of which may be good.
        """
        asked = {"strict-readiness", "exit-on-error"} & flags.values.keys()
        self.whole = loads and not asked and not self._failed
        if not self._failed:
            self.endless.clear()
        self._failed = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the server, after which the user's own may stand."""
        return _FLAGS if self.whole else ()

    def give_in(self) -> bool:
        """The server ended before it was live: whether it may serve a part of its models if it is started again."""
        self._failed = self.whole
        return self.whole
