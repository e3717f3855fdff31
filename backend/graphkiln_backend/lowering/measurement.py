"""Which candidate is the fastest on this machine: measured once, and remembered in the artifact cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from graphkiln_backend.cache.entry import Reservation
from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.timing import fastest_runs_s
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import CacheError, ExecutionError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.lowering.plan import pick_fastest
from graphkiln_backend.lowering.warmup import SyntheticInputs, feeds_of

_log = logging.getLogger("graphkiln.lowering")

_FILE = "measured.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A comparison of candidates; `measured.json` keeps it under these names.

    Attributes:
        chosen: Name of the fastest one.
        rates: Samples per second of each; empty where the graph could not be run.
    """

    chosen: str
    rates: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Basis:
    """What a choice between candidates was based on.

    Attributes:
        chosen: Name of the candidate that serves.
        rates: Samples per second of each candidate; empty where the graph could not be run.
        batch: The batch size.
        machine: The processor or GPU, and a digest of its instruction sets: on another one all are measured again.
        measured_at: When, in UTC, ISO 8601.
        remembered: Whether an earlier start measured it.
    """

    chosen: str
    rates: dict[str, float]
    batch: int
    machine: str
    measured_at: str
    remembered: bool


def measured_at(reservation: Reservation | None) -> datetime:
    """When what is remembered was measured; now where nothing is.

    Args:
        reservation: As `Artifacts.reserve_choice` gives it.
    """
    path = reservation.path if reservation else None
    return datetime.fromtimestamp((path / _FILE).stat().st_mtime, UTC) if path else datetime.now(UTC)


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


def measure(sessions: Mapping[str, Session], samples: GoldenSamples | SyntheticInputs | None, size: int) -> Measurement:
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
        times = fastest_runs_s(
            {
                name: partial(session.run, feeds_of(samples, session.signature, size))
                for name, session in sessions.items()
            }
        )
    except (ExecutionError, SignatureError):
        return Measurement(chosen=next(iter(sessions)), rates={})
    chosen = list(times)[pick_fastest(list(times.values()))]
    return Measurement(chosen=chosen, rates={name: float(f"{size / seconds:.4g}") for name, seconds in times.items()})
