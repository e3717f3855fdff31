"""Trials on this machine: sessions timed in a child process, and servers that are measured under load."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from graphkiln.story.server import LocalServer, start_server
from graphkiln.tuning.candidate import ENGINE, MAX_BATCH_SIZE, PRECISION, Candidate, changes_of, version_of
from graphkiln.tuning.measure import Loading, Placed, ServedCandidate, ServerWatch, read_placement
from graphkiln.tuning.requests import Arrays, Requests
from graphkiln.tuning.subject import PREFIX, Subject, read_subject, stage, vanishing_cache
from graphkiln.tuning.trials import Failed, LoadShape, Measured, SessionTiming
from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.errors import ConnectionFailed, GraphkilnError, MeasurementError
from graphkiln_backend.graph.golden import repeated
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.owned_folder import OwnedFolder
from graphkiln_backend.system.processes import end_with_parent, start

# Flags of every measured server: no background work, an immediate stop, and graphkiln's backend for ONNX models.
FLAGS = ("--replay-interval=0", "--drain=1", "--replace-onnxruntime")
# Instances publish their placement once a second, later on a busy machine.
_PUBLISHED_S = 20.0
_POLL_S = 0.05


@dataclass(slots=True)
class LocalTrials(Closeable):
    """Measure candidates of a model, on one server at a time; `close` stops the server.

    Attributes:
        subject: Model.
        loading: Load for all candidates.
        batch_sizes: Batch sizes to time sessions with.
        deadline_s: Seconds within which a server must be ready or a session must be timed.
    """

    subject: Subject
    loading: Loading
    batch_sizes: tuple[int, ...] = (1,)
    deadline_s: float = 180.0
    _served: ServedCandidate | None = None
    _server: ExitStack = field(default_factory=ExitStack)

    def probe(self, session: Candidate) -> SessionTiming | Failed:
        """See `Trials.probe`."""
        self.close()  # a running server would take cores from the timed session
        kills, requests = oom_kills(), self.loading.requests
        job = ProbeJob(subject=self.subject, session=session, batch_sizes=self.batch_sizes, requests=requests)
        found = probe_session(job, self.deadline_s)
        return excused(found, kills) if isinstance(found, Failed) else found

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """See `Trials.measure`."""
        kills = oom_kills()
        try:
            if self._served is None or self._served.candidate != candidate:
                self.close()
                self._served = self._server.enter_context(self._start(candidate))
            found = self._served.measure(load, seconds, seed)
        except GraphkilnError as error:
            found = Failed(reason=str(error))
        if isinstance(found, Failed):
            self.close()  # do not reuse a server after a failure
            return excused(found, kills)
        return found

    def close(self) -> None:
        """Stop the server if one is running."""
        self._served = None
        self._server.close()

    @contextmanager
    def _start(self, candidate: Candidate) -> Iterator[ServedCandidate]:
        flags = (*FLAGS, f"--load-deadline={self.deadline_s:g}")
        changes, version = changes_of(candidate, self.subject), version_of(candidate, self.subject)
        name = self.subject.name
        with stage(self.subject, changes, version) as store, OwnedFolder() as folder:
            log = folder.path / "server.log"
            with start_server(store, flags=flags, log=log, deadline_s=self.deadline_s) as server:
                placed = _wait_placement(server, name)
                check_placement(candidate, placed)
                yield ServedCandidate(
                    candidate=candidate,
                    model=name,
                    server=server,
                    loading=self.loading,
                    placed=placed[0],
                    watch=ServerWatch(server.pid),
                )


def check_placement(candidate: Candidate, placed: tuple[Placed, ...]) -> None:
    """Check that the instances report the requested engine and precision.

    Raises:
        MeasurementError: They report another engine or precision, or nothing.
    """
    if not placed:
        raise MeasurementError("the server does not report its engine")
    engine, precision = candidate.values.get(ENGINE), candidate.values.get(PRECISION)
    for each in placed:
        if engine not in (None, "auto", each.engine):
            raise MeasurementError(f"requested engine {engine}, but the model runs on {each}")
        # a graph without products reports none; int8 graphs compute other nodes in fp32, and so do CPUs fp16 graphs
        is_known = each.precision in tuple(Precision) and precision not in (None, Precision.INT8, Precision.FP16)
        if is_known and each.precision != Precision(str(precision)).kernels:
            raise MeasurementError(f"requested precision {precision}, but the model runs on {each}")


def _wait_placement(server: LocalServer, model: str) -> tuple[Placed, ...]:
    """Poll for the placement: Triton opens its metrics port only after it reports ready."""
    end = time.monotonic() + _PUBLISHED_S
    while True:
        try:
            placed = read_placement(server.metrics_url, model)
        except ConnectionFailed:
            if time.monotonic() > end:
                raise
            placed = ()
        if placed or time.monotonic() > end:
            return placed
        time.sleep(_POLL_S)


# Failures that the machine may have caused: a port in use, a full disk, memory taken by other processes. They are not
# a property of the candidate; the next run of the command measures it again (`journal`).
#
# Source: Linux kernel documentation, "/proc/vmstat" (`oom_kill`: processes killed because memory was short,
# including those of control groups).

_TRIED_AGAIN = "run the same command again to retry it"
_VMSTAT = Path("/proc/vmstat")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
# Messages of strerror(3) and of graphkiln's server.
_SIGNS = re.compile(
    r"No space left on device|Disk quota exceeded|Cannot allocate memory|Too many open files|Read-only file system"
    r"|Resource temporarily unavailable|already in use|port \d+ \(\w+\) is in use|there is not enough memory"
)


def oom_kills() -> int:
    """Return the number of processes that the kernel killed for lack of memory; 0 if it does not count them."""
    with suppress(OSError):
        if found := _OOM_KILLS.search(_VMSTAT.read_text()):
            return int(found[1])
    return 0


def excused(found: Failed, kills_before: int) -> Failed:
    """Mark a failure as passing if the machine may have caused it."""
    short = "; the kernel killed a process because memory was short" if oom_kills() > kills_before else ""
    if not (short or found.passing or _SIGNS.search(found.reason)):
        return found
    return replace(found, reason=f"{found.reason}{short}; {_TRIED_AGAIN}", passing=True)


# Sessions are timed in a child process: a graph may crash its process or run forever, and the tuner must survive.

_SIZE_S = 0.15
_FEWEST_RUNS = 3
# Seconds of a run above which larger batches are not timed.
_HOPELESS_S = 2.0
# Path of a temporary store in an error message, which is replaced by the user's path.
_STAGED = re.compile(rf"[^\s'\"]*/{re.escape(PREFIX)}[^/\s]+/store")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeJob:
    """Task of the child process.

    Attributes:
        subject: Model.
        session: Candidate with the session's keys.
        batch_sizes: Batch sizes to time, ascending.
        requests: Requests to check, one by one.
    """

    subject: Subject
    session: Candidate
    batch_sizes: tuple[int, ...]
    requests: Requests


def probe_session(job: ProbeJob, deadline_s: float) -> SessionTiming | Failed:
    """Build, time and check a session in a child process, which is killed after `deadline_s` seconds."""
    command = [sys.executable, "-P", "-m", "graphkiln.tuning.local_trials"]
    with start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        try:
            output, _ = worker.communicate(pickle.dumps(job), deadline_s)
        except subprocess.TimeoutExpired:
            return Failed(reason=f"the session was not built and timed within {deadline_s:g} s")
        finally:
            worker.kill()
    if worker.returncode:
        code = worker.returncode
        killed = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Failed(reason=f"the session crashed the process that built it ({killed})")
    found: SessionTiming | Failed = pickle.loads(output)  # noqa: S301 - from our own process
    return found


def run_job(job: ProbeJob) -> SessionTiming | Failed:
    """Build, time and check a session in this process."""
    session, requests = job.session, job.requests
    largest = max(job.batch_sizes)
    staged = session.with_values({MAX_BATCH_SIZE: largest}) if largest > 1 else session
    try:
        with (
            stage(job.subject, changes_of(staged, job.subject), version_of(staged, job.subject)) as store,
            vanishing_cache() as cache,
        ):
            served = read_subject(store / job.subject.name / str(job.subject.version), cache)
            with served.deployment.build(cache).session as built:
                times = _time_sizes(built, requests.feeds[0], job.batch_sizes)
                found = [built.run(feeds) for feeds in requests.feeds]
    except (GraphkilnError, OSError, MemoryError) as error:
        reason = str(error) or "there is not enough memory"
        return Failed(reason=_STAGED.sub(str(job.subject.folder.parent), reason))
    engine, precision = session.values.get(ENGINE, "the engine"), session.values.get(PRECISION, requests.saved)
    objection = requests.objection(dict(enumerate(found)), engine=str(engine), precision=str(precision))
    return SessionTiming(batch_s=times, accuracy=objection, accuracy_lost=accuracy_lost(requests, found))


def accuracy_lost(requests: Requests, found: Sequence[Arrays]) -> float | None:
    """Return the accuracy of the saved graph minus that of these outputs; None without labels."""
    right, now = requests.accuracy(requests.answers), requests.accuracy(found)
    return None if right is None or now is None else right - now


def _time_sizes(session: Session, feeds: Arrays, sizes: Sequence[int]) -> Mapping[int, float]:
    """Time several runs of each batch size and keep the fastest: interference only slows runs down."""
    times: dict[int, float] = {}
    for size in sizes:
        batch = repeated(feeds, size) if size > 1 else feeds
        runs_s: list[float] = []
        end = time.perf_counter() + _SIZE_S
        while len(runs_s) < _FEWEST_RUNS or time.perf_counter() < end:
            begun = time.perf_counter()
            session.run(batch)
            runs_s.append(time.perf_counter() - begun)
            if min(runs_s) > _HOPELESS_S:
                break
        times[size] = min(runs_s)
        if times[size] > _HOPELESS_S:
            break
    return times


def main() -> None:
    """Run the child process; it ends with the tuner and leaves Ctrl-C to it."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pickle.dump(run_job(pickle.load(sys.stdin.buffer)), sys.stdout.buffer)  # noqa: S301 - from our own process
    sys.stdout.flush()
    os._exit(0)  # an engine that crashes or hangs while it is unloaded does not invalidate its times


if __name__ == "__main__":
    from graphkiln.tuning.local_trials import main as run  # pickled classes need the module's real name

    run()
