"""Trials of candidates: a bare session in a child process, then a server kept for all loads of one candidate."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from graphkiln.bench.processes import receive_message, send_message
from graphkiln.story.server import LocalServer, start_server
from graphkiln.tuning.candidate import ENGINE, MAX_BATCH_SIZE, PRECISION, Candidate, changes_of, version_of
from graphkiln.tuning.measure import Loading, Placed, ServedCandidate, ServerWatch, read_placement
from graphkiln.tuning.questions import Arrays, Questions
from graphkiln.tuning.subject import PREFIX, Subject, read_subject, stage, vanishing_cache
from graphkiln.tuning.trials import Bare, Failed, LoadShape, Measured
from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.errors import ConnectionFailed, GraphkilnError, MeasurementError
from graphkiln_backend.graph.golden import repeated
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.owned_folder import OwnedFolder
from graphkiln_backend.system.processes import end_with_parent, start

# Options of every measured server: no background work, an immediate stop, and candidates in our backend.
FLAGS = ("--replay-interval=0", "--drain=1", "--replace-onnxruntime")
# Instances publish their placement once a second; on a busy machine they may be late.
_PUBLISHED_S = 20.0
_POLL_S = 0.05


@dataclass(slots=True)
class LocalTrials(Closeable):
    """Measure candidates of a model on one server at a time; `close` stops the last one.

    Attributes:
        subject: The model.
        loading: Its load.
        batch_sizes: Batch sizes that bare sessions are timed with.
        deadline_s: Seconds until a candidate must be ready, or its bare session timed.
    """

    subject: Subject
    loading: Loading
    batch_sizes: tuple[int, ...] = (1,)
    deadline_s: float = 180.0
    _served: ServedCandidate | None = None
    _server: ExitStack = field(default_factory=ExitStack)

    def probe(self, session: Candidate) -> Bare | Failed:
        """See `Trials.probe`."""
        self.close()  # it would take the cores that are timed
        job = BareJob(
            subject=self.subject, session=session, batch_sizes=self.batch_sizes, questions=self.loading.questions
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

    def close(self) -> None:
        """Stop the running server, if any."""
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
        name, options = self.subject.name, {"timeout_s": self.loading.timeout_s, "max_retries": 0}
        with stage(self.subject, changes, version) as store, OwnedFolder() as folder:
            log = folder.path / "server.log"
            with start_server(store, flags=flags, log=log, deadline_s=self.deadline_s) as server:
                placed = _wait_placement(server, name)
                check_placement(candidate, placed)
                yield ServedCandidate(
                    candidate=candidate,
                    model=name,
                    client={"url": server.grpc_url, **options},
                    asking={"url": server.http_url, **options},
                    loading=self.loading,
                    placed=placed[0],
                    watch=ServerWatch(server.pid),
                )


def check_placement(candidate: Candidate, placed: tuple[Placed, ...]) -> None:
    """Compare the requested engine and precision with those that the instances report.

    Raises:
        MeasurementError: They report nothing, or another engine or precision serves.
    """
    if not placed:
        raise MeasurementError("the server does not report which engine serves")
    engine, precision = candidate.values.get(ENGINE), candidate.values.get(PRECISION)
    for each in placed:
        if engine not in (None, "auto", each.engine):
            raise MeasurementError(f"{engine} was requested, but {each} serves")
        if precision and not _computes(str(precision), each.precision):
            raise MeasurementError(f"{precision} was requested, but {each} serves")


def _computes(requested: str, found: str) -> bool:
    """Return true if a reported precision is the requested one; a graph without products reports none."""
    if found not in tuple(Precision) or requested in (Precision.INT8, Precision.FP16):
        return True  # int8 graphs compute their other nodes in fp32, and a CPU what was saved in fp16
    return found == Precision(requested).kernels


def _wait_placement(server: LocalServer, model: str) -> tuple[Placed, ...]:
    """Wait for the placement: Triton opens its metrics port only after it reports ready."""
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


# Failures that the machine may have caused, and that may pass, beside failures of the candidate.
#
# A port that another program took, a disk that is full, memory that others hold: what a candidate could not do then
# is no property of it. Where the two cannot be told apart, a failure counts as the machine's:
# another run of the command tries it again (`journal`).
#
# Source: Linux kernel documentation, "/proc/vmstat" (`oom_kill`: processes that were killed where memory was short,
# those of control groups included).

_TRIED_AGAIN = "the same command tries it again"
_VMSTAT = Path("/proc/vmstat")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
# Messages of such failures, as strerror(3) and our own server spell them.
_SIGNS = re.compile(
    r"No space left on device|Disk quota exceeded|Cannot allocate memory|Too many open files|Read-only file system"
    r"|Resource temporarily unavailable|already in use|port \d+ \(\w+\) is in use|there is not enough memory"
)


def oom_kills() -> int:
    """Number of processes that the kernel has killed for lack of memory; 0 if it does not count them."""
    with suppress(OSError):
        if found := _OOM_KILLS.search(_VMSTAT.read_text()):
            return int(found[1])
    return 0


def excused(found: Failed, kills_before: int) -> Failed:
    """Mark a failure as one that may pass, if the machine may have caused it."""
    short = "; memory was short: the kernel killed a process meanwhile" if oom_kills() > kills_before else ""
    if not (short or found.passing or _SIGNS.search(found.reason)):
        return found
    return replace(found, reason=f"{found.reason}{short}; {_TRIED_AGAIN}", passing=True)


# A bare session is timed in a child process: a graph may crash its process, or never end, and the tuner must survive.

_SIZE_S = 0.15
_FEWEST_RUNS = 3
# A run that takes so long: larger batches take longer, and are not tried.
_HOPELESS_S = 2.0
# The temporary store in a message: replaced by the user's own path.
_STAGED = re.compile(rf"[^\s'\"]*/{re.escape(PREFIX)}[^/\s]+/store")


@dataclass(frozen=True, kw_only=True, slots=True)
class BareJob:
    """Job of the child process.

    Attributes:
        subject: The model.
        session: Values of the session's keys.
        batch_sizes: Batch sizes to time, in ascending order.
        questions: Requests that are checked one by one.
    """

    subject: Subject
    session: Candidate
    batch_sizes: tuple[int, ...]
    questions: Questions


def probe_session(job: BareJob, deadline_s: float) -> Bare | Failed:
    """Build, time and check a session in a child process, which is killed after a deadline."""
    command = [sys.executable, "-P", "-m", "graphkiln.tuning.local_trials"]
    late = threading.Event()

    def kill() -> None:
        late.set()
        worker.kill()

    with start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        if worker.stdin is None or worker.stdout is None:
            raise AssertionError
        timer = threading.Timer(deadline_s, kill)
        timer.daemon = True
        timer.start()
        try:
            send_message(worker.stdin, job)
            found: Bare | Failed = receive_message(worker.stdout)
        except (EOFError, BrokenPipeError):
            code = worker.wait()
            if late.is_set():
                return Failed(reason=f"its session was not built and timed within {deadline_s:g} s")
            killed = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Failed(reason=f"its session ended the process that built it ({killed})")
        else:
            return found
        finally:
            timer.cancel()
            timer.join()
            worker.kill()


def run_job(job: BareJob) -> Bare | Failed:
    """Build, time and check a session in this process."""
    session, questions = job.session, job.questions
    largest = max(job.batch_sizes)
    staged = session.with_values({MAX_BATCH_SIZE: largest}) if largest > 1 else session
    try:
        with (
            stage(job.subject, changes_of(staged, job.subject), version_of(staged, job.subject)) as store,
            vanishing_cache() as cache,
        ):
            served = read_subject(store / job.subject.name / str(job.subject.version), cache)
            with served.deployment.build(cache).session as built:
                times = _time_sizes(built, questions.feeds[0], job.batch_sizes)
                found = [built.run(feeds) for feeds in questions.feeds]
    except (GraphkilnError, OSError, MemoryError) as error:
        reason = str(error) or "there is not enough memory"
        return Failed(reason=_STAGED.sub(str(job.subject.folder.parent), reason))
    engine, precision = session.values.get(ENGINE, "the engine"), session.values.get(PRECISION, questions.saved)
    objection = questions.objection(dict(enumerate(found)), engine=str(engine), precision=str(precision))
    return Bare(batch_s=times, accuracy=objection, accuracy_lost=accuracy_lost(questions, found))


def accuracy_lost(questions: Questions, found: Sequence[Arrays]) -> float | None:
    """Share of the labelled samples that the saved graph gets right and these outputs do not, less the reverse."""
    right, now = questions.accuracy(questions.answers), questions.accuracy(found)
    return None if right is None or now is None else right - now


def _time_sizes(session: Session, feeds: Arrays, sizes: Sequence[int]) -> Mapping[int, float]:
    """Seconds of the fastest of several runs by batch size: other load on the machine only slows them down."""
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
    """Run the child process: it ends with the tuner, also when that is killed; Ctrl-C is left to the tuner."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    send_message(sys.stdout.buffer, run_job(receive_message(sys.stdin.buffer)))


if __name__ == "__main__":
    from graphkiln.tuning.local_trials import main as run  # by its own name: what is pickled here is read elsewhere

    run()
