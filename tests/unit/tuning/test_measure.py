"""Measurement of a served candidate: load, answers, processes and energy."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphkiln.bench.generator import Recording, _Trace
from graphkiln.bench.processes import Load
from graphkiln.story.server import LocalServer
from graphkiln.tuning import measure
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.measure import (
    AnswerWatch,
    Arriving,
    Loading,
    Placed,
    Send,
    ServedCandidate,
    ServerWatch,
    latencies_of,
    read_placement,
    summarize,
)
from graphkiln.tuning.requests import Requests
from graphkiln.tuning.trials import Failed, Measured, OpenLoop
from graphkiln_backend.graph.errors import InvalidInput, Overloaded
from graphkiln_backend.graph.precision import Precision

GENERATOR = np.random.default_rng(1)
ANSWERS = tuple({"Y": GENERATOR.normal(size=(1, 50)).astype(np.float32)} for _ in range(3))
FEEDS = tuple({"X": np.full((1, 1), number, np.float32)} for number in range(3))
REQUESTS = Requests(origin="test", feeds=FEEDS, answers=ANSWERS, saved=Precision.FP32)
CANDIDATE = Candidate.of({"engine": "openvino", "precision": "fp32"})


class FakeClient:
    """A client whose answers are scaled by a factor."""

    factor = 1.0

    @classmethod
    @contextmanager
    def open(cls, _url: str, **_: Any) -> Iterator[FakeClient]:
        yield cls()

    def model(self, *_: str) -> FakeClient:
        return self

    def infer(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"Y": ANSWERS[int(feeds["X"][0, 0])]["Y"] * self.factor}


class FakeWatch:
    """Processes of a server."""

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
    monkeypatch.setattr(measure, "record_load", record)
    watch: Any = FakeWatch()
    return ServedCandidate(
        candidate=CANDIDATE, model="m", server=LocalServer(http_url="http://h:2", grpc_url="grpc://h:1", pid=1),
        loading=Loading(requests=REQUESTS), watch=watch,
        placed=Placed(engine="openvino", precision="fp32", device="cpu"),
    )  # fmt: skip


def test_rate_is_measured(served: ServedCandidate) -> None:
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


def test_wrong_answers_fail(served: ServedCandidate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "factor", 1.01)
    found = served.measure(OpenLoop(100), 1.0, 1)
    assert isinstance(found, Failed)

    assert "wrong answers under load" in found.reason
    assert "relative L2" in found.reason


def test_crashed_server_fails(served: ServedCandidate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWatch, "dead", "tritonserver was killed or crashed")
    assert served.measure(OpenLoop(100), 1.0, 1) == Failed(reason="under load, tritonserver was killed or crashed")


def test_meters_are_read_during_the_load(served: ServedCandidate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later readings would include the shutdown of the load generator."""
    read = threading.Event()

    class Watch(FakeWatch):
        def memory_bytes(self) -> int:
            read.set()
            return 4096

    def record_longer(target: object, samples: object, load: Load, at_start: Callable[[], None]) -> Recording:
        recording = record(target, samples, load, at_start)
        assert read.wait(60), "read at the end of the measurement, before the load ends"
        return recording

    watch: Any = Watch()
    served.watch = watch
    monkeypatch.setattr(measure, "record_load", record_longer)
    found = served.measure(OpenLoop(100), 0.05, 1)
    assert isinstance(found, Measured)
    assert found.memory_bytes == 4096
    assert watch.cpu == 3.0, "CPU time was read once at each end"


# Answers under load.


