"""Replay samples while an instance serves: memory, cores and runtimes may fail long after the start.

They are the golden samples, or for a version without any a request that was made up (`Replay.recorded`).

Samples are replayed while the instance is idle, and in any case after twice the interval. Each runs under the lock that
requests take, so a request waits for one sample at most (for one batch, where parts of a batch are computed apart) and
never runs beside one. Outputs that the policy refuses are a fault at once. An engine that fails is asked again, because
memory may be short for a moment; failing every time is a fault as well. After a request on which the engine failed, the
samples are replayed at once: that tells a bad request from a lost device.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.lowering.acceptance import Arrays, Replay
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.triton.executor import Executor

_IDLE_S = 0.2  # an instance without a run for this long is idle
_LOOK_EVERY_S = 0.05
_RETRY_S = 1.0
_MOST_FAILURES = 3  # failures in a row, on samples that the engine has computed before
_CALM_S = 10.0  # between two replays that failed requests caused: bad requests cost no more than that

_log = logging.getLogger("graphkiln.triton")


class ReplayRecord(Protocol):
    """Counter of replays; see `triton.metrics.InstanceMetrics`."""

    def count_replay(self, *, passed: bool) -> None:
        """Count a finished replay."""
        ...


class Replayer(Closeable):
    """Thread that replays samples until it is closed or finds a fault.

    Args:
        replay: Samples, and the session that serves.
        executor: Runs the requests on the same session.
        lock: Held around each run.
        interval_s: Seconds between two replays; 0 replays only after failures of the engine.
        instance: Triton's name of the instance; instances of different names replay at different times.
        record: Counts the replays.
        on_fault: Called once with a description of the fault; nothing is replayed afterwards.
    """

    def __init__(
        self,
        replay: Replay,
        executor: Executor,
        *,
        lock: AbstractContextManager[object],
        interval_s: float,
        instance: str,
        record: ReplayRecord,
        on_fault: Callable[[str], None],
    ) -> None:
        self._replay = replay
        self._executor = executor
        self._lock = lock
        self._interval_s = interval_s
        self._first_s = interval_s * random.Random(instance).uniform(0.1, 1)  # noqa: S311 - spreads instances
        self._record = record
        self._on_fault = on_fault
        self._closing = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="graphkiln-replay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the sample that is being computed."""
        self._closing.set()
        self._executor.engine_failed.set()  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._closing.is_set():
            failed = self._executor.engine_failed.wait(wait_s or None)
            self._executor.engine_failed.clear()
            if not (failed or self._failures):
                self._wait_until_idle()
            if self._closing.is_set():
                return
            if fault := self._find_fault():
                self._on_fault(fault)
                self._record.count_replay(passed=False)
                return
            if failed and not self._failures:
                self._closing.wait(_CALM_S)
            wait_s = _RETRY_S if self._failures else self._interval_s

    def _wait_until_idle(self) -> None:
        """Wait until no request came for a while, at most for the interval."""
        deadline = time.monotonic() + self._interval_s
        while time.monotonic() - self._executor.last_run_at < _IDLE_S and time.monotonic() < deadline:
            if self._closing.wait(_LOOK_EVERY_S):
                return

    def _find_fault(self) -> str:
        """Replay everything once; return the fault that ends this instance, or an empty string."""
        try:
            for outputs in self._replay.output_subsets:
                computed = [self._run_sample(sample, outputs) for sample in range(len(self._replay.samples))]
                self._replay.judge(computed)
        except _Closed:
            return ""
        except VerificationError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises must not end the thread
            self._failures += 1
            _log.warning(
                "replayed samples: the engine failed, %d of %d times: %s", self._failures, _MOST_FAILURES, error
            )
            if self._failures >= _MOST_FAILURES:
                return f"the engine fails on replayed samples: {error}"
            self._record.count_replay(passed=False)
            return ""
        self._failures = 0
        self._record.count_replay(passed=True)
        return ""

    def _run_sample(self, sample: int, outputs: tuple[str, ...]) -> Arrays:
        """Run a sample, then leave the session to requests for as long as that took."""
        if self._closing.is_set():
            raise _Closed
        with self._lock:
            begun = time.monotonic()
            computed = self._replay.run(sample, outputs)
            seconds = time.monotonic() - begun
        self._closing.wait(seconds)
        return computed


class _Closed(Exception):
    """The instance is unloaded while its samples are being replayed."""
