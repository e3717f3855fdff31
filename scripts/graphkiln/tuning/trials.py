"""Interface between the search and the measurements: loads, results and failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.statistics import Interval, Latency

_KEEPS_UP = 0.97
# Seconds of load that are not measured after a server starts: it is slower at first.
WARM_S = 1.0


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that arrive at a mean rate per second, independent of responses."""

    rate: float


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Callers that each wait for a response before they send the next request."""

    callers: int


LoadShape = OpenLoop | ClosedLoop


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A candidate that could not be measured, for example because it did not load, hung or crashed the server.

    Attributes:
        reason: Message with the known cause.
        passing: The machine may have caused the failure (port in use, full disk, low memory); the next run of the
            command measures the candidate again.
    """

    reason: str
    passing: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionTiming:
    """Performance of a candidate's session without a server: bounds that no scheduling can beat.

    Attributes:
        batch_s: Batch size -> seconds of the fastest of several runs; contains size 1.
        accuracy: Violation of the numeric policy by the outputs, or "".
        accuracy_lost: Loss of accuracy on the labelled samples as a share; None without labels.
    """

    batch_s: Mapping[int, float]
    accuracy: str = ""
    accuracy_lost: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Performance of a candidate under a load.

    Attributes:
        latency: Latencies of all requests, counted from when they were due; failed requests count as infinite.
        throughput: Responses per second.
        seconds: Duration of the measurement without the warm-up.
        errors: Error type -> number of requests.
        unsent: Requests of an open loop that were due but never sent.
        client_cores: Mean number of cores used by the load generator.
        server_cores: Mean number of cores used by the server; None if unknown.
        memory_bytes: Memory of all server processes; None if unknown.
        energy_j: Energy of the whole machine in joules; None if unknown.
        placed: Placement reported by the server; "" if unknown.
        warning: Reason to doubt the figures, such as a load generator short of cores; "" if none.
        level: Relative speed of the machine by which latency and throughput were converted (`drift`).
        answers: Number of answers that were compared with the saved graph.
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
        """True if nearly all due requests were answered in time, so that no queue grows."""
        return self.throughput.upper >= _KEEPS_UP * self.due_per_s

    @property
    def due_per_s(self) -> float:
        """Requests due per second, converted like the throughput."""
        return self.requests / self.seconds / self.level

    @property
    def requests(self) -> int:
        """Number of requests that were due (open loop) or sent (closed loop)."""
        return self.latency.count


class Trials(Protocol):
    """Measurements of candidates on a real or simulated server."""

    def probe(self, session: Candidate) -> SessionTiming | Failed:
        """Time a session without a server and check its outputs."""
        ...

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """Serve a candidate and measure it under a load.

        Failures of the candidate are returned; failures of the tuner itself are raised.
        """
        ...
