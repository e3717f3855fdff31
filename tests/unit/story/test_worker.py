"""Worker processes and their throughput."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from stories import JPEGS, FakeWorkload

from graphkiln.story import workloads as module
from graphkiln.story.workloads import Worker
from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(FakeWorkload(callers=2), "fake") as worker:
        yield worker


class TestCalls:
    def test_predictions_come_back(self, worker: Worker) -> None:
        assert worker.predict(JPEGS).scores.tolist() == [[3, 0], [3, 0], [5, 0]]

    def test_gradients_and_their_noise(self, worker: Worker) -> None:
        gradients, noise = worker.parameter_gradients(b"four")
        np.testing.assert_array_equal(gradients, [0, 1, 2, 3])
        assert noise == 0.25

    def test_worker_measures(self, worker: Worker) -> None:
        throughput = worker.measure(JPEGS, 0.1)
        assert 1 <= len(throughput.latencies_ms) <= 2 * 0.1 / 0.001 + 2
        assert throughput.seconds >= 0.1
        assert min(throughput.latencies_ms) >= 1

    def test_worker_ignores_ctrl_c(self, worker: Worker) -> None:
        assert worker.pid != os.getpid()
        os.kill(worker.pid, signal.SIGINT)
        assert len(worker.predict(JPEGS).scores) == 3


class TestFaults:
    @pytest.mark.parametrize(
        ("fault", "words"),
        [
            ("open", r"Traceback[\s\S]*OpeningFailed: no such library"),
            ("open, ours", r"^no such model \(name another\)$"),
            ("dies", r"the process of '1: static' ended with code 3 .*--resume"),
        ],
    )
    def test_workload_that_cannot_be_opened(self, fault: str, words: str) -> None:
        with Worker(FakeWorkload(fault=fault), "1: static") as worker, pytest.raises(GraphkilnError, match=words):
            worker.wait_open()

    def test_worker_ends_during_call(self) -> None:
        with (
            Worker(FakeWorkload(fault="dies later"), "fake") as worker,
            pytest.raises(MeasurementError, match="ended with code 4"),
        ):
            worker.predict(JPEGS)
        with Worker(FakeWorkload(), "2: reduced") as worker:
            psutil.Process(worker.pid).kill()
            with pytest.raises(MeasurementError, match=r"process of '2: reduced' ended with code -9 .*--resume"):
                worker.predict(JPEGS)

    def test_image_error_ends_measurement(self) -> None:
        with (
            Worker(FakeWorkload(fault="run_one"), "fake") as worker,
            pytest.raises(MeasurementError, match=r"cannot run b'one'"),
        ):
            worker.measure((b"one",), 60)


class TestEnd:
    def test_worker_is_ended_during_a_call(self) -> None:
        worker = Worker(FakeWorkload(pause_s=60), "fake")
        worker.wait_open()
        worker.send("measure", (b"one",), 60)
        begun = time.perf_counter()
        worker.close()
        assert time.perf_counter() - begun < module._EXIT_S

    def test_hanging_worker_is_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = Worker(FakeWorkload(), "fake")
        worker.wait_open()
        process = psutil.Process(worker.pid)
        process.suspend()
        monkeypatch.setattr(module, "_EXIT_S", 0.2)
        worker.close()
        assert not process.is_running()
