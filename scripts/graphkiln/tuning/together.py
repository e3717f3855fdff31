"""Several models on one machine: each searched alone for each number of cores, then chosen and measured together.

What was chosen is served by one server, which gets the requests of all models at once.
The rate that is promised is the one that held together: models that share a machine share its caches and its memory
bandwidth, too, and what each does alone is only where the choice comes from.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from graphkiln.story.server import start_server
from graphkiln.tuning.candidate import INSTANCES, THREADS, Candidate
from graphkiln.tuning.journal import Journal
from graphkiln.tuning.local_trials import FLAGS, serve_as
from graphkiln.tuning.machine_faults import excused, oom_kills
from graphkiln.tuning.records import outcome_as_json, outcome_from_json
from graphkiln.tuning.served_candidate import ServedCandidate
from graphkiln.tuning.serving_keys import changes_of
from graphkiln.tuning.sharing import Plan, Response, responses_of, share_out
from graphkiln.tuning.space import Space
from graphkiln.tuning.staging import stage
from graphkiln.tuning.statistics import requests_needed
from graphkiln.tuning.trials import Bare, Failed, Measured, OpenLoop
from graphkiln.tuning.tuner import Progress, Tuning
from graphkiln_backend.cache.settings import user_cache_folder
from graphkiln_backend.graph.errors import GraphkilnError, InvalidInput, MeasurementError
from graphkiln_backend.server.memory_limit import free_memory
from graphkiln_backend.system.owned_folder import OwnedFolder
from graphkiln_client.load_processes import record_load

# Several models in one server: each with its configuration, all of them loaded at the same time.

_DEADLINE_S = 180.0
_READY_S = 60.0
"""Load generators of all models wait so long for each other."""

Outcomes = dict[str, Measured | Failed]
MeasureTogether = Callable[[Mapping[str, float], float, int], Outcomes]
"""Rates by model, seconds and a seed -> what each model did."""


@contextmanager
def serve_together(tunings: Mapping[str, Tuning], plan: Plan) -> Iterator[MeasureTogether]:
    """One server with all models of a plan, started at the first measurement.

    Args:
        tunings: Model -> its subject, and what requests hold.
        plan: The configurations.
    """
    with ExitStack() as stack:
        served: dict[str, ServedCandidate] = {}
        ready = threading.Barrier(len(plan.responses))

        def measure(rates: Mapping[str, float], seconds: float, seed: int) -> Outcomes:
            try:
                if not served:
                    served.update(_start(tunings, plan, stack, partial(_await_all, ready)))
            except GraphkilnError as error:
                return dict.fromkeys(rates, excused(Failed(reason=str(error)), oom_kills()))
            ready.reset()
            with ThreadPoolExecutor(len(rates)) as pool:
                loads = {
                    name: pool.submit(_load, served[name], OpenLoop(rate), seconds, seed, ready)
                    for name, rate in rates.items()
                }
                return {name: load.result() for name, load in loads.items()}

        yield measure


def _load(
    served: ServedCandidate, load: OpenLoop, seconds: float, seed: int, ready: threading.Barrier
) -> Measured | Failed:
    try:
        return served.measure(load, seconds, seed)
    except GraphkilnError as error:
        return Failed(reason=str(error))
    finally:
        ready.abort()  # one that could not begin keeps no other one waiting


def _await_all(ready: threading.Barrier) -> None:
    """Waits until the load generators of all models can send their requests, or one of them cannot."""
    with suppress(threading.BrokenBarrierError):
        ready.wait(_READY_S)


def _start(
    tunings: Mapping[str, Tuning], plan: Plan, stack: ExitStack, when_ready: Callable[[], None]
) -> dict[str, ServedCandidate]:
    stores: list[Path] = []
    for name, response in plan.responses.items():
        subject = tunings[name].subject
        stores.append(stack.enter_context(stage(subject, changes_of(response.candidate, subject))))
    log = stack.enter_context(OwnedFolder()).path / "server.log"
    flags = (*FLAGS, f"--load-deadline={_DEADLINE_S:g}")
    server = stack.enter_context(start_server(*stores, flags=flags, log=log, deadline_s=_DEADLINE_S))
    return {
        name: serve_as(
            response.candidate,
            name,
            server,
            replace(tunings[name].loading, record=partial(record_load, when_ready=when_ready)),
        )
        for name, response in plan.responses.items()
    }


_ALONE = 0.8
"""Share of the budget for the models alone; the rest is for all of them together."""
_TRIES, _STEP, _LEAST_STEP = 8, 0.85, 0.1
"""How often a rate is tried, what it is multiplied with from one to the next, and the least of that."""
_SHORTEST_S, _LONGEST_S, _SLOWER = 5.0, 30.0, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """What was found for several models.

    Attributes:
        plan: A configuration for each, by what each did alone.
        rate: Requests per second of all models together that held; None where none did.
        measured: What each model did at that rate, or at the last one that was tried.
        reason: Why no rate held; empty where one did.
        spent_s: Of the budget, by all searches and measurements.
    """

    plan: Plan
    rate: float | None
    measured: Mapping[str, Measured | Failed]
    reason: str
    spent_s: float


def core_counts(cores: int, models: int) -> list[int]:
    """Numbers of cores that one of several models may get: powers of two, and all that the others leave.

    Raises:
        InvalidInput: There are more models than cores.
    """
    most = cores - models + 1
    if most < 1:
        raise InvalidInput(
            f"{models} models on {cores} cores: each needs one of its own", hint="tune fewer models together"
        )
    return sorted({*(1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most), most})


def with_cores(space: Space, cores: int) -> Space:
    """The part of a space whose threads keep exactly so many cores busy."""
    return replace(space, constraints=(*space.constraints, partial(_refuse_others, cores=cores)))


def _refuse_others(candidate: Candidate, *, cores: int) -> str:
    used = candidate.number(THREADS) * candidate.number(INSTANCES)
    return "" if used == cores else f"threads x instances is not {cores}"


def tune_together(
    tunings: Mapping[str, Tuning], shares: Mapping[str, float], budget_s: float, report: Callable[[str, Progress], None]
) -> Together:
    """Searches, shares out, and measures together.

    Args:
        tunings: Model -> what is to be found out; their budgets are set here.
        shares: Model -> its part of all requests.
        budget_s: Seconds for everything.
        report: Told of each measurement of a single model, with its name.

    Raises:
        InvalidInput: The shares are not those of the models, or there are too few cores.
        MeasurementError: A model meets the target with no configuration, or they do not fit together.
    """
    cores = min(each.subject.cores for each in tunings.values())
    parts = _parts(tunings, core_counts(cores, len(tunings)))
    each_s = _ALONE * budget_s / max(1, sum(map(len, parts.values())))
    responses: dict[str, list[Response]] = {}
    spent_s = 0.0
    for name, own in parts.items():
        responses[name] = []
        for tuning in own:
            result = replace(tuning, budget_s=each_s, proves=False).run(partial(report, name))  # together, they are
            responses[name] += responses_of(result)
            spent_s += result.spent_s
    plan = share_out(responses, shares, cores=cores, memory_bytes=free_memory())
    prover = Prover(tunings=tunings, shares=_scaled(shares), left_s=budget_s - spent_s)
    with prover.open_journal(plan) as journal, serve_together(tunings, plan) as measure:
        rate, measured, reason = prover.prove(plan, measure, journal)
    return Together(plan=plan, rate=rate, measured=measured, reason=reason, spent_s=spent_s + prover.spent_s)


def _parts(tunings: Mapping[str, Tuning], counts: Sequence[int]) -> dict[str, list[Tuning]]:
    """The searches of each model, one for each number of cores that it has candidates for."""
    found: dict[str, list[Tuning]] = {}
    for name, tuning in tunings.items():
        spaces = {count: with_cores(tuning.spanned.space, count) for count in counts}
        found[name] = [
            replace(tuning, spanned=replace(tuning.spanned, space=space), limit=f"{count} cores")
            for count, space in spaces.items()
            if space.candidates
        ]
        if not found[name]:
            raise InvalidInput(
                f"no candidate of {name} keeps {' or '.join(map(str, counts))} cores busy",
                hint="fix fewer keys, or let threads and instances vary",
            )
    return found


def _scaled(shares: Mapping[str, float]) -> dict[str, float]:
    whole = sum(shares.values())
    return {name: share / whole for name, share in shares.items()}


@dataclass(kw_only=True)
class Prover:
    """Measures a plan at lower and lower rates, until every model meets the target.

    Attributes:
        tunings: Model -> what is to be found out.
        shares: Model -> its part of all requests; their sum is 1.
        left_s: Of the budget; one measurement is made whatever it says.
        spent_s: What was measured took so long, in earlier runs of the command, too.
    """

    tunings: Mapping[str, Tuning]
    shares: Mapping[str, float]
    left_s: float
    spent_s: float = 0.0

    def open_journal(self, plan: Plan) -> Journal:
        """The journal of exactly this plan."""
        identity = {
            "together": {name: response.candidate.as_json() for name, response in sorted(plan.responses.items())},
            "shares": dict(sorted(self.shares.items())),
            "models": {name: tuning.identity() for name, tuning in sorted(self.tunings.items())},
        }
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        folder = next(iter(self.tunings.values())).folder or user_cache_folder("graphkiln-tune")
        return Journal(folder / f"together-{digest}.jsonl", identity)

    def prove(
        self, plan: Plan, measure: MeasureTogether, journal: Journal
    ) -> tuple[float | None, Mapping[str, Measured | Failed], str]:
        """The rate that held, what each model did, and why none held."""
        rate, reason, outcomes = plan.rate, "the budget was spent before they were measured together", Outcomes()
        p99_s = next(iter(self.tunings.values())).target.p99_s
        for number in range(_TRIES):
            if number and self.spent_s >= self.left_s:
                return None, outcomes, f"{reason}, and the budget is spent"
            outcomes = self._once(rate, number, measure, journal)
            reason = _objection(outcomes, p99_s)
            if not reason:
                return rate, outcomes, ""
            if any(isinstance(each, Failed) for each in outcomes.values()):
                return None, outcomes, reason  # another rate makes nothing load, and no answer right
            rate = _lowered(rate, outcomes, self.shares)
        return None, outcomes, reason

    def _once(self, rate: float, number: int, measure: MeasureTogether, journal: Journal) -> Outcomes:
        rates = {name: float(f"{rate * share:.4g}") for name, share in self.shares.items()}
        for event in journal.events:
            outcomes = {name: _loaded(each) for name, each in event["outcomes"].items()}
            if event["rates"] == rates and event["number"] == number and not _may_pass(outcomes):
                self.spent_s += event["took_s"]
                return outcomes
        seconds = min(_LONGEST_S, max(_SHORTEST_S, requests_needed(_SLOWER) / min(rates.values())))
        begun_s = time.monotonic()
        outcomes = measure(rates, seconds, number)
        took_s = time.monotonic() - begun_s
        self.spent_s += took_s
        found = {name: outcome_as_json(each) for name, each in outcomes.items()}
        journal.append({"rates": rates, "number": number, "took_s": took_s, "outcomes": found})
        return outcomes


def _lowered(rate: float, outcomes: Outcomes, shares: Mapping[str, float]) -> float:
    """What to try after a rate that did not hold: less than that, and less than what was answered of it.

    Models that share the cores with each other and with the load generator may answer a third of what they did alone;
    what they do answer under too much load shows that at once.
    """
    answered = [each.throughput.value / shares[name] for name, each in outcomes.items() if isinstance(each, Measured)]
    return max(_STEP * min(rate, *answered), _LEAST_STEP * rate)


def _may_pass(outcomes: Outcomes) -> bool:
    """Whether the machine may be to blame that a model failed."""
    return any(isinstance(each, Failed) and each.passing for each in outcomes.values())


def _loaded(data: Mapping[str, object]) -> Measured | Failed:
    outcome = outcome_from_json(data)
    if isinstance(outcome, Bare):
        raise MeasurementError("the journal holds a bare session in the place of a measurement", hint="delete it")
    return outcome


def _objection(outcomes: Mapping[str, Measured | Failed], p99_s: float) -> str:
    """Which model does not meet the target, and why, those that failed first; empty where all do."""
    judged = sorted(outcomes.items(), key=lambda each: (not isinstance(each[1], Failed), each[0]))
    for name, outcome in judged:
        if isinstance(outcome, Failed):
            return f"{name}: {outcome.reason}"
        if not outcome.keeps_up:
            reached = f"{outcome.throughput.value:.3g} of {outcome.due_per_s:.3g} requests per second"
            return f"{name}: answers {reached} beside the others"
        if outcome.latency.p99_at_most_s > p99_s:
            return f"{name}: p99 of {outcome.latency.p99.value * 1e3:.3g} ms beside the others"
    return ""
