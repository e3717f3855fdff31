"""Record a share of the requests that an instance answers, with the answers, as Parquet files (`repository.records`).

The thread of the requests decides and copies; another thread writes. At most `QUEUE_BYTES` of copies wait; what does
not fit is dropped and counted. A row group is encoded at a time, so that an instance needs at most three times that
memory, and usually a fifth. A fault of the disk is logged once and pauses the recording; answers go on.

A killed process loses the rows of the unfinished file, of the last `FILE_S` at most.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.graph.arrays import is_text
from graphkiln_backend.graph.dtypes import AnyArray, DType, join_text
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.files import MIB
from graphkiln_backend.repository.records import PARTIAL, file_name, remove_leftovers, remove_old, schema
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.locks import lock_shared
from graphkiln_backend.triton.environment import RecordSettings
from graphkiln_backend.triton.executor import Executor, InferenceRequest, Result
from graphkiln_backend.triton.request_position import position_of

QUEUE_BYTES = 32 * MIB
GROUP_BYTES = MIB  # rows that are encoded together, which takes 1 to 10 ms of a core
FILE_BYTES = 64 * MIB
FILE_S = 60.0
RETRY_S = 60.0  # pause after a fault
_TICK_S = 1.0
_CLOSE_S = 8.0  # less than the supervisor waits for; a hanging disk must not keep the instance
_REPEATED = ["model", "graph_sha256", "engine", "precision"]
_ROW_BYTES, _WORD_BYTES = 256, 64  # overhead of a row, and of an element of text, about

_log = logging.getLogger("graphkiln.triton")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What answers: the columns that all rows of an instance share."""

    model: str
    version: int
    graph_sha256: str
    engine: str
    precision: str


_Tensor = tuple[str, str, tuple[int, ...], bytes | list[Any]]  # name, type, shape, content


@dataclass(frozen=True, slots=True)
class _Row:
    """Copy of a request and its answer."""

    request_id: str
    time_ns: int
    latency_us: int
    inputs: list[_Tensor]
    outputs: list[_Tensor]
    size_bytes: int


def _copy(arrays: Mapping[str, AnyArray]) -> list[_Tensor]:
    copied: list[_Tensor] = []
    for name, array in arrays.items():
        content = array.ravel().tolist() if is_text(array) else array.tobytes()
        copied.append((name, DType.from_numpy(array.dtype).value, array.shape, content))
    return copied


def _size(arrays: Mapping[str, AnyArray]) -> int:
    size_bytes = 0
    for array in arrays.values():
        words: list[bytes | str] = array.ravel().tolist() if is_text(array) else []
        size_bytes += sum(map(len, words)) + _WORD_BYTES * len(words) if words else array.nbytes
    return size_bytes


def _encode(tensors: Sequence[_Tensor], *, whole: bool) -> Iterator[dict[str, Any]]:
    for name, dtype, shape, content in tensors:
        data = content if isinstance(content, bytes) else join_text(content)
        sha256 = None if whole else hashlib.sha256(data).hexdigest()
        yield {"name": name, "dtype": dtype, "shape": shape, "data": data if whole else None, "sha256": sha256}


class RecordingExecutor:
    """Execute requests, and record a share of those that succeed; see `Executor`.

    Args:
        executor: Executes the requests.
        recorder: Records them.
        warm_ups: Number of first calls that are not recorded, because Triton itself sends these requests.
    """

    def __init__(self, executor: Executor, recorder: Recorder, warm_ups: int = 0) -> None:
        self._executor = executor
        self._recorder = recorder
        self._warm_ups = warm_ups

    def execute(self, request: InferenceRequest) -> Result:
        """Execute a single request."""
        begun = time.monotonic()
        result = self._executor.execute(request)
        self._offer([request], [result], time.monotonic() - begun)
        return result

    def execute_batch(self, requests: Sequence[InferenceRequest]) -> list[Result]:
        """Execute requests."""
        begun = time.monotonic()
        results = self._executor.execute_batch(requests)
        self._offer(requests, results, time.monotonic() - begun)
        return results

    def _offer(self, requests: Sequence[InferenceRequest], results: Sequence[Result], seconds: float) -> None:
        if self._warm_ups:
            self._warm_ups -= 1
            return
        recorder, read = self._recorder, self._executor.read
        try:
            for request, result in zip(requests, results, strict=True):
                if not isinstance(result, GraphkilnError):
                    request_id = request.request_id()
                    inputs = {} if request_id else read(request)
                    if position_of(request_id, inputs, b"record") < recorder.share:
                        recorder.record(request_id, inputs or read(request), result, seconds)
        except Exception as error:  # noqa: BLE001 - the requests are answered
            recorder.count_dropped()
            _log.warning("a request was not recorded: %s: %s", type(error).__name__, error)


