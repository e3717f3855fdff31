"""Files by which the supervisor and the instances of a model talk about a rollout, in the folder of status files.

- `NAME.rollout`, written by the supervisor: what the instances of the model NAME have to do (`Assignment`)
- `INSTANCE.PID.tally`, written by an instance about once a second: what it has counted (`InstanceTally`)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from graphkiln_backend.graph.decoding import decode, encode_json
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.system.files import write_whole

# Latencies are counted in buckets whose limits grow by 2^(1/8), 9%.
_STEPS = 8
_FIRST_S = 1e-5
_BUCKETS = 27 * _STEPS  # up to 1,300 s
_MOST_EXAMPLES = 20
_CANDIDATE, _ASSIGNMENT, _TALLY = ".candidate", ".rollout", ".tally"

_T = TypeVar("_T", "Assignment", "InstanceTally")


def candidate_name(model: str) -> str:
    """Name of the model that serves the candidate of another model."""
    return f"{model}{_CANDIDATE}"


def tried_model(name: str) -> str:
    """Name of the model that a candidate belongs to; empty if this is not the name of one."""
    return name.removesuffix(_CANDIDATE) if name.endswith(_CANDIDATE) else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Task of a model's instances in a rollout.

    Attributes:
        serial: Serial of the change; counts begin anew with each.
        candidate: The version that is tried.
        compared: Share of the requests to compare, 0..1.
        answered: Share of the requests that the candidate answers, 0..1.
        deadline_s: Time limit for an answer of the candidate to a user's request.
        host: Host of tritonserver's own HTTP service, behind the edge if there is one.
        port: Its port.
        headers: Headers for restricted endpoints, which may hold the admin key.
        most_bytes: Size of the largest request that this service takes; 0 for any.
    """

    serial: int
    candidate: int
    host: str
    port: int
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    most_bytes: int = 0
    compared: float = 0.0
    answered: float = 0.0
    deadline_s: float = 1.0


@dataclass(kw_only=True, slots=True)
class Latencies:
    """Histogram of durations.

    Attributes:
        counts: Durations by bucket; the buckets after the last one are empty.
    """

    counts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        """Count a duration."""
        bucket = 0 if seconds <= _FIRST_S else min(_BUCKETS - 1, int(math.log2(seconds / _FIRST_S) * _STEPS) + 1)
        counts = [*self.counts, *([0] * (bucket + 1 - len(self.counts)))]
        counts[bucket] += 1
        self.counts = tuple(counts)

    def merge(self, other: Latencies) -> None:
        """Add the durations of another histogram."""
        size = max(len(self.counts), len(other.counts))
        pairs = zip(_filled(self.counts, size), _filled(other.counts, size), strict=True)
        self.counts = tuple(mine + theirs for mine, theirs in pairs)

    def quantile(self, share: float) -> float:
        """Upper limit in seconds of the bucket with this quantile; 0 without durations."""
        left = share * self.total
        for bucket, count in enumerate(self.counts):
            left -= count
            if count and left <= 0:
                return self.limit_of(bucket)
        return 0.0

    @staticmethod
    def limit_of(bucket: int) -> float:
        """Upper limit of a bucket in seconds."""
        return _FIRST_S * math.exp2(bucket / _STEPS)

    def longer_than(self, seconds: float) -> int:
        """Number of durations in the buckets that are wholly above a duration."""
        return sum(count for bucket, count in enumerate(self.counts) if bucket and self.limit_of(bucket - 1) >= seconds)

    @property
    def p50(self) -> float:
        """Median in seconds."""
        return self.quantile(0.5)

    @property
    def p99(self) -> float:
        """99th percentile in seconds."""
        return self.quantile(0.99)


def _filled(counts: Sequence[int], size: int) -> list[int]:
    return [*counts, *([0] * (size - len(counts)))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A request on which the two versions decide differently.

    Attributes:
        request: Id of the request; empty if it has none.
        serving: Decision of the serving version, in a few words.
        candidate: Decision of the candidate.
        at: Seconds since the epoch.
    """

    request: str
    serving: str
    candidate: str
    at: float = 0.0


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts of requests since the last change of the rollout.

    Attributes:
        compared: Requests that both versions answered; the sum of the next three.
        agreed: Requests with the same decision.
        disagreed: Requests with different decisions.
        undecided: Requests whose decision is within the noise of the policy, such as ties.
        answered: Requests that the candidate answered for the user (`traffic`).
        dropped: Copies that were not sent, because earlier ones were still under way.
        failed: Requests on which the candidate failed or was late; the serving version answered those of users.
        failed_in_a_row: The last failures, since a success.
        failure: The last failure.
        waiting_s: Time for which the candidate has not answered a copy now.
        serving_latency: Computing times of single requests by the serving version.
        candidate_latency: Computing times of single requests by the candidate.
        examples: The latest disagreements.
    """

    compared: int = 0
    agreed: int = 0
    disagreed: int = 0
    undecided: int = 0
    answered: int = 0
    dropped: int = 0
    failed: int = 0
    failed_in_a_row: int = 0
    failure: str = ""
    waiting_s: float = 0.0
    serving_latency: Latencies = field(default_factory=Latencies)
    candidate_latency: Latencies = field(default_factory=Latencies)
    examples: tuple[Example, ...] = ()

    @property
    def requests(self) -> int:
        """Requests that the candidate was given."""
        return self.compared + self.answered + self.failed

    def merge(self, other: Tally) -> None:
        """Add the counts of another instance."""
        for name in ("compared", "agreed", "disagreed", "undecided", "answered", "dropped", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failed_in_a_row = max(self.failed_in_a_row, other.failed_in_a_row)
        self.waiting_s = max(self.waiting_s, other.waiting_s)
        self.failure = other.failure or self.failure
        self.serving_latency.merge(other.serving_latency)
        self.candidate_latency.merge(other.candidate_latency)
        examples = sorted((*self.examples, *other.examples), key=lambda example: example.at)
        self.examples = tuple(examples[-_MOST_EXAMPLES:])


@dataclass(kw_only=True, slots=True)
class InstanceTally(Tally):
    """Counts of one instance.

    Attributes:
        model: Name of the instance's model: that of the rollout, or its candidate.
        serial: Serial of the change since which it counts.
    """

    model: str
    serial: int


def assignment_path(folder: Path, model: str) -> Path:
    """Path of the assignment of a model's instances."""
    return folder / f"{model}{_ASSIGNMENT}"


def tally_path(folder: Path, instance: str, pid: int) -> Path:
    """Path of the counts of an instance."""
    return folder / f"{instance}.{pid}{_TALLY}"


def read_assignment(folder: Path, model: str) -> Assignment | None:
    """Read the assignment of a model's instances; None without one."""
    return _read(Assignment, assignment_path(folder, model))


def read_tallies(folder: Path, model: str, serial: int) -> Tally:
    """Add the counts of all instances of a model and of its candidate since a change."""
    tally = Tally()
    for path in sorted(folder.glob(f"*{_TALLY}")):
        part = _read(InstanceTally, path)
        if part and part.serial == serial and part.model in {model, candidate_name(model)}:
            tally.merge(part)
    return tally


def write_file(path: Path, content: Assignment | InstanceTally) -> None:
    """Write one of the files atomically.

    Raises:
        OSError: It cannot be written.
    """
    write_whole(path, encode_json(content).encode())


def _read(kind: type[_T], path: Path) -> _T | None:
    with suppress(OSError, ValueError, GraphkilnError):
        return decode(kind, json.loads(path.read_bytes()))
    return None
