"""A run of the fuzzer: the server, the neighbors, the cases, and the report."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soaking.fuzzing import Fuzzer, FuzzLog, neighbors_failed
from soaking.guard import guarded_folder
from soaking.ledger import Ledger, Outcome
from soaking.models import build_store
from soaking.modes import LIMIT_FLAGS, STORE
from soaking.readiness import every_model_answers
from soaking.service import Service
from soaking.soak import start_service
from soaking.traffic import Traffic

_NEIGHBORS = 2
_WIDTH = 80
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class FuzzResult:
    """What a run of the fuzzer has seen.

    Attributes:
        seed: Of the choice of cases.
        seconds: How long it took.
        log: What became of the cases.
        counts: Number of requests by kind and verdict, the neighbors' too.
        bad: Wrong answers and requests that were lost.
        neighbors: What neighbors were refused while the server was up.
        sound: Whether every version answered rightly over both protocols when all was over.
    """

    seed: int
    seconds: float
    log: FuzzLog
    counts: dict[str, dict[str, int]]
    bad: list[Outcome]
    neighbors: list[Outcome]
    sound: bool


def fuzz(count: int, seed: int, keep_log: Path | None = None) -> FuzzResult:
    """Sends cases to a server made on the spot.

    Args:
        count: How many.
        seed: Of their choice.
        keep_log: Where the service's log is copied to.

    Raises:
        MeasurementError: The service could not be started.
    """
    ledger = Ledger()
    with ExitStack() as stack:
        folder = stack.enter_context(guarded_folder("soak-"))
        build_store(folder / STORE)
        service = Service(folder, folder / STORE, *LIMIT_FLAGS)
        stack.callback(service.end)
        if keep_log:
            keep_log.write_bytes(b"")
            stack.callback(service.append_log, keep_log)
        start_service(service)
        neighbors = Traffic(service, ledger, seed, senders=_NEIGHBORS)
        begun = time.monotonic()
        with Fuzzer(service, ledger) as fuzzer:
            neighbors.start()
            fuzzer.run(count, seed)
            neighbors.stop()
        sound = every_model_answers(service)
    return FuzzResult(
        seed=seed,
        seconds=time.monotonic() - begun,
        log=fuzzer.log,
        counts=ledger.counts(),
        bad=ledger.failures("wrong", "lost"),
        sound=sound,
        neighbors=neighbors_failed(ledger.failures("refused"), fuzzer.log.windows),
    )


def fuzz_failures(result: FuzzResult) -> list[str]:
    """Why the run has failed; empty when it has not."""
    checks = {
        f"{len(result.bad)} wrong answers or requests without an answer": result.bad,
        f"{len(result.neighbors)} requests of neighbors failed while the server was up": result.neighbors,
        f"{len(result.log.refused)} valid requests were refused": result.log.refused,
        "not every version answers rightly at the end": not result.sound,
        f"the supervisor gave up {result.log.gave_up} times": result.log.gave_up,
    }
    return [text for text, failed in checks.items() if failed]


def fuzz_to_json(result: FuzzResult) -> dict[str, Any]:
    """Everything, as plain data."""
    log = result.log
    return {
        "seed": result.seed,
        "seconds": result.seconds,
        "cases": sum(log.sent.values()),
        "sent": dict(log.sent),
        "statuses": {f"{kind}: {status}": count for (kind, status), count in sorted(log.statuses.items())},
        "killers": log.killers,
        "refused": log.refused,
        "sound": result.sound,
        "recoveries": log.recoveries,
        "gave_up": log.gave_up,
        "counts": result.counts,
        "bad": [str(each) for each in result.bad],
        "neighbors": [str(each) for each in result.neighbors],
        "failures": fuzz_failures(result),
    }


def fuzz_to_text(result: FuzzResult) -> str:
    """The report for a terminal of 80 columns."""
    log = result.log
    back = f", back after {max(log.recoveries):.1f} s at worst" if log.recoveries else ""
    lines = [f"fuzzer: {sum(log.sent.values())} cases in {result.seconds:.0f} s, seed {result.seed}", ""]
    for kind, count in sorted(log.sent.items()):
        statuses = Counter({status: n for (of, status), n in log.statuses.items() if of == kind})
        listed = ", ".join(f"{n} {status}" for status, n in statuses.most_common())
        lines += textwrap.wrap(f"{kind:<20}{count:>7}: {listed}", _WIDTH, subsequent_indent=" " * 29)
    lines += ["", f"the server was brought back {len(log.killers)} times{back}"]
    lines += [f"neighbors: {counts}" for name, counts in result.counts.items() if name.startswith("client")]
    for title, texts in (("ended by", log.killers), ("refused", log.refused), ("bad", list(map(str, result.bad)))):
        lines += [line for text in texts[:_SHOWN] for line in textwrap.wrap(f"{title}: {text}", _WIDTH)[:4]]
    failures = fuzz_failures(result)
    return "\n".join([*lines, "", *(f"FAILED: {text}" for text in failures)] if failures else [*lines, "", "passed"])