class Recorder(Closeable):
    """Thread that writes copies of requests until it is closed.

    Args:
        settings: Settings of the command line.
        origin: What answers.

    Attributes:
        share: Share of requests to record.
        recorded: Requests in finished files so far.
        dropped: Requests that were chosen, and not recorded, so far.
    """

    def __init__(self, settings: RecordSettings, origin: Origin) -> None:
        self.share = settings.share
        self.recorded = 0
        self.dropped = 0
        self._settings = settings
        self._origin = origin
        self._rows: deque[_Row] = deque()
        self._lock = threading.Lock()  # of what both threads change
        self._waiting_bytes = 0
        self._file: _RecordFile | None = None
        self._begun = 0.0  # when the first row that is in no finished file came
        self._paused_until = 0.0
        self._said = False
        self._wake = threading.Event()
        self._closing = False
        # The first table imports pandas if it is installed: 0.2 s, which would hold up requests.
        self._table([_Row("", 0, 0, _copy({"x": np.zeros(1)}), [], 0)])
        self._thread = threading.Thread(target=self._run, name="graphkiln-record", daemon=True)
        self._thread.start()

    def record(
        self, request_id: str, inputs: Mapping[str, AnyArray], outputs: Mapping[str, AnyArray], seconds: float
    ) -> None:
        """Copy a request and its answer, or drop it if there is no room.

        Args:
            request_id: Id given by the client, or empty.
            inputs: Inputs of the graph.
            outputs: Requested outputs.
            seconds: Time of the answer within the instance.
        """
        size_bytes = _size(inputs) + _size(outputs) + _ROW_BYTES
        if self._waiting_bytes + size_bytes > QUEUE_BYTES or time.monotonic() < self._paused_until:
            self.count_dropped()
            return
        row = _Row(
            request_id=request_id,
            time_ns=time.time_ns(),
            latency_us=round(seconds * 1e6),
            inputs=_copy(inputs),
            outputs=_copy(outputs),
            size_bytes=size_bytes,
        )
        with self._lock:
            self._waiting_bytes += size_bytes
        self._rows.append(row)
        if self._waiting_bytes >= GROUP_BYTES:
            self._wake.set()

    def count_dropped(self, rows: int = 1) -> None:
        """Count requests that were chosen, and are not recorded."""
        with self._lock:
            self.dropped += rows

    def close(self) -> None:
        """Write the rest and stop."""
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(_TICK_S)
            self._wake.clear()
            self._write()
        self._write()

    def _write(self) -> None:
        """Write full row groups; write everything and finish the file when that is due."""
        if self._rows and not self._begun:
            self._begun = time.monotonic()
        due = self._closing or bool(self._begun and time.monotonic() - self._begun >= FILE_S)
        try:
            while self._rows and (due or self._waiting_bytes >= GROUP_BYTES):
                self._write_group()
                if self._file and self._file.size_bytes >= FILE_BYTES:
                    self._finish()
            if due:
                self._finish()
        except Exception as error:  # noqa: BLE001 - no fault of a disk or of Arrow may end the thread
            self._pause(error)

    def _write_group(self) -> None:
        rows: list[_Row] = []
        size_bytes = 0
        while self._rows and (not rows or size_bytes + self._rows[0].size_bytes <= GROUP_BYTES):
            rows.append(self._rows.popleft())
            size_bytes += rows[-1].size_bytes
        try:
            if self._file is None:
                self._file = _RecordFile(self._settings, self._origin.model)
            self._file.write(self._table(rows), size_bytes)
        except Exception:
            self.count_dropped(len(rows))
            raise
        finally:
            with self._lock:
                self._waiting_bytes -= size_bytes

    def _table(self, rows: Sequence[_Row]) -> pa.Table:
        return pa.Table.from_pylist(
            [
                {
                    "request_id": row.request_id,
                    "time": row.time_ns,
                    "model": self._origin.model,
                    "version": self._origin.version,
                    "graph_sha256": self._origin.graph_sha256,
                    "engine": self._origin.engine,
                    "precision": self._origin.precision,
                    "latency_us": row.latency_us,
                    "inputs": [*_encode(row.inputs, whole=self._settings.inputs == "full")],
                    "outputs": [*_encode(row.outputs, whole=True)],
                }
                for row in rows
            ],
            schema(),
        )

    def _finish(self) -> None:
        self._begun = 0.0
        if self._file is None:
            return
        self._file.finish()
        self.recorded += self._file.rows
        self._file = None
        if self._said:
            self._said = False
            _log.info("requests are recorded again in %s", self._settings.folder)

    def _pause(self, error: Exception) -> None:
        """Give the unfinished file up, and drop requests for a while."""
        self._paused_until, self._begun = time.monotonic() + RETRY_S, 0.0
        if not self._said:
            self._said = True
            _log.warning(
                "requests are not recorded in %s: %s; tried again every %.0f s", self._settings.folder, error, RETRY_S
            )
        lost = len(self._rows)
        with self._lock:
            self._waiting_bytes -= sum(self._rows.popleft().size_bytes for _ in range(lost))
        if self._file:
            lost += self._file.rows
            self._file.discard()
            self._file = None
        self.count_dropped(lost)


