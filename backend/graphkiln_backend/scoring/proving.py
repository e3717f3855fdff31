"""Proves a worker's session again before anything that it has computed is written.

A core, a memory module or a device may fail long after the self-test. So a unit is committed only after a proof that
began when the unit had been computed: what lies between two good proofs is kept, what came before a bad one is thrown
away with its worker. A proof computes a few golden samples, in turns, and holds them by the project's limits to what
this session computed when all of them had just passed: one sample for a hundred rows of the unit, so that it costs
about a hundredth of what it proves, and no unit goes without. Units that wait at the same time share one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphkiln_backend.engines.base import Placement, Session
from graphkiln_backend.graph.closing import Closeable
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.golden import joined
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.replaying import Replay
from graphkiln_backend.scoring.errors import WorkerUnfit

_SAMPLES = 4
"""Of a proof, at most. A fault of the machine shows in any of them."""
_ROWS_PER_SAMPLE = 100
"""Four samples for each unit of 48 rows were 8% of all that was computed."""


class SharedSession(Closeable):
    """A session that several threads may use: one after the other.

    Args:
        session: The session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()

    @property
    def signature(self) -> Signature:
        """Of the session."""
        return self._session.signature

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """As the session does."""
        with self._lock:
            return self._session.run(feeds, outputs)

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """As the session reads it back."""
        with self._lock:
            return self._session.placement(feeds)

    def close(self) -> None:
        """Closes the session."""
        self._session.close()


def share(proven: ProvenSession) -> ProvenSession:
    """The same session for several threads: requests and replays take turns on it.

    Args:
        proven: Owned by the result from now on.
    """
    session = SharedSession(proven.session)
    return replace(proven, session=session, replay=proven.replay and replace(proven.replay, session=session))


class Prover:
    """Proves a session while it is used.

    Args:
        replay: The golden samples on the session; None where nothing can be replayed.
        outputs: Those that are used; None for all.

    Raises:
        VerificationError: It does not compute the golden samples now.
    """

    def __init__(self, replay: Replay | None, outputs: Sequence[str] | None) -> None:
        self._replay = replay
        self._outputs = tuple(outputs or (replay.reference if replay else ()))
        self._proving = threading.Lock()
        self._good_since = float("-inf")
        self._proven: list[Mapping[str, AnyArray]] = []
        self._next = 0
        if replay:
            self._proven = [replay.run(sample, self._outputs) for sample in range(len(replay.samples))]
            replay.judge(self._proven)

    def prove(self, computed_at: float, rows: int = _SAMPLES * _ROWS_PER_SAMPLE) -> None:
        """Returns when the session is known to be sound after a moment.

        Args:
            computed_at: The moment, by `time.monotonic`, when what is to be written had been computed.
            rows: How many rows that is.

        Raises:
            WorkerUnfit: It is not: nothing that it has computed since the last proof may be written.
        """
        if self._replay is None:
            return
        with self._proving:
            if self._good_since >= computed_at:
                return
            begun = time.monotonic()
            self._run(self._replay, max(1, min(_SAMPLES, rows // _ROWS_PER_SAMPLE)))
            self._good_since = begun

    def _run(self, replay: Replay, most: int) -> None:
        count = len(replay.samples)
        chosen = [(self._next + index) % count for index in range(min(most, count))]
        self._next = (self._next + len(chosen)) % count
        samples, proven = [replay.samples[each] for each in chosen], [self._proven[each] for each in chosen]
        part = replace(replay, samples=tuple(samples), reference=joined(proven))
        try:
            part.judge([part.run(sample, self._outputs) for sample in range(len(chosen))])
        except GraphkilnError as error:
            raise WorkerUnfit(f"it no longer computes the golden samples as it did: {error}") from error
