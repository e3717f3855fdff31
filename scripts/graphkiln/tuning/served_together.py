"""Several models in one server: each with its configuration, all of them loaded at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from graphkiln.story.server import start_server
from graphkiln.tuning.local_trials import FLAGS, serve_as
from graphkiln.tuning.machine_faults import excused, oom_kills
from graphkiln.tuning.served_candidate import ServedCandidate
from graphkiln.tuning.serving_keys import changes_of
from graphkiln.tuning.sharing import Plan
from graphkiln.tuning.staging import stage
from graphkiln.tuning.trials import Failed, Measured, OpenLoop
from graphkiln.tuning.tuner import Tuning
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.owned_folder import OwnedFolder
from graphkiln_client.load_processes import record_load

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