class _RecordFile:
    """A file that gets its name when it is complete.

    Args:
        settings: Settings of the command line.
        model: Name of the model.

    Raises:
        OSError: The file cannot be created, or the folder belongs to another user.
    """

    def __init__(self, settings: RecordSettings, model: str) -> None:
        self.rows = 0
        self.size_bytes = 0
        _check_owner(settings.folder)
        now_s = time.time()
        remove_leftovers(settings.folder)
        remove_old(settings.folder, keep_s=settings.keep_s, keep_bytes=settings.keep_bytes, now_s=now_s)
        folder = settings.folder / model
        folder.mkdir(0o700, exist_ok=True)
        _check_owner(folder)
        self._path = folder / file_name(now_s, secrets.token_hex(4))
        self._partial = self._path.with_name(f".{self._path.name}{PARTIAL}")
        self._file = _create_locked(self._partial)
        self._writer = pq.ParquetWriter(
            self._file, schema(), compression="zstd", use_dictionary=_REPEATED, write_page_checksum=True
        )

    def write(self, table: pa.Table, size_bytes: int) -> None:
        """Append a row group."""
        self._writer.write_table(table)
        self.rows += len(table)
        self.size_bytes += size_bytes

    def finish(self) -> None:
        """Complete the file and give it its name."""
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._partial.rename(self._path)
        self._file.close()

    def discard(self) -> None:
        """Remove the unfinished file, as far as the disk allows it."""
        self._writer.is_open = False  # it would write its footer when it is freed
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)
        with suppress(OSError):  # the buffer does not fit either
            self._file.close()


def _create_locked(path: Path) -> BinaryIO:
    """Create a file and lock it, so that others do not take it for the remains of a dead writer."""
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks: others cannot take the lock either
            lock_shared(descriptor)
        if os.fstat(descriptor).st_nlink:
            return os.fdopen(descriptor, "wb")
        os.close(descriptor)  # another writer has removed it before it was locked


def _check_owner(folder: Path) -> None:
    """Refuse the folder of another user, who would read what others sent.

    Raises:
        OSError: It belongs to neither this user nor root, or is missing.
    """
    owner = folder.stat().st_uid
    if owner not in {0, os.geteuid()}:
        raise PermissionError(f"{folder} belongs to another user ({owner})")