def answer(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    return ANSWERS[int(feeds["X"][0, 0])]


def watch_of(ask: Send, first: int = 0, rate: float = 0.0) -> AnswerWatch:
    return AnswerWatch(ask, REQUESTS, first, rate, engine="onnxruntime", precision="fp32")


class Asked:
    """A server that answers some requests wrongly and signals a number of requests."""

    def __init__(self, enough: int, wrong: tuple[int, ...] = ()) -> None:
        self.numbers: list[int] = []
        self.enough, self._count, self._wrong = threading.Event(), enough, wrong

    def __call__(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        self.numbers.append(int(feeds["X"][0, 0]))
        if len(self.numbers) >= self._count:
            self.enough.set()
        factor = np.float32(1.01) if len(self.numbers) in self._wrong else np.float32(1)
        return {"Y": answer(feeds)["Y"] * factor}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between checks."""
    monkeypatch.setattr("graphkiln.tuning.measure._PAUSE_S", 0)
    monkeypatch.setattr("graphkiln.tuning.measure._SHARE", 1e9)


@pytest.mark.usefixtures("hurried")
def test_checks_continue_during_the_load() -> None:
    ask = Asked(7)
    with watch_of(ask) as watch:
        assert ask.enough.wait(10)
    assert ask.numbers[:7] == [0, 1, 2, 0, 1, 2, 0]
    assert watch.objection() == ""
    assert watch.checked == len(ask.numbers)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("wrong", [4, 5, 6])
def test_transient_error_is_detected(wrong: int) -> None:
    """The same request is answered correctly before and after."""
    ask = Asked(12, wrong=(wrong,))
    with watch_of(ask) as watch:
        watch._thread.join(10)  # it ends at the first wrong answer
    assert "Y: relative L2" in watch.objection()


@pytest.mark.usefixtures("hurried")
def test_answers_between_refused_requests_are_checked() -> None:
    """Only the first request is answered, wrongly the second time: no block is ever complete."""
    ask = Asked(12, wrong=(4,))

    def some(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        found = ask(feeds)
        if feeds["X"][0, 0]:
            raise Overloaded("too much")
        return found

    with watch_of(some) as watch:
        watch._thread.join(10)
    assert "Y: relative L2" in watch.objection()


def test_no_answer_is_an_objection() -> None:
    def ask(_: Mapping[str, Any]) -> Mapping[str, Any]:
        raise Overloaded("too much")

    with watch_of(ask) as watch:
        pass
    assert "too much" in watch.objection()


# Processes of the server.

METRICS = """# HELP graphkiln_instance_info What the instance serves with
graphkiln_instance_info{device="cpu",engine="openvino",instance="m_0_0",model="m",precision="bf16",version="1"} 1.000000
graphkiln_instance_info{device="cpu",engine="openvino",instance="m_0_1",model="m",precision="fp32",version="1"} 1
graphkiln_instance_info{device="cpu",engine="onnxruntime",instance="n",model="n",precision="fp32",version="1"} 1
nv_inference_count{model="m",version="1"} 7
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen(["bash", "-c", "exec -a tritonserver sleep 60"])
time.sleep(0.2); print(child.pid, flush=True)
try: time.sleep(60)
finally: child.kill()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()
        if process.stdout:
            process.stdout.close()


def test_placement_of_each_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "read_metrics", lambda _: METRICS)
    assert read_placement("http://h:3", "m") == (
        Placed(engine="openvino", precision="bf16", device="cpu"),
        Placed(engine="openvino", precision="fp32", device="cpu"),
    )
    assert read_placement("http://h:3", "other") == ()
    assert str(read_placement("http://h:3", "n")[0]) == "onnxruntime on cpu in fp32"


def test_killed_process_is_named(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout
    child = int(parent.stdout.readline())
    watch = ServerWatch(parent.pid)
    subprocess.run(["kill", "-9", str(child)], check=True)
    end = time.monotonic() + 10
    while not watch.death() and time.monotonic() < end:
        time.sleep(0.01)
    assert watch.death() == "tritonserver was killed or crashed"
    parent.kill()
    parent.wait()
    assert watch.death() == "the server ended"


# Arrivals, and latencies of recordings.


def recording(
    responses: list[tuple[float, float]], errors: Sequence[tuple[float, float]] = (), unsent: Sequence[float] = ()
) -> Recording:
    trace = _Trace(responses=responses, errors=[(*moments, "ServerError") for moments in errors])
    return Recording(traces=[trace], begin=10.0, end=20.0, cpu_s=1.0, unsent=list(unsent))


class TestMoments:
    def test_simultaneous_requests_are_no_trace(self, tmp_path: Path) -> None:
        trace = tmp_path / "trace.txt"
        trace.write_text("5\n5\n5\n")
        with pytest.raises(InvalidInput, match="at once"):
            Arriving.of(None, trace)

    def test_trace_is_stretched_to_the_rate(self) -> None:
        trace = np.array([0, 1, 1.5, 4.0])
        arriving = Arriving(trace=trace)
        moments = arriving.moments(30, 100, 3)
        assert len(moments) == pytest.approx(3000, rel=0.01)
        gaps = np.unique(np.diff(moments).round(9))
        np.testing.assert_allclose(gaps, np.array([0.5, 1.0, 2.5]) * 0.75 / 30)
        assert moments[0] != arriving.moments(30, 100, 4)[0]


class TestLatencies:
    def test_open_loop_counts_from_due_time(self) -> None:
        found = recording([(11.0, 11.5), (9.9, 10.5), (10.5, 25.0)])
        assert latencies_of(found, is_open=True).tolist() == [14.5, 0.5]

    def test_closed_loop_counts_responses_in_the_interval(self) -> None:
        found = recording([(11.0, 11.5), (9.9, 10.5), (10.5, 25.0)])
        assert latencies_of(found, is_open=False).tolist() == pytest.approx([0.6, 0.5])

    def test_failed_and_unsent_requests_are_infinite(self) -> None:
        failed = [(12.0, 12.5), (9.0, 14.0), (18.0, 40.0)]  # the second was due before the beginning, the third hung
        found = recording([(11.0, 11.5), (19.0, 19.25)], errors=failed, unsent=[13.0])
        assert latencies_of(found, is_open=True).tolist() == [0.5, np.inf, np.inf, np.inf, 0.25]
        assert latencies_of(found, is_open=False).tolist() == [0.5, np.inf, np.inf, np.inf, 0.25, np.inf]

    def test_recording_without_requests_is_infinite(self) -> None:
        latency, throughput = summarize(recording([]), is_open=True)
        assert latency.p99.value == np.inf
        assert throughput.value == 0
