"""Read, decode and preprocess rows ahead of the session, in bounded memory.

Reading waits for disks and networks, decoding for cores: there are many reader threads, and one decoder thread per
core. Memory is limited in bytes, not in rows: for the pixels of an image while it is decoded, and for its sample until
the batch is computed. The row that the session needs next is always admitted; otherwise the rows behind it, which
occupy the memory, would block it forever.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images import decoding
from graphkiln_backend.scoring.errors import InputChanged, SourceUnavailable
from graphkiln_backend.scoring.messages import Content, Row
from graphkiln_backend.system.closing import Closeable


class MemoryGate:
    """Semaphore in bytes. A request above the limit is admitted when nothing else is held.

    Args:
        limit_bytes: Maximum of all bytes held.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._held

    def acquire(self, size_bytes: int, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Wait until there is room.

        Args:
            size_bytes: Bytes to hold.
            is_urgent: Returns True if the request must be admitted in any case, because holders wait for it; called
                again after each release.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._held or self._held + size_bytes <= self._limit or is_urgent(),
            )
            self._held += size_bytes

    def release(self, size_bytes: int) -> None:
        """Release bytes; 0 to make waiting threads check `is_urgent` again."""
        with self._changed:
            self._held -= size_bytes
            self._changed.notify_all()


READERS_PER_CORE = 8  # with 50 ms per image of a remote store, eight readers reach 160 images per second
MEMORY_BYTES = 512 << 20  # for pixels and samples, and the same again for encoded images
_BYTES_PER_PIXEL = 8  # a decoded image, and a converted or rotated copy


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRow:
    """A row with its sample or its error.

    Attributes:
        image: The sample and the size of the original image, or None.
        error: Why there is no sample, or None.
        read_s: Elapsed time of reading.
        decode_s: CPU time of decoding and preprocessing.
    """

    row: Row
    image: decoding.Prepared | None = None
    error: str | None = None
    read_s: float = 0.0
    decode_s: float = 0.0

    @property
    def sample(self) -> AnyArray | None:
        """Input of the session."""
        return self.image.sample if self.image else None

    @property
    def size_bytes(self) -> int:
        """Size of the sample."""
        return self.image.sample.nbytes if self.image else 0


class Preparation(Closeable):
    """Iterator over the prepared rows of a unit, in order.

    Args:
        reader: Prepares the rows.
        rows: The rows.
        quarantined: Rows to skip, by position, with the reason.
        ahead: Number of rows that are prepared ahead.
    """

    def __init__(self, reader: Reader, rows: Iterable[Row], quarantined: Mapping[int, str], ahead: int) -> None:
        self._reader, self._rows, self._quarantined, self._ahead = reader, rows, quarantined, ahead
        self._waiting: deque[Future[PreparedRow]] = deque()
        self._taken = 0
        self._held_bytes = 0
        self._closed = False

    def __iter__(self) -> Iterator[PreparedRow]:
        """Yield rows; their samples count as held until `release`.

        Raises:
            InputChanged: A row differs from the plan.
            SourceUnavailable: Temporary failure of the source.
        """
        for position, row in enumerate(self._rows):
            self._waiting.append(self._submit(position, row))
            if len(self._waiting) >= self._ahead:
                yield self._take()
        while self._waiting:
            yield self._take()

    def release(self, batch: Iterable[PreparedRow]) -> None:
        """Release the memory of samples."""
        size = sum(one.size_bytes for one in batch)
        self._held_bytes -= size
        self._reader.memory.release(size)

    def close(self) -> None:
        """Stop; memory of rows that are still being prepared is released when they finish."""
        self._closed = True
        for future in self._waiting:
            future.cancel()
            future.add_done_callback(self._release_result)
        self._reader.memory.release(self._held_bytes)
        self._reader.encoded.release(0)
        self._held_bytes = 0

    def _submit(self, position: int, row: Row) -> Future[PreparedRow]:
        if position not in self._quarantined:
            return self._reader.submit(row, partial(self._is_next, position))
        future: Future[PreparedRow] = Future()
        future.set_result(PreparedRow(row=row, error=self._quarantined[position]))
        return future

    def _is_next(self, position: int) -> bool:
        return self._closed or self._taken == position

    def _take(self) -> PreparedRow:
        prepared = self._waiting[0].result()
        self._waiting.popleft()
        self._held_bytes += prepared.size_bytes
        self._taken += 1
        self._reader.memory.release(0)  # the row behind it may be urgent now
        self._reader.encoded.release(0)
        return prepared

    def _release_result(self, future: Future[PreparedRow]) -> None:
        if not future.cancelled() and not future.exception():
            self._reader.memory.release(future.result().size_bytes)


