"""Outcomes of measurements as JSON data, and back. JSON has no infinity: it is written as null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from graphkiln.reporting.json_text import finite
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.trials import Bare, Failed, LoadShape, Measured

Outcome = Bare | Measured | Failed
_KINDS: dict[str, type[Outcome]] = {"bare": Bare, "measured": Measured, "failed": Failed}
_ENDLESS = ("value", "lower", "upper", "mean_s", "p50_s", "p90_s", "p999_s", "p99_wide_s", "mean_margin_s")
"""Fields that may be infinite; no other field of theirs may be null."""


def outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON data, its kind under `kind`."""
    kind = next(name for name, each in _KINDS.items() if isinstance(outcome, each))
    data: dict[str, Any] = finite({"kind": kind, **asdict(outcome)})
    return data


def outcome_from_json(data: Mapping[str, Any]) -> Outcome:
    """What `outcome_as_json` wrote.

    Raises:
        KeyError: A field is missing, or the kind is unknown.
        TypeError: A field is of another kind.
    """
    values = {key: value for key, value in data.items() if key != "kind"}
    kind = _KINDS[data["kind"]]
    if kind is Bare:
        return Bare(**values | {"batch_s": {int(size): float(each) for size, each in values["batch_s"].items()}})
    if kind is Measured:
        latency = {name: _number(name, value) for name, value in values["latency"].items()}
        latency["p99"] = _interval(values["latency"]["p99"])
        return Measured(**values | {"latency": Latency(**latency), "throughput": _interval(values["throughput"])})
    return Failed(**values)


def load_as_json(load: LoadShape) -> dict[str, float]:
    """A load as JSON data."""
    return asdict(load)


def _interval(data: Mapping[str, Any]) -> Interval:
    return Interval(**{name: _number(name, value) for name, value in data.items()})


def _number(name: str, value: Any) -> Any:
    return math.inf if value is None and name in _ENDLESS else value
