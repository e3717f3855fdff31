"""A candidate's session without a server, in a process of its own: how fast it is, and what it answers.

A graph may take its process with it, or never end: the tuner must survive both.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphkiln.tuning.candidate import ENGINE, MAX_BATCH_SIZE, PRECISION, Candidate, changes_of, version_of
from graphkiln.tuning.questions import Arrays, Questions
from graphkiln.tuning.subject import PREFIX, Subject, read_subject, stage, vanishing_cache
from graphkiln.tuning.trials import Bare, Failed
from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.golden import repeated
from graphkiln_backend.lowering.parentage import end_with_parent
from graphkiln_client.load_job import hear, tell

_SIZE_S = 0.15
_FEWEST_RUNS = 3
_HOPELESS_S = 2.0  # A run that takes so long: larger batches take longer, and are not tried
# The temporary store in a message, which says nothing to its reader.
_STAGED = re.compile(rf"[^\s'\"]*/{re.escape(PREFIX)}[^/\s]+/store")


@dataclass(frozen=True, kw_only=True, slots=True)
class BareJob:
    """What the process is told.

    Attributes:
        subject: The model.
        session: Values of the session's keys.
        batch_sizes: To be timed, in ascending order.
        questions: Asked one by one.
        floor: Share of the labelled samples' accuracy that may be lost; None for any.
    """

    subject: Subject
    session: Candidate
    batch_sizes: tuple[int, ...]
    questions: Questions
    floor: float | None = None


def probe_session(job: BareJob, deadline_s: float) -> Bare | Failed:
    """Builds, times and questions a session in a process of its own.

    Args:
        job: What to do.
        deadline_s: How long it may take.
    """
    command = [sys.executable, "-P", "-m", "graphkiln.tuning.bare_session"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as worker:
        try:
            return _talk(worker, job, deadline_s)
        finally:
            worker.kill()


def _talk(worker: subprocess.Popen[bytes], job: BareJob, deadline_s: float) -> Bare | Failed:
    if worker.stdin is None or worker.stdout is None:
        raise AssertionError
    killer = _Deadline(worker, deadline_s)
    try:
        tell(worker.stdin, job)
        found: Bare | Failed = hear(worker.stdout)
    except (EOFError, BrokenPipeError):
        return Failed(reason=_reason(worker.wait(), deadline_s, late=killer.late))
    else:
        return found
    finally:
        killer.cancel()


class _Deadline:
    """Kills a process that is late."""

    def __init__(self, worker: subprocess.Popen[bytes], seconds: float) -> None:
        import threading

        self.late = False
        self._worker = worker
        self._timer = threading.Timer(seconds, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()
        self._timer.join()

    def _kill(self) -> None:
        self.late = True
        self._worker.kill()


def _reason(code: int, deadline_s: float, *, late: bool) -> str:
    if late:
        return f"its session was not built and timed within {deadline_s:g} s"
    killed = f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"its session ended the process that built it ({killed})"


def run_job(job: BareJob) -> Bare | Failed:
    """Builds, times and questions a session in this process."""
    session = job.session
    staged = session.with_values({MAX_BATCH_SIZE: max(job.batch_sizes)}) if max(job.batch_sizes) > 1 else session
    try:
        with (
            stage(job.subject, changes_of(staged, job.subject), version_of(staged, job.subject)) as store,
            vanishing_cache() as cache,
        ):
            served = read_subject(store / job.subject.name / str(job.subject.version), cache)
            proven = served.deployment.build(cache)
            with proven.session as built:
                times = _time_sizes(built, job.questions.feeds[0], job.batch_sizes)
                found = [built.run(feeds) for feeds in job.questions.feeds]
    except (GraphkilnError, OSError, MemoryError) as error:
        reason = str(error) or "there is not enough memory"
        return Failed(reason=_STAGED.sub(str(job.subject.folder.parent), reason))
    return _judged(job, times, found)


def _judged(job: BareJob, times: Mapping[int, float], found: Sequence[Arrays]) -> Bare:
    questions, values = job.questions, job.session.values
    precision = str(values.get(PRECISION, questions.saved))
    objection = questions.objection(
        dict(enumerate(found)), engine=str(values.get(ENGINE, "the engine")), precision=precision
    )
    lost = accuracy_lost(questions, found)
    if not objection and job.floor is not None and lost is not None and lost > job.floor:
        objection = f"{lost:.2%} of the accuracy are lost, the floor is {job.floor:.2%}"
    return Bare(batch_s=times, accuracy=objection, accuracy_lost=lost)


def accuracy_lost(questions: Questions, found: Sequence[Arrays]) -> float | None:
    """Share of the labelled samples that the saved graph gets right and these outputs do not, less the reverse.

    Args:
        questions: The samples.
        found: The outputs for each of them.
    """
    right, now = questions.accuracy(questions.answers), questions.accuracy(found)
    return None if right is None or now is None else right - now


def _time_sizes(session: Session, feeds: Arrays, sizes: Sequence[int]) -> dict[int, float]:
    times: dict[int, float] = {}
    for size in sizes:
        batch = repeated(feeds, size) if size > 1 else feeds
        times[size] = _time_s(session, batch)
        if times[size] > _HOPELESS_S:
            break
    return times


def _time_s(session: Session, feeds: Arrays) -> float:
    """The fastest of several runs: what else happens on the machine only slows them."""
    fastest, end = float("inf"), time.perf_counter() + _SIZE_S
    runs = 0
    while runs < _FEWEST_RUNS or time.perf_counter() < end:
        begun = time.perf_counter()
        session.run(feeds)
        fastest = min(fastest, time.perf_counter() - begun)
        runs += 1
        if fastest > _HOPELESS_S:
            break
    return fastest


def main() -> None:
    """What the process does: it ends with the tuner, also when that is killed, and Ctrl-C is the tuner's alone."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell(sys.stdout.buffer, run_job(hear(sys.stdin.buffer)))


if __name__ == "__main__":
    from graphkiln.tuning.bare_session import main as run  # by its own name: what is pickled here is read elsewhere

    run()