class Reader(Closeable):
    """Threads that prepare rows, shared by the units of a worker.

    Args:
        preprocess: Preprocessing of the model.
        cores: Number of decoder threads.
        memory_bytes: Limit of pixels and samples together; a single image may need more.

    Attributes:
        memory: Limits pixels and samples.
        encoded: Limits images that are read but not decoded.
    """

    def __init__(self, preprocess: Preprocess, cores: int, memory_bytes: int = MEMORY_BYTES) -> None:
        self.memory, self.encoded = MemoryGate(memory_bytes), MemoryGate(memory_bytes)
        self._preprocess = preprocess
        self._expected_bytes = 0
        self._threads = READERS_PER_CORE * cores
        self._reading = ThreadPoolExecutor(self._threads, thread_name_prefix="reader")
        self._decoding = ThreadPoolExecutor(cores, thread_name_prefix="decoder")

    def prepare(self, rows: Iterable[Row], quarantined: Mapping[int, str], ahead: int) -> Preparation:
        """Prepare the rows of a unit.

        Args:
            rows: The rows.
            quarantined: Rows to skip, by position, with the reason.
            ahead: Number of rows that are prepared ahead, besides those being read.
        """
        return Preparation(self, rows, quarantined, ahead + self._threads)

    def submit(self, row: Row, is_next: Callable[[], bool]) -> Future[PreparedRow]:
        """Prepare a row on a reader thread and a decoder thread.

        Args:
            row: The row.
            is_next: Returns True if the session waits for this row.
        """
        done: Future[PreparedRow] = Future()
        self._reading.submit(self._read, row, is_next, done)
        return done

    def close(self) -> None:
        """Stop the threads."""
        self._reading.shutdown(cancel_futures=True)
        self._decoding.shutdown()

    def _read(self, row: Row, is_next: Callable[[], bool], done: Future[PreparedRow]) -> None:
        """Read a row, wait for memory for its pixels, and pass it to a decoder thread."""
        if not done.set_running_or_notify_cancel():
            return
        begun, expected = time.perf_counter(), self._expected_bytes
        self.encoded.acquire(expected, is_next)
        try:
            content = row.load()
        except BaseException as error:  # noqa: BLE001 - raised where the row is awaited
            self.encoded.release(expected)
            _settle(done, PreparedRow(row=row, read_s=time.perf_counter() - begun), error)
            return
        read = PreparedRow(row=row, read_s=time.perf_counter() - begun)
        if isinstance(content, bytes):
            self._expected_bytes = max(len(content), self._expected_bytes * 7 // 8)
            pixels = decoding.count_pixels(content)
        else:
            pixels = math.prod(content.shape[:2])
        size = _BYTES_PER_PIXEL * pixels
        self.memory.acquire(size, is_next)
        self._decoding.submit(self._decode, read, content, done, size, expected)

    def _decode(
        self,
        read: PreparedRow,
        content: Content,
        done: Future[PreparedRow],
        pixel_bytes: int,
        encoded_bytes: int,
    ) -> None:
        """Decode a row, and hold the memory of its sample in place of that of its pixels."""
        begun = time.thread_time()
        try:
            image = decoding.prepare(content, self._preprocess)
        except BaseException as error:  # noqa: BLE001 - raised where the row is awaited
            self.memory.release(pixel_bytes)
            self.encoded.release(encoded_bytes)
            _settle(done, read, error)
            return
        decode_s = time.thread_time() - begun
        self.memory.release(pixel_bytes - image.sample.nbytes)
        self.encoded.release(encoded_bytes)
        done.set_result(replace(read, image=image, decode_s=decode_s))


def _settle(done: Future[PreparedRow], read: PreparedRow, error: BaseException) -> None:
    """Make the error that of the row, or raise it in the session's thread if it is not caused by the row."""
    own = isinstance(error, GraphkilnError | OSError) and not isinstance(error, InputChanged | SourceUnavailable)
    if own:
        done.set_result(replace(read, error=str(error)))
    else:
        done.set_exception(error)
