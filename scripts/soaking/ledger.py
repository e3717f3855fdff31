"""What became of every request: right, wrong, refused with an error, or lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from graphkiln_backend.graph.errors import ClientError, DeadlineExceeded

Verdict = Literal["right", "wrong", "refused", "lost"]

DEADLINE_S = 30.0
"""Of every request. One that has neither an answer nor an error by then is lost."""
GRACE_S = 15.0
"""How much later than its deadline a call may return on a busy machine."""


class WrongAnswer(Exception):
    """An answer that is not the reference's."""


class NoAnswer(Exception):
    """A request had neither an answer nor an error within its deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one request ended, unless it was answered rightly.

    Attributes:
        sender: What sent it.
        verdict: How it ended.
        detail: Which error, or what is wrong with the answer.
        begun: When it was sent; monotonic seconds.
        ended: When it was over.
    """

    sender: str
    verdict: Verdict
    detail: str
    begun: float
    ended: float


@dataclass
class Ticket:
    """Of one request, for its sender.

    Attributes:
        verdict: How it ended, once it has.
    """

    verdict: Verdict = "right"


class Ledger:
    """Counts outcomes, and keeps those that were not right. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, Verdict]] = Counter()
        self._failures: list[Outcome] = []
        self._in_flight: dict[int, tuple[str, float]] = {}
        self._next = 0

    @contextmanager
    def request(self, sender: str) -> Iterator[Ticket]:
        """Around one request and the check of its answer: an exception says how it ended, and goes no further."""
        with self._lock:
            number = self._next
            self._next += 1
            begun = time.monotonic()
            self._in_flight[number] = (sender, begun)
        ticket = Ticket()
        detail = ""
        try:
            yield ticket
        except Exception as error:
            ticket.verdict, detail = judge(error)
        finally:
            self._end(number, sender, ticket.verdict, detail, begun)

    def _end(self, number: int, sender: str, verdict: Verdict, detail: str, begun: float) -> None:
        with self._lock:
            if self._in_flight.pop(number, None) is None:
                return  # it was given up as lost
            self._add(Outcome(sender=sender, verdict=verdict, detail=detail, begun=begun, ended=time.monotonic()))

    def _add(self, outcome: Outcome) -> None:
        self._counts[outcome.sender, outcome.verdict] += 1
        if outcome.verdict != "right":
            self._failures.append(outcome)

    def give_up_on_overdue(self) -> None:
        """Counts requests that are far beyond their deadline as lost."""
        now = time.monotonic()
        with self._lock:
            overdue = {n: entry for n, entry in self._in_flight.items() if now - entry[1] > DEADLINE_S + GRACE_S}
            for number, (sender, begun) in overdue.items():
                del self._in_flight[number]
                self._add(Outcome(sender=sender, verdict="lost", detail="still waiting", begun=begun, ended=now))

    def counts(self) -> dict[str, dict[str, int]]:
        """Number of requests by sender and verdict."""
        with self._lock:
            table: dict[str, dict[str, int]] = {}
            for (sender, verdict), count in sorted(self._counts.items()):
                table.setdefault(sender, {})[verdict] = count
            return table

    def failures(self, *verdicts: Verdict) -> list[Outcome]:
        """What ended with one of these verdicts."""
        with self._lock:
            return [outcome for outcome in self._failures if outcome.verdict in verdicts]

    def errors_between(self, begin: float, end: float) -> Counter[str]:
        """The errors of requests that were under way at some time between two moments."""
        with self._lock:
            return Counter(
                outcome.detail for outcome in self._failures if outcome.ended >= begin and outcome.begun <= end
            )


def judge(error: Exception) -> tuple[Verdict, str]:
    """The verdict on an exception, and its kind in a few words."""
    if isinstance(error, WrongAnswer):
        return "wrong", str(error)[:200]
    if isinstance(error, NoAnswer | DeadlineExceeded | TimeoutError):
        return "lost", f"{type(error).__name__}: {error}"[:200]
    if isinstance(error, ClientError):
        return "refused", " ".join(filter(None, (type(error).__name__, str(error.status or ""))))
    return _judge_foreign(error)


def _judge_foreign(error: Exception) -> tuple[Verdict, str]:
    """Errors of tritonclient and http.client."""
    status = getattr(error, "status", getattr(error, "code", None))  # of tritonclient, of grpc
    code = str(status() if callable(status) else "")
    if "DEADLINE_EXCEEDED" in code:
        return "lost", f"gRPC {code}"
    if code:
        return "refused", f"gRPC {code.removeprefix('StatusCode.')}"
    text = str(error)
    return "refused", text if text.startswith("HTTP ") else type(error).__name__
