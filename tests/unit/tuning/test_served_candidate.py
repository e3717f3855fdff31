"""A candidate on a server: loaded, watched, judged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphkiln.tuning import measure
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.measure import Loading, Placed, ServedCandidate, describe_generator
from graphkiln.tuning.questions import Questions
from graphkiln.tuning.trials import ClosedLoop, Failed, Measured, OpenLoop
from graphkiln_backend.graph.precision import Precision
from graphkiln_client.load_generator import Recording, _Trace
from graphkiln_client.load_job import Load

GENERATOR = np.random.default_rng(1)
ANSWERS = tuple({"Y": GENERATOR.normal(size=(1, 50)).astype(np.float32)} for _ in range(3))
FEEDS = tuple({"X": np.full((1, 1), number, np.float32)} for number in range(3))
QUESTIONS = Questions(origin="test", feeds=FEEDS, answers=ANSWERS, saved=Precision.FP32)
CANDIDATE = Candidate.of({"engine": "openvino", "precision": "fp32"})


class FakeClient:
    """Answers right, or as it is told."""

    factor = 1.0

    @classmethod
    @contextmanager
    def open(cls, **_: Any) -> Iterator[FakeClient]:
        yield cls()

    def model(self, *_: str) -> FakeClient:
        return self

    def infer(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"Y": ANSWERS[int(feeds["X"][0, 0])]["Y"] * self.factor}


class FakeWatch:
    """A server's processes."""

    dead = ""
    cpu = 1.0

    def death(self) -> str:
        return self.dead

    def cpu_s(self) -> float:
        self.cpu += 1.0
        return self.cpu

    def memory_bytes(self) -> int:
        return 4096


def record(_target: object, _samples: object, load: Load, at_start: Callable[[], None]) -> Recording:
    at_start()
    moments = load.arrivals if load.arrivals is not None else np.arange(0, 2, 0.1)
    responses = [(float(moment), float(moment) + 0.01) for moment in moments]
    return Recording(traces=[_Trace(responses=responses)], begin=0.5, end=0.5 + load.seconds, cpu_s=0.2)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> ServedCandidate:
    monkeypatch.setattr(measure, "Client", FakeClient.open)
    watch: Any = FakeWatch()
    return ServedCandidate(
        candidate=CANDIDATE, model="m", client={"url": "grpc://h:1"}, asking={"url": "http://h:2"},
        loading=Loading(questions=QUESTIONS, record=record), watch=watch,
        placed=Placed(engine="openvino", precision="fp32", device="cpu"),
    )  # fmt: skip


def test_a_rate_is_measured_from_when_requests_were_due(served: ServedCandidate) -> None:
    found = served.measure(OpenLoop(100), 4.0, 1)
    assert isinstance(found, Measured)
    assert found.latency.count == pytest.approx(400, rel=0.2)
    assert found.latency.p99.value == pytest.approx(0.01)
    assert found.throughput.value == pytest.approx(100, rel=0.2)
    assert found.memory_bytes == 4096
    assert found.server_cores is not None
    assert found.client_cores == pytest.approx(0.05)
    assert found.placed == "openvino on cpu in fp32"
    assert found.warning == ""


def test_callers_are_measured_by_their_responses(served: ServedCandidate) -> None:
    found = served.measure(ClosedLoop(1), 1.0, 1)
    assert isinstance(found, Measured)
    assert found.latency.count == 10


def test_another_seed_is_another_load(served: ServedCandidate) -> None:
    counts = {served.measure(OpenLoop(50), 4.0, seed).requests for seed in range(4)}  # type: ignore[union-attr]
    assert len(counts) > 1


def test_wrong_answers_are_out_however_fast(served: ServedCandidate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "factor", 1.01)
    found = served.measure(OpenLoop(100), 1.0, 1)
    assert isinstance(found, Failed)
    assert "its answers under load are wrong: openvino" in found.reason or "answers under load" in found.reason
    assert "relative L2" in found.reason


def test_a_server_that_crashes_is_a_candidate_that_failed(
    served: ServedCandidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeWatch, "dead", "tritonserver was killed or crashed")
    assert served.measure(OpenLoop(100), 1.0, 1) == Failed(reason="under load, tritonserver was killed or crashed")


def test_questions_go_on_where_they_stopped(served: ServedCandidate) -> None:
    served.measure(OpenLoop(100), 1.0, 1)
    first = served._asked
    served.measure(OpenLoop(100), 1.0, 1)
    assert served._asked > first > 0


def test_elsewhere_memory_is_not_known(served: ServedCandidate) -> None:
    served.watch, served.placed = None, None
    found = served.measure(OpenLoop(100), 1.0, 1)
    assert isinstance(found, Measured)
    assert (found.memory_bytes, found.server_cores, found.placed) == (None, None, "")


def test_a_load_generator_that_takes_the_machine_is_told() -> None:
    assert describe_generator(0.9, 2) == ""
    assert describe_generator(1.5, 2) == "the load generator took 75% of the cores"


def test_meters_are_read_while_the_load_lasts(served: ServedCandidate) -> None:
    """What comes after it, such as the end of its processes, would make every figure of a second smaller."""
    read = threading.Event()

    class Watch(FakeWatch):
        def memory_bytes(self) -> int:
            read.set()
            return 4096

    def record_longer(target: object, samples: object, load: Load, at_start: Callable[[], None]) -> Recording:
        recording = record(target, samples, load, at_start)
        assert read.wait(60), "read at the end of the measurement, though the load goes on"
        return recording

    watch: Any = Watch()
    served.watch, served.loading = watch, replace(served.loading, record=record_longer)
    found = served.measure(OpenLoop(100), 0.05, 1)
    assert isinstance(found, Measured)
    assert found.memory_bytes == 4096
    assert watch.cpu == 3.0, "CPU time was read once at each end"
