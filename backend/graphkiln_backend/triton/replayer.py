"""Replays the golden samples while an instance serves: memory, cores and runtimes may fail long after the start.

When the instance is idle, and in any case at times; sample by sample, each under the lock that requests take, so that a
request waits for one sample at most (of stages that compute parts of a batch: for one batch) and never runs beside one.
Outputs that the policy refuses are a fault at once. An engine that fails is asked again, because memory may be short
for a moment; when it fails every time, that is a fault, too. After a request on which the engine failed, the samples
are replayed at once: they tell a bad request from a device that is lost.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from graphkiln_backend.graph.closing import Closeable
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.lowering.replaying import Arrays, Replay
from graphkiln_backend.triton.executor import Executor

_log = logging.getLogger("graphkiln.triton")

_IDLE_S = 0.2
"""Without a run for so long, an instance is idle."""
_LOOK_EVERY_S = 0.05
_RETRY_S = 1.0
_MOST_FAILURES = 3
"""An engine that fails so often in a row on samples that it has computed before is broken."""
_CALM_S = 10.0
"""Between two replays because of requests that failed: bad requests cost no more than that."""


class ReplayRecord(Protocol):
    """Where the results of replays are counted."""

    def count_replay(self, *, passed: bool) -> None:
        """Counts a replay that is over."""
        ...


class Replayer(Closeable):
    """Replays golden samples in a thread of its own until it is closed, or finds a fault.

    Args:
        replay: The samples, and the session that serves.
        executor: What runs the requests on the same session.
        lock: Held around each run.
        interval_s: Seconds between two replays, which are put off by as much again while the instance is busy; 0 for
            replays after failures of the engine only.
        instance: Triton's name of the instance; others replay at other times.
        record: Counts the replays.
        on_fault: Told what differed, once; nothing is replayed after that.
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
        """Stops after the sample that is being computed."""
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
        """Waits until no request came for a while, at most as long as the interval."""
        deadline = time.monotonic() + self._interval_s
        while time.monotonic() - self._executor.last_run_at < _IDLE_S and time.monotonic() < deadline:
            if self._closing.wait(_LOOK_EVERY_S):
                return

    def _find_fault(self) -> str:
        """Replays everything once; returns what is wrong for good, or nothing."""
        try:
            for outputs in self._replay.output_subsets:
                computed = [self._run_sample(sample, outputs) for sample in range(len(self._replay.samples))]
                self._replay.judge(computed)
        except _Closed:
            return ""
        except VerificationError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the watch
            return self._count_failure(error)
        self._failures = 0
        self._record.count_replay(passed=True)
        return ""

    def _count_failure(self, error: Exception) -> str:
        self._failures += 1
        _log.warning("golden samples: the engine failed, time %d of %d: %s", self._failures, _MOST_FAILURES, error)
        if self._failures >= _MOST_FAILURES:
            return f"the engine fails on golden samples: {error}"
        self._record.count_replay(passed=False)
        return ""

    def _run_sample(self, sample: int, outputs: tuple[str, ...]) -> Arrays:
        """Runs a sample alone, then leaves the session to requests for as long as that took."""
        if self._closing.is_set():
            raise _Closed
        with self._lock:
            begun = time.monotonic()
            computed = self._replay.run(sample, outputs)
            seconds = time.monotonic() - begun
        self._closing.wait(seconds)
        return computed


class _Closed(Exception):
    """The instance ends while its samples are being replayed."""
