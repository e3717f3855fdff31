"""Interface between the search and what measures: loads, outcomes, failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.statistics import Interval, Latency

_KEEPS_UP = 0.97
# Seconds of a load that is not counted: a server that has just started is slower than later.
WARM_S = 1.0


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that arrive at a rate, independent of responses.

    Attributes:
        rate: How many a second, on average.
    """

    rate: float


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Callers that wait for their response before they send the next request.

    Attributes:
        callers: How many.
    """

    callers: int


LoadShape = OpenLoop | ClosedLoop


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A candidate that could not be measured: it did not load, it hung, it took the server down.

    Attributes:
        reason: In words, with what is known of the cause.
        passing: The machine may be to blame (a port, a full disk, memory that others took): another run of the
            command tries again.
    """

    reason: str
    passing: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bare:
    """A candidate's session without a server: bounds that no scheduling can beat.

    Attributes:
        batch_s: Batch size -> seconds of one run, the least of several; size 1 is among them.
        accuracy: Violation of the numeric policy or the floor by the outputs; "" if there is none.
        accuracy_lost: Share of the labelled samples' accuracy that is lost; None without labelled samples.
    """

    batch_s: Mapping[int, float]
    accuracy: str = ""
    accuracy_lost: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Performance of a candidate under a load.

    Attributes:
        latency: Of all requests, counted from when they were due; those that failed count as endless.
        throughput: Responses per second.
        seconds: How long was measured, the warm-up not counted.
        errors: Kinds of errors -> how many requests ended with one.
        unsent: Requests of an open loop that were due and not even sent.
        client_cores: CPU seconds of the load generator, per second.
        server_cores: CPU seconds of the server, per second; None where unknown.
        memory_bytes: Of all processes of the server; None where unknown.
        energy_j: Joules of the machine while it was measured; None where unknown.
        placed: Placement that the server reported; "" if unknown.
        warning: Reason to doubt the figures, such as a load generator that had no core left; "" if there is none.
        level: Speed of the machine by which latency and throughput were converted (`drift`).
        answers: Number of answers that were compared with those of the saved graph meanwhile.
    """

    latency: Latency
    throughput: Interval
    seconds: float
    errors: Mapping[str, int] = field(default_factory=dict)
    unsent: int = 0
    client_cores: float = 0.0
    server_cores: float | None = None
    memory_bytes: int | None = None
    energy_j: float | None = None
    placed: str = ""
    warning: str = ""
    level: float = 1.0
    answers: int = 0

    @property
    def keeps_up(self) -> bool:
        """Return true if nearly all due requests were answered in time, so that no queue grows."""
        return self.throughput.upper >= _KEEPS_UP * self.due_per_s

    @property
    def due_per_s(self) -> float:
        """Requests that were due in a second, converted as the throughput is."""
        return self.requests / self.seconds / self.level

    @property
    def requests(self) -> int:
        """Number of requests that were due, or sent by callers."""
        return self.latency.count


class Trials(Protocol):
    """Measurements of candidates, on a real server or a simulated one."""

    def probe(self, session: Candidate) -> Bare | Failed:
        """Measure a bare session and check its outputs."""
        ...

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """Serve a candidate and measure it.

        Failures of the candidate are returned, never raised; failures of the tuner itself are raised.
        """
        ...
