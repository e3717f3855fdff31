"""A fake finished search, for tests of reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphkiln.tuning import space
from graphkiln.tuning.candidate import Candidate, Value
from graphkiln.tuning.contest import CandidateScore, Point
from graphkiln.tuning.report import document_of
from graphkiln.tuning.requests import read_requests
from graphkiln.tuning.result import Result, Row
from graphkiln.tuning.space import Space, span_space
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import Measured, OpenLoop
from graphkiln.tuning.tuner import Tuning
from graphkiln_backend.engines.base import Support


def measured(rate: float, p99_s: float, **more: Any) -> Measured:
    """Return a measurement at a rate."""
    latency = Latency(
        count=1000, mean_s=p99_s / 3, p50_s=p99_s / 4,
        p99=Interval(p99_s, p99_s * 0.8, p99_s * 1.1),
    )  # fmt: skip
    facts = {
        "latency": latency,
        "memory_bytes": 200 << 20, "server_cores": 1.5, "client_cores": 0.25, "placed": "openvino on cpu in bf16",
        "answers": 7, "seconds": 10.0,
    }  # fmt: skip
    return Measured(throughput=Interval(rate, rate * 0.97, rate * 1.03), **{**facts, **more})


def exact(value: float) -> Interval:
    """Return the interval of a value without noise."""
    return Interval(value, value, value)


def row(candidate: Candidate, rate: float, p99_s: float, lost: str = "", **more: Any) -> Row:
    """Return the row of a candidate with one measurement."""
    point = Point(load=OpenLoop(rate), measured=measured(rate, p99_s, **more))
    scored = CandidateScore(candidate=candidate, score=Interval(rate, rate, rate), points=(point,), lost=lost)
    return Row(scored=scored, score=f"{rate:g} requests per second", limit="the cores: busy")


def finished(of: Space, target: Target, *, met: bool = True) -> Result:
    """Return a search that chose the first of three candidates, or none."""
    default = of.default
    best = default.with_values({"engine": "openvino", "precision": "bf16", "spin": False})
    rows = (
        row(best, 400, 0.03),
        row(default, 200, 0.04, lost="200 requests per second, the chosen one 400"),
        row(default.with_values({"max_batch_size": 4}), 150, 0.02, lost="<b>slower</b> & worse"),
    )
    curve = tuple(
        Point(load=OpenLoop(rate), measured=measured(rate, p99))
        for rate, p99 in ((100, 0.01), (200, 0.012), (300, 0.018), (400, 0.03), (440, 0.2))
    )
    return Result(
        target=target, chosen=rows[0] if met else None, promise=rows[0].best_point if met else None,
        closest=None if met else _missed(rows[2]), default=rows[1], rows=rows, front=(rows[0], rows[2]), exclusions=(),
        curve=curve if met else (), knee=300.0 if met else None, readings=(), notes=("the machine became slower",),
        spent_s=600.0, measurements=42,
    )  # fmt: skip


def _missed(found: Row) -> Row:
    """Return a row that missed the target under all loads."""
    score = found.scored.score
    return replace(found, scored=replace(found.scored, score=Interval(score.value, 0.0, score.upper)))


def span_everything(subject: Subject, p99_s: float = 0.05, *, absent: str = "", lacks: str = "") -> Space:
    """Return the space on a machine without the engine `absent`, and without instructions if `lacks` is a reason."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space, "probe", lambda name, _: Support(ok=name != absent, reason="not installed"))
        patch.setattr(space, "missing_instructions", lambda _: lacks)
        return span_space(subject, p99_s=p99_s)


def only(space: Space, key: str, fixes: Mapping[str, Value]) -> Space:
    """Return the part of a space in which one key varies."""
    stay = {axis.key: axis.values[0] for axis in space.axes if axis.key != key}
    return space.fixed({**stay, **fixes})


def tuning(subject: Subject, folder: Path, **changes: Any) -> Tuning:
    """A search of the example model on a machine with all engines and instructions."""
    facts = {
        "subject": subject, "space": span_everything(subject), "target": Target(p99_s=0.05),
        "requests": read_requests(subject), "folder": folder,
    }  # fmt: skip
    return Tuning(**{**facts, **changes})


def document(subject: Subject, folder: Path, *, met: bool = True) -> dict[str, Any]:
    """Return the JSON document of that search."""
    asked = tuning(subject, folder)
    result = finished(asked.space, asked.target, met=met)
    return document_of(result, asked, "graphkiln tune models/digits --p99 50ms")
