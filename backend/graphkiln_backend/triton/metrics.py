"""Metrics of an instance: it writes them into a file, which the supervisor serves on its metrics port.

Triton's own custom metrics are not used: they stay when a version is unloaded, every change is a message of 31 us to
tritonserver, and tritonserver 24.10 can abort when instances with metrics end. `metric_catalog` describes ours.
"""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.files import write_whole
from graphkiln_backend.triton.environment import instances_folder
from graphkiln_backend.triton.instance_status import InstanceStatus, status_path
from graphkiln_backend.triton.metric_catalog import sample_line

if TYPE_CHECKING:
    from graphkiln_backend.triton.recording import Recorder

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_WRITE_EVERY_S = 1.0
_KIND = "metrics"
# Triton's codes of all error classes. Each counter exists from the start with 0: a rate needs a first value.
_CODES = ("CANCELLED", "INTERNAL", "INVALID_ARG", "NOT_FOUND", "UNAVAILABLE")


def read_metrics(folder: Path) -> Iterator[str]:
    """Yield the lines of the metrics of all living instances.

    Args:
        folder: Folder of the instances' status files.
    """
    for path in sorted(folder.glob(f"*.{_KIND}")):
        if Path("/proc", path.name.split(".")[-2]).exists():  # otherwise it was killed
            with suppress(FileNotFoundError):  # unloaded meanwhile
                yield from path.read_text("utf-8").splitlines(keepends=True)


class _MetricsFile(Closeable):
    """Write metrics once a second in a thread, until closed; without a supervisor there is no file.

    Args:
        instance: Triton's name of the instance.
    """

    def __init__(self, instance: str) -> None:
        folder = instances_folder()
        self._path = status_path(folder, instance, os.getpid(), _KIND) if folder else None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graphkiln-metrics", daemon=True)
        if self._path:
            self._thread.start()

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """Yield the current values in Prometheus' text format."""

    def close(self) -> None:
        """Stop, and remove the file."""
        self._closing.set()
        if self._path:
            self._thread.join()
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        written = ""
        while not self._closing.is_set():
            text = "".join(self.lines())
            with suppress(OSError):  # the disk is full: the last values stay
                if text != written and self._path:
                    write_whole(self._path, text.encode())
                    written = text
            self._closing.wait(_WRITE_EVERY_S)


class InstanceMetrics(_MetricsFile):
    """Metrics of one instance.

    Args:
        instance: Triton's name of the instance.
        status: Its status.
        shared_memory_bytes: Size of its region of shared memory.
        batch_sizes: Rows of each run: the instance appends, this removes.
        failed: Requests answered with an error so far, by Triton's code.
        recorder: Records requests, or None.
    """

    def __init__(
        self,
        instance: str,
        status: InstanceStatus,
        shared_memory_bytes: int,
        batch_sizes: deque[int],
        failed: Mapping[str, int],
        *,
        recorder: Recorder | None = None,
    ) -> None:
        labels = {"model": status.model, "version": str(status.version), "instance": instance}
        serving = {"engine": status.engine, "device": status.device, "precision": status.precision}
        self._labels = labels
        self._constant = (
            sample_line("graphkiln_instance_info", 1, **labels, **serving),
            *(sample_line("graphkiln_nodes", count, **labels, executor=key) for key, count in status.nodes.items()),
            *(
                sample_line("graphkiln_products", count, **labels, precision=key)
                for key, count in status.products.items()
            ),
            sample_line("graphkiln_load_seconds", status.load_ms / 1e3, **labels),
            sample_line("graphkiln_warmup_seconds", status.warmup_ms / 1e3, **labels),
            sample_line("graphkiln_self_test_error", status.self_test_error, **labels),
            sample_line("graphkiln_shared_memory_bytes", shared_memory_bytes, **labels),
            sample_line("graphkiln_fallbacks_total", status.fallbacks, **labels),
        )
        self._unseen = batch_sizes  # a deque needs no lock between the instance and this thread
        self._batches = Counter[int]()  # by upper bound; 0 for larger ones
        self._rows = 0
        self._failed = failed
        self._recorder = recorder
        self._replays = self._failures = 0
        self._last_pass = time.time() if status.self_test else 0.0
        super().__init__(instance)

    def count_replay(self, *, passed: bool) -> None:
        """Count a replay of the samples."""
        self._replays += 1
        if passed:
            self._last_pass = time.time()
        else:
            self._failures += 1

    def lines(self) -> Iterator[str]:
        """See `_MetricsFile.lines`."""
        labels = self._labels
        yield from self._constant
        yield sample_line("graphkiln_self_test_replays_total", self._replays, **labels)
        yield sample_line("graphkiln_self_test_failures_total", self._failures, **labels)
        yield sample_line("graphkiln_self_test_timestamp_seconds", self._last_pass, **labels)
        yield from _failed_lines(labels, self._failed)
        if self._recorder:
            yield sample_line("graphkiln_recorded_requests_total", self._recorder.recorded, **labels)
            yield sample_line("graphkiln_record_dropped_total", self._recorder.dropped, **labels)
        yield from self._histogram()

    def _histogram(self) -> Iterator[str]:
        for _ in range(len(self._unseen)):
            rows = self._unseen.popleft()
            self._batches[next((bound for bound in _BATCH_BUCKETS if rows <= bound), 0)] += 1
            self._rows += rows
        counts = accumulate(self._batches[bound] for bound in (*_BATCH_BUCKETS, 0))
        for bound, count in zip((*map(str, _BATCH_BUCKETS), "+Inf"), counts, strict=True):
            yield sample_line("graphkiln_batch_size_bucket", count, **self._labels, le=bound)
        yield sample_line("graphkiln_batch_size_sum", self._rows, **self._labels)
        yield sample_line("graphkiln_batch_size_count", self._batches.total(), **self._labels)


class ImageMetrics(_MetricsFile):
    """Metrics of an instance of `NAME.images`: decoded images and failed requests.

    Args:
        instance: Triton's name of the instance.
        model: Model name.
        version: Model version.
        failed: Requests answered with an error so far, by Triton's code.
        decode_seconds: Processor time of each image: the instance appends, this removes.
    """

    def __init__(
        self, instance: str, model: str, version: str, failed: Mapping[str, int], decode_seconds: deque[float]
    ) -> None:
        self._labels = {"model": model, "version": version, "instance": instance}
        self._failed = failed
        self._unseen = decode_seconds  # a deque needs no lock between the instance and this thread
        self._images, self._seconds = 0, 0.0
        super().__init__(instance)

    def lines(self) -> Iterator[str]:
        """See `_MetricsFile.lines`."""
        for _ in range(len(self._unseen)):
            self._images += 1
            self._seconds += self._unseen.popleft()
        yield from _failed_lines(self._labels, self._failed)
        yield sample_line("graphkiln_decoded_images_total", self._images, **self._labels)
        yield sample_line("graphkiln_decode_seconds_total", self._seconds, **self._labels)


def _failed_lines(labels: Mapping[str, str], failed: Mapping[str, int]) -> Iterator[str]:
    for code in _CODES:
        yield sample_line("graphkiln_failed_requests_total", failed.get(code, 0), **labels, code=code)
