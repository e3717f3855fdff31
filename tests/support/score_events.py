"""The events of a small run, and a manual clock."""

from __future__ import annotations

from dataclasses import dataclass

from graphkiln_backend.scoring.messages import (
    Event,
    NodeJoined,
    RunFinished,
    RunPlanned,
    StageTimes,
    UnitCommitted,
    UnitReport,
    UnitRetried,
    WorkerEnded,
    WorkerFacts,
    WorkerReady,
)

PLANNED = RunPlanned(configuration="c0ffee", units=10, rows=1000, size_bytes=5000, done_units=4, done_rows=400)
SELF_TEST = (
    '{"step":"fp32","samples":8,"batch_sizes":[1],"relative_l2":2e-7,"relative_l2_limit":1e-6,'
    '"worst_element":1e-6,"worst_element_limit":null,"verdict":"fp32: PASS"}'
)
FACTS = WorkerFacts(
    node="node-1", pid=7, session="onnxruntime on cpu in fp32", self_test=SELF_TEST, seconds=1.5, version="0.1.0"
)


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def committed(unit: str, rows: int = 100, errors: int = 0, **more: object) -> UnitCommitted:
    report = UnitReport(unit_id=unit, rows=rows, errors=errors, seconds=2.0, **more)  # type: ignore[arg-type]
    return UnitCommitted(worker="worker-1", report=report)


TIMES = StageTimes(read_s=1.0, decode_s=2.0, compute_s=5.0, commit_s=2.0)
RETRIED = UnitRetried(unit_id="b", path="photos", reason="its worker ended")
ENDED = WorkerEnded(worker="worker-1", node="node-1", reason="killed by signal 11")
RUN: tuple[Event, ...] = (
    PLANNED,
    NodeJoined(node="node-1", workers=1),
    WorkerReady(worker="worker-1", facts=FACTS),
    committed("a", times=TIMES),
    RETRIED,
    ENDED,
    WorkerReady(worker="worker-2", facts=FACTS),
    committed("b", errors=3, quarantined={"cats/7.jpg": "it ends its worker: signal 11"}, twin=True),
    RunFinished(),
)
