"""Whether a rate that was promised holds when Triton's own perf_analyzer measures it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from generators import PERF_ANALYZER, PerfAnalyzer
from measurement import show_progress

from graphkiln.story.server import start_server
from graphkiln.tuning.candidate import Candidate, changes_of
from graphkiln.tuning.local_trials import FLAGS
from graphkiln.tuning.subject import Subject, stage

REPEATS = 10
_WARM_UP_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What perf_analyzer measured at a promised rate.

    Attributes:
        p99_ms: Of each repeat.
        target_ms: What was promised.
    """

    p99_ms: tuple[float, ...]
    target_ms: float

    @property
    def within(self) -> int:
        """Repeats whose p99 is within the target."""
        return sum(each <= self.target_ms for each in self.p99_ms)

    def __str__(self) -> str:
        return f"{self.within} of {len(self.p99_ms)}"


def measure_again(subject: Subject, candidate: Candidate, rate: float, p99_s: float, seconds: float) -> Held | None:
    """Serves a configuration and sends Poisson arrivals at a rate; None where perf_analyzer is not on PATH.

    Args:
        subject: The model.
        candidate: Its configuration.
        rate: Requests per second.
        p99_s: The target.
        seconds: Of each repeat.
    """
    if not shutil.which(PERF_ANALYZER):
        return None
    generator, found = PerfAnalyzer(), []
    with stage(subject, changes_of(candidate, subject)) as store, start_server(store, flags=FLAGS) as server:
        generator.at_rate(server.grpc_url, subject.name, rate, _WARM_UP_S)
        for number in range(REPEATS):
            show_progress(f"{PERF_ANALYZER} at {rate:g} requests per second, {number + 1} of {REPEATS}")
            found.append(generator.at_rate(server.grpc_url, subject.name, rate, seconds).p99_ms)
    return Held(p99_ms=tuple(found), target_ms=p99_s * 1e3)
