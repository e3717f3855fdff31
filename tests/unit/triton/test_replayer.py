"""Replaying golden samples while serving: schedule, locking, and faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from fake_triton import InferenceRequest
from waiting import wait_until

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.acceptance import Replay
from graphkiln_backend.proof.policy import REPLAY
from graphkiln_backend.triton import replayer as module
from graphkiln_backend.triton.executor import Executor
from graphkiln_backend.triton.replayer import Replayer

INPUTS = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
GOLDEN = GoldenSamples(inputs={"x": INPUTS}, source_outputs={}, graph_outputs={"y": INPUTS * 2})
LIMITS = REPLAY[Precision.FP32]


class Session:
    """Double the input; refuse concurrent runs."""

    def __init__(self) -> None:
        spec = TensorSpec(name="x", dtype=DType.FP32, shape=("batch", 4))
        self.signature = Signature(
            inputs=(spec,), outputs=(TensorSpec(name="y", dtype=DType.FP32, shape=("batch", 4)),)
        )
        self.error: Exception | None = None
        self.factor = 2.0
        self.runs: list[tuple[str, float]] = []
        self.overlaps = 0
        self.seconds = 0.0
        self._busy = threading.Lock()

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        if not self._busy.acquire(blocking=False):
            self.overlaps += 1
            raise AssertionError("two runs at once")
        try:
            self.runs.append((threading.current_thread().name, feeds["x"][0, 0]))
            time.sleep(self.seconds)
            if self.error:
                raise self.error
            return dict.fromkeys(outputs, feeds["x"] * np.float32(self.factor))
        finally:
            self._busy.release()

    @property
    def replayed(self) -> int:
        return sum(thread == "graphkiln-replay" for thread, _ in list(self.runs))


class Record:
    def __init__(self) -> None:
        self.results: list[bool] = []

    def count_replay(self, *, passed: bool) -> None:
        self.results.append(passed)


class Instance:
    """A session with its executor and replayer."""

    def __init__(self, *, interval_s: float, name: str = "m_0", session: Session | None = None) -> None:
        self.session = session or Session()
        self.executor = Executor(self.session, batching=True)
        self.lock = threading.Lock()
        self.record = Record()
        self.faults: list[str] = []
        self.replayer = Replayer(
            Replay.of_golden(self.session, GOLDEN, LIMITS),
            self.executor,
            lock=self.lock,
            interval_s=interval_s,
            instance=name,
            metrics=self.record,
            on_fault=self.faults.append,
        )

    def request(self, value: float = 1.0) -> Any:
        with self.lock:
            return self.executor.execute(InferenceRequest({"x": np.full((1, 4), value, np.float32)}))


StartInstance = Callable[..., Instance]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartInstance]:
    monkeypatch.setattr(module, "_RETRY_S", 0.001)
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    monkeypatch.setattr(module, "_IDLE_S", 0.01)
    with ExitStack() as stack:

        def make(**options: Any) -> Instance:
            instance = Instance(**options)
            stack.callback(instance.replayer.close)
            return instance

        yield make


def test_passed_replays_are_counted(start: StartInstance) -> None:
    instance = start(interval_s=0.01)
    wait_until(lambda: len(instance.record.results) >= 3)
    assert all(instance.record.results)
    assert not instance.faults
    assert [value for _, value in instance.session.runs[:3]] == [1, 5, 9]


def test_wrong_outputs_are_reported_once(start: StartInstance) -> None:
    instance = start(interval_s=0.01)
    wait_until(lambda: len(instance.record.results) >= 1)
    instance.session.factor = 2.01
    wait_until(lambda: False in instance.record.results)
    (fault,) = instance.faults
    assert "the outputs changed" in fault
    assert "y: relative L2 0.005" in fault
    runs = instance.session.replayed
    time.sleep(0.05)
    assert instance.session.replayed == runs


@pytest.mark.parametrize("factor", [np.nan, 0.0])
def test_nan_and_zero_are_wrong_outputs(start: StartInstance, factor: float) -> None:
    session = Session()
    session.factor = factor
    instance = start(interval_s=0.01, session=session)
    wait_until(lambda: bool(instance.faults))


def test_temporary_failure_is_no_fault(start: StartInstance) -> None:
    session = Session()
    run, failures = session.run, iter([ExecutionError("out of memory")] * 2)

    def fail_twice(feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        if error := next(failures, None):
            raise error
        return run(feeds, outputs)

    session.run = fail_twice  # type: ignore[method-assign]
    instance = start(interval_s=0.01, session=session)
    wait_until(lambda: True in instance.record.results)
    assert instance.record.results[:3] == [False, False, True]
    assert not instance.faults


@pytest.mark.parametrize("error", [ExecutionError("the device is lost"), MemoryError("9 EiB"), KeyError("y")])
def test_persistent_failure_is_a_fault(start: StartInstance, error: Exception) -> None:
    session = Session()
    session.error = error
    instance = start(interval_s=0.01, session=session)
    wait_until(lambda: len(instance.record.results) == 3)
    assert instance.record.results == [False] * 3
    (fault,) = instance.faults
    assert fault.startswith("the engine fails on replayed samples: ")


def test_failed_request_triggers_a_replay(start: StartInstance) -> None:
    instance = start(interval_s=0)
    instance.session.error = ExecutionError("the device is lost")
    assert isinstance(instance.request(), ExecutionError)
    wait_until(lambda: bool(instance.faults))


def test_bad_request_is_no_fault(start: StartInstance) -> None:
    instance = start(interval_s=0)
    run = instance.session.run

    def refuse(feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        if (feeds["x"] == 666).any():
            raise ExecutionError("666 is out of range")
        return run(feeds, outputs)

    instance.session.run = refuse  # type: ignore[method-assign]
    assert isinstance(instance.request(666), ExecutionError)
    wait_until(lambda: instance.record.results == [True])
    for _ in range(20):
        assert isinstance(instance.request(666), ExecutionError)
    assert instance.record.results == [True]
    assert not instance.faults


def test_interval_0_disables_replays(start: StartInstance) -> None:
    instance = start(interval_s=0)
    instance.request()
    time.sleep(0.05)
    assert instance.session.replayed == 0


def test_busy_instance_is_replayed(start: StartInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 1e9)
    instance = start(interval_s=0.02)
    wait_until(lambda: len(instance.record.results) >= 2)
    assert all(instance.record.results)


def test_requests_and_samples_never_overlap(start: StartInstance) -> None:
    session = Session()
    session.seconds = 0.0005
    instance = start(interval_s=0.001, session=session)
    for number in range(300):
        result = instance.request(number)
        np.testing.assert_array_equal(result["y"], np.full((1, 4), number * 2))
    wait_until(lambda: len(instance.record.results) > 1)
    assert session.overlaps == 0
    assert all(instance.record.results)


def test_request_waits_for_one_sample(start: StartInstance) -> None:
    session = Session()
    instance = start(interval_s=0, session=session)
    free: list[int] = []
    run = session.run

    def note(feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        assert instance.lock.locked()
        return run(feeds, outputs)

    def wait(seconds: float) -> bool:
        free.append(session.replayed)
        assert seconds >= 0
        assert not instance.lock.locked()
        return False

    session.run = note  # type: ignore[method-assign]
    instance.replayer._closing.wait = wait  # type: ignore[method-assign, assignment]
    instance.executor.engine_failed.set()
    wait_until(lambda: instance.record.results == [True])
    assert free[:3] == [1, 2, 3]


def test_close_does_not_wait_for_the_interval() -> None:
    before = set(threading.enumerate())
    begun = time.monotonic()
    Instance(interval_s=1000).replayer.close()
    Instance(interval_s=0).replayer.close()
    assert time.monotonic() - begun < 30
    assert set(threading.enumerate()) == before


def test_close_interrupts_a_replay() -> None:
    session = Session()
    session.seconds = 0.05
    instance = Instance(interval_s=0.001, session=session)
    wait_until(lambda: session.replayed >= 1)
    instance.replayer.close()
    assert instance.record.results == []
    assert not instance.faults
