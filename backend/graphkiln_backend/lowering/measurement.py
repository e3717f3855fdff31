"""Which candidate is the fastest on this machine: measured once, and remembered in the artifact cache."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from graphkiln_backend.cache.reservation import Reservation
from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import CacheError, ExecutionError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.lowering.made_up import MadeUp
from graphkiln_backend.lowering.plan import pick_fastest
from graphkiln_backend.lowering.warmup import feeds_of

_log = logging.getLogger("graphkiln.lowering")

_FILE = "measured.json"
_RUNS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A comparison of candidates; `measured.json` keeps it under these names.

    Attributes:
        chosen: Name of the fastest one.
        rates: Samples per second of each; empty where the graph could not be run.
    """

    chosen: str
    rates: dict[str, float]


def read_measurement(reservation: Reservation | None) -> Measurement | None:
    """What was measured before, or None.

    Args:
        reservation: As `Artifacts.reserve_choice` gives it.
    """
    path = reservation.path if reservation else None
    return decode(Measurement, json.loads((path / _FILE).read_bytes())) if path else None


def keep_measurement(reservation: Reservation | None, measurement: Measurement) -> None:
    """Keeps a measurement for later starts; where it cannot be written, that is logged: it holds for this one.

    Args:
        reservation: As `Artifacts.reserve_choice` gives it.
        measurement: What to keep.
    """
    if reservation is None:
        return
    try:
        with reservation.write() as folder:
            (folder / _FILE).write_text(json.dumps(encode(measurement)))
    except CacheError as error:
        _log.warning("the choice of an engine is not remembered: %s", error)


def measure(sessions: Mapping[str, Session], samples: GoldenSamples | MadeUp | None, size: int) -> Measurement:
    """Compares sessions.

    Args:
        sessions: At least one, by name.
        samples: Golden samples to repeat, or how to make some up; None where neither is known.
        size: The batch size.

    Returns:
        The comparison; a graph that cannot be run cannot be timed: the first session is chosen.
    """
    if samples is None:
        return Measurement(chosen=next(iter(sessions)), rates={})
    try:
        times = {name: _time_s(session, samples, size) for name, session in sessions.items()}
    except (ExecutionError, SignatureError):
        return Measurement(chosen=next(iter(sessions)), rates={})
    chosen = list(times)[pick_fastest(list(times.values()))]
    return Measurement(chosen=chosen, rates={name: round(size / seconds, 1) for name, seconds in times.items()})


def _time_s(session: Session, samples: GoldenSamples | MadeUp, size: int) -> float:
    """The fastest of some runs, in seconds."""
    feeds = feeds_of(samples, session.signature, size)
    times = []
    for _ in range(_RUNS):
        begun = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - begun)
    return min(times)
