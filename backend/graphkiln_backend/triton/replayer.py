"""Replay samples while an instance serves, because memory, cores and runtimes may fail long after the start.

The samples are the golden samples; a version without any has a made-up request (`Replay.recorded`).

Samples are replayed while the instance is idle, or after twice the interval. Each runs under the lock of requests, so
that a request waits for one sample at most (for one batch, if parts of a batch are computed separately) and never runs
beside one. Outputs outside the policy are a fault at once. A failing engine is retried, because memory may be short for
a moment; failing each time is a fault, too. After the engine failed on a request, the samples are replayed at once,
which distinguishes a bad request from a lost device.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.lowering.acceptance import Arrays, Replay
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.triton.executor import Executor

if TYPE_CHECKING:
    from graphkiln_backend.triton.metrics import InstanceMetrics

_IDLE_S = 0.2  # an instance without a run for this long is idle
_POLL_S = 0.05
_RETRY_S = 1.0
_MOST_FAILURES = 3  # consecutive failures, on samples that the engine has computed before
_CALM_S = 10.0  # between two replays caused by failed requests: limits the cost of bad requests

_log = logging.getLogger("graphkiln.triton")


class Replayer(Closeable):
    """Thread that replays samples until it is closed or finds a fault.

    Args:
        replay: Samples and the session that serves.
        executor: Executor of requests on the same session.
        lock: Held around each run.
        interval_s: Seconds between two replays; 0 to replay only after failures of the engine.
        instance: Triton's name of the instance; it seeds the first delay, so that instances replay at different times.
        metrics: Counts the replays.
        on_fault: Called once with a description of the fault; replaying ends.
    """

    def __init__(
        self,
        replay: Replay,
        executor: Executor,
        *,
        lock: AbstractContextManager[object],
        interval_s: float,
        instance: str,
        metrics: InstanceMetrics,
        on_fault: Callable[[str], None],
    ) -> None:
        self._replay = replay
        self._executor = executor
        self._lock = lock
        self._interval_s = interval_s
        self._first_s = interval_s * random.Random(instance).uniform(0.1, 1)  # noqa: S311 - not for security
        self._metrics = metrics
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
                self._metrics.count_replay(passed=False)
                return
            if failed and not self._failures:
                self._closing.wait(_CALM_S)
            wait_s = _RETRY_S if self._failures else self._interval_s

    def _wait_until_idle(self) -> None:
        """Wait until the instance is idle, at most for the interval."""
        deadline = time.monotonic() + self._interval_s
        while time.monotonic() - self._executor.last_run_at < _IDLE_S and time.monotonic() < deadline:
            if self._closing.wait(_POLL_S):
                return

    def _find_fault(self) -> str:
        """Replay all samples once; return the fault that ends this instance, or an empty string."""
        try:
            for outputs in self._replay.output_subsets:
                computed = [self._run_sample(sample, outputs) for sample in range(len(self._replay.samples))]
                self._replay.judge(computed)
        except _Closed:
            return ""
        except VerificationError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - no error of an engine may end the thread
            self._failures += 1
            _log.warning(
                "replayed samples: the engine failed (%d of %d attempts): %s", self._failures, _MOST_FAILURES, error
            )
            if self._failures >= _MOST_FAILURES:
                return f"the engine fails on replayed samples: {error}"
            self._metrics.count_replay(passed=False)
            return ""
        self._failures = 0
        self._metrics.count_replay(passed=True)
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
    """The instance was unloaded during a replay."""
