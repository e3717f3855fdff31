"""Trials on a server of our own: started for a candidate, kept for all loads of it, stopped before the next one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from graphkiln.story.server import LocalServer, start_server
from graphkiln.tuning.bare_session import BareJob, probe_session
from graphkiln.tuning.candidate import ENGINE, PRECISION, Candidate, changes_of, version_of
from graphkiln.tuning.served_candidate import Loading, Placed, ServedCandidate, ServerWatch, read_placement
from graphkiln.tuning.subject import Subject, stage
from graphkiln.tuning.trials import WARM_S, Bare, Failed, LoadShape, Measured, excused, oom_kills
from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.owned_folder import OwnedFolder

# Of every server that is measured: nothing else computes, it stops at once, and candidates are of our backend.
FLAGS = ("--replay-interval=0", "--drain=1", "--replace-onnxruntime")
_PUBLISHED_S = 20.0  # instances publish what they serve with once a second; on a busy machine they may be late
_POLL_S = 0.05


@dataclass(slots=True)
class LocalTrials(Closeable):
    """Measures candidates of a model, one server at a time. Closing it stops the last one.

    Attributes:
        subject: The model.
        loading: How it is loaded.
        batch_sizes: Those that bare sessions are timed with.
        floor: Share of the labelled samples' accuracy that may be lost; None for any.
        deadline_s: How long a candidate may take to be ready, or its bare session to be timed.
    """

    subject: Subject
    loading: Loading
    batch_sizes: tuple[int, ...] = (1,)
    floor: float | None = None
    deadline_s: float = 180.0
    _served: ServedCandidate | None = None
    _server: ExitStack = field(default_factory=ExitStack)

    def probe(self, session: Candidate) -> Bare | Failed:
        """See `Trials.probe`."""
        self.close()  # it would take the cores that are timed
        job = BareJob(
            subject=self.subject,
            session=session,
            batch_sizes=self.batch_sizes,
            questions=self.loading.questions,
            floor=self.floor,
        )
        kills = oom_kills()
        found = probe_session(job, self.deadline_s)
        return excused(found, kills) if isinstance(found, Failed) else found

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """See `Trials.measure`."""
        kills = oom_kills()
        try:
            found = self._serve(candidate).measure(load, seconds, seed)
        except GraphkilnError as error:
            found = Failed(reason=str(error))
        if isinstance(found, Failed):
            self.close()  # what is wrong with a server must not stay for the next load
            return excused(found, kills)
        return found

    def warm(self, candidate: Candidate, load: LoadShape) -> None:
        """See `Trials.warm`."""
        self.measure(candidate, load, WARM_S, 0)

    def close(self) -> None:
        """Stops the server that runs, if one does."""
        self._served = None
        self._server.close()

    def _serve(self, candidate: Candidate) -> ServedCandidate:
        if self._served is None or self._served.candidate != candidate:
            self.close()
            self._served = self._server.enter_context(self._start(candidate))
        return self._served

    @contextmanager
    def _start(self, candidate: Candidate) -> Iterator[ServedCandidate]:
        flags = (*FLAGS, f"--load-deadline={self.deadline_s:g}")
        changes, version = changes_of(candidate, self.subject), version_of(candidate, self.subject)
        with stage(self.subject, changes, version) as store, OwnedFolder() as folder:
            log = folder.path / "server.log"
            with start_server(store, flags=flags, log=log, deadline_s=self.deadline_s) as server:
                yield serve_as(candidate, self.subject.name, server, self.loading)


def serve_as(candidate: Candidate, model: str, server: LocalServer, loading: Loading) -> ServedCandidate:
    """A candidate on a server that is ready, after it was read back what really serves.

    Args:
        candidate: Its values.
        model: Name of the model.
        server: Serves it.
        loading: How it is loaded.

    Raises:
        MeasurementError: Another engine or precision serves, or nothing says which.
    """
    placed = _placement(server, model)
    check_placement(candidate, placed)
    options = {"timeout_s": loading.timeout_s, "max_retries": 0}
    return ServedCandidate(
        candidate=candidate,
        model=model,
        client={"url": server.grpc_url, **options},
        asking={"url": server.http_url, **options},
        loading=loading,
        placed=placed[0],
        watch=ServerWatch(server.pid),
    )


def check_placement(candidate: Candidate, placed: tuple[Placed, ...]) -> None:
    """Compares what a candidate requests with what its instances say.

    Args:
        candidate: Its values.
        placed: What each instance serves with.

    Raises:
        MeasurementError: They say nothing, or another engine or precision serves.
    """
    if not placed:
        raise MeasurementError("the server does not tell which engine serves")
    engine, precision = candidate.values.get(ENGINE), candidate.values.get(PRECISION)
    for each in placed:
        if engine not in (None, "auto", each.engine):
            raise MeasurementError(f"{engine} was requested, but {each} serves")
        if precision and not _computes(str(precision), each.precision):
            raise MeasurementError(f"{precision} was requested, but {each} serves")


def _computes(requested: str, found: str) -> bool:
    """Whether a precision read back is the requested one; that of a graph without products is not known."""
    if found not in tuple(Precision) or requested in (Precision.INT8, Precision.FP16):
        return True  # int8 graphs compute their other nodes in fp32, and a CPU what was saved in fp16
    return found == Precision(requested).kernels


def _placement(server: LocalServer, model: str) -> tuple[Placed, ...]:
    """Triton opens its metrics port last, after it said that it is ready."""
    end = time.monotonic() + _PUBLISHED_S
    while True:
        try:
            placed = read_placement(server.metrics_url, model)
        except MeasurementError:
            if time.monotonic() > end:
                raise
            placed = ()
        if placed or time.monotonic() > end:
            return placed
        time.sleep(_POLL_S)
