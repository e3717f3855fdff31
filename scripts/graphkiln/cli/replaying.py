"""Answer recorded requests with the session of a version, and count the differences."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, InvalidInput
from graphkiln_backend.lowering.acceptance import limits_of
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.proof.answers import AnswerComparison, AnswerDifference
from graphkiln_backend.proof.policy import BY_PRECISION, Limits
from graphkiln_backend.repository.records import Record, RecordedRequest

MOST_SHOWN = 50  # requests whose inputs are kept for the report
_UPDATE_EVERY = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedRequest:
    """A request whose decision changed, or whose numbers are outside the policy."""

    request_id: str
    time: str
    version: int
    difference: AnswerDifference


@dataclass(kw_only=True, slots=True)
class Replayed:
    """Result of a replay.

    Attributes:
        config: Configuration of the session that answered.
        contract: Contract of the version that answered.
        limits: Names of the policy rows that were applied.
        count: Requests that were answered again.
        same: Those with the same decision.
        equal: Those with the same bits.
        outside: Those with numbers outside the policy.
        digests: Requests that were left out, because only digests of their inputs were recorded.
        versions: Requests by the version that answered the user.
        first: Time of the oldest request.
        last: Time of the newest request.
        changed: Requests with another decision or numbers outside the policy.
        worst: Severity, number, request and inputs of the worst of these.
    """

    config: SessionConfig
    contract: Contract
    limits: set[str] = field(default_factory=set)
    count: int = 0
    same: int = 0
    equal: int = 0
    outside: int = 0
    digests: int = 0
    versions: Counter[int] = field(default_factory=Counter)
    first: str = ""
    last: str = ""
    changed: list[ChangedRequest] = field(default_factory=list)
    worst: list[tuple[tuple[bool, float, float], int, ChangedRequest, Mapping[str, AnyArray]]] = field(
        default_factory=list
    )

    def add(self, request: RecordedRequest, inputs: Mapping[str, AnyArray], difference: AnswerDifference) -> None:
        """Count a request."""
        self.count += 1
        self.same += difference.same
        self.equal += difference.equal
        self.outside += not difference.within
        self.versions[request.version] += 1
        self.first = min(self.first or request.time, request.time)
        self.last = max(self.last, request.time)
        if difference.same and difference.within:
            return
        changed = ChangedRequest(
            request_id=request.request_id, time=request.time, version=request.version, difference=difference
        )
        self.changed.append(changed)
        entry = (difference.severity, -self.count, changed, inputs)
        (heapq.heappush if len(self.worst) < MOST_SHOWN else heapq.heappushpop)(self.worst, entry)


def replay_record(
    record: Record,
    deployment: Deployment,
    proven: ProvenSession,
    *,
    since_ns: int = 0,
    limit: int | None = None,
    update: Callable[..., None] | None = None,
) -> Replayed:
    """Answer requests with a version.

    Args:
        record: The requests.
        deployment: The version.
        proven: Its session; it is closed.
        since_ns: Leave out requests before this time, in nanoseconds since 1970.
        limit: Number of the newest requests to answer; None for all.
        update: Shows the progress; None for nothing.

    Raises:
        InvalidInput: There is no request of this time, or only digests of inputs were recorded.
    """
    replayed = Replayed(config=proven.config, contract=deployment.version.contract)
    own = limits_of(deployment.saved, proven.config)
    contract = deployment.version.contract
    total = record.count()
    wanted = range(max(0, total - limit), total) if limit else range(total)
    with proven.session as session:
        for number, request in enumerate(record.requests(wanted)):
            if update and number % _UPDATE_EVERY == 0:
                update(completed=number, total=len(wanted))
            if request.time_ns < since_ns:
                continue
            if request.inputs is None:
                replayed.digests += 1
                continue
            # The answers differ by at least the rounding of the lower precision.
            recorded = BY_PRECISION.get(request.precision, own)  # type: ignore[call-overload]
            limits: Limits = max(own, recorded, key=lambda row: row.relative_l2)
            replayed.limits.add(limits.name)
            outputs = _answer(session, request, request.inputs)
            if isinstance(outputs, AnswerDifference):
                replayed.add(request, request.inputs, outputs)
            else:
                difference = AnswerComparison(contract, limits).compare(request.outputs, outputs)
                replayed.add(request, request.inputs, difference)
    if replayed.digests and not replayed.count:
        raise InvalidInput(
            f"nothing can be replayed: {record.path} holds only digests of the inputs",
            hint="serve with --record-inputs full",
        )
    if not replayed.count:
        raise InvalidInput(f"{record.path} holds no request of this time", hint=f"it holds {total}: leave out --since")
    return replayed


def _answer(
    session: Session, request: RecordedRequest, inputs: Mapping[str, AnyArray]
) -> Mapping[str, AnyArray] | AnswerDifference:
    """Compute the recorded outputs, as far as the version has them."""
    names = [spec.name for spec in session.signature.outputs if spec.name in request.outputs]
    try:
        session.signature.check(inputs)
        return session.run(inputs, names) if names else {}
    except GraphkilnError as error:
        text = f"not answered: {error}"
        return AnswerDifference(same=False, within=False, relative_l2=math.inf, share=1.0, text=text)
