"""Rows are read, decoded and preprocessed ahead of the session, in bounded memory.

Reading waits for disks and networks, decoding for cores: many threads read, and as many others decode as there are
cores. What they hold is counted in bytes, not in rows: the pixels of an image from before it is decoded until
it is a sample, and the sample until its batch is computed. The row that a session waits for next is always let in, so
that the rows behind it, which hold all the memory, cannot keep it waiting forever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images import decoding
from graphkiln_backend.scoring.errors import InputChanged, SourceUnavailable
from graphkiln_backend.scoring.messages import Row
from graphkiln_backend.system.closing import Closeable

# The bound of memory: bytes, whatever the number of things that hold them.


class MemoryGate:
    """Admits what fits beside what is held. Something larger than the whole is admitted alone.

    Args:
        limit_bytes: Most bytes of all that is held together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now."""
        return self._held

    def acquire(self, size_bytes: int, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Wait until there is room.

        Args:
            size_bytes: What is to be held.
            is_urgent: Whether it must be admitted in any case, because what is held waits for it. Asked again whenever
                something is released.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._held or self._held + size_bytes <= self._limit or is_urgent(),
            )
            self._held += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give back what was held; 0 to have everybody who waits look again."""
        with self._changed:
            self._held -= size_bytes
            self._changed.notify_all()

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Wait until there is room, and hold it during the block."""
        self.acquire(size_bytes)
        try:
            yield
        finally:
            self.release(size_bytes)


READERS_PER_CORE = 8  # A store that takes 50 ms to answer gives 160 images a second to eight readers
MEMORY_BYTES = 512 << 20  # of pixels and samples of all rows that are ahead, and as much again of encoded images
_BYTES_PER_PIXEL = 8  # decoded, and once more converted or turned upright


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A row, and its image or the reason why it has none.

    Attributes:
        image: What the session takes of it, and the size of what that was made from; None with an error.
        error: Why it has no answer; None with an image.
        read_s: Elapsed while it was read.
        decode_s: Processor time of decoding and preprocessing it.
    """

    row: Row
    image: decoding.Prepared | None = None
    error: str | None = None
    read_s: float = 0.0
    decode_s: float = 0.0

    @property
    def sample(self) -> AnyArray | None:
        """The sample of the image."""
        return self.image.sample if self.image else None

    @property
    def size_bytes(self) -> int:
        """Bytes of the sample."""
        return self.image.sample.nbytes if self.image else 0


class Preparation(Closeable):
    """The rows of a unit in their order, some of them prepared before they are taken.

    Args:
        reader: Prepares them.
        rows: The rows.
        quarantined: Rows that must not be touched, by their position, and why.
        ahead: How many are prepared before they are asked for.
    """

    def __init__(self, reader: Reader, rows: Iterable[Row], quarantined: Mapping[int, str], ahead: int) -> None:
        self._reader, self._rows, self._quarantined, self._ahead = reader, rows, quarantined, ahead
        self._waiting: deque[Future[Prepared]] = deque()
        self._taken = 0
        self._held_bytes = 0
        self._closed = False

    def __iter__(self) -> Iterator[Prepared]:
        """The rows; their samples are held until they are released.

        Raises:
            InputChanged: A row is no longer what was planned.
            SourceUnavailable: The input cannot be read just now.
        """
        for position, row in enumerate(self._rows):
            self._waiting.append(self._submit(position, row))
            if len(self._waiting) >= self._ahead:
                yield self._take()
        while self._waiting:
            yield self._take()

    def release(self, batch: Iterable[Prepared]) -> None:
        """Give back the memory of samples that are no longer needed."""
        size = sum(one.size_bytes for one in batch)
        self._held_bytes -= size
        self._reader.memory.release(size)

    def close(self) -> None:
        """Stop taking rows: memory that is held for the rest is given back as soon as it is prepared."""
        self._closed = True
        for future in self._waiting:
            future.cancel()
            future.add_done_callback(self._release_result)
        self._reader.memory.release(self._held_bytes)
        self._reader.encoded.release(0)
        self._held_bytes = 0

    def _submit(self, position: int, row: Row) -> Future[Prepared]:
        if position not in self._quarantined:
            return self._reader.submit(row, partial(self._is_next, position))
        future: Future[Prepared] = Future()
        future.set_result(Prepared(row=row, error=self._quarantined[position]))
        return future

    def _is_next(self, position: int) -> bool:
        return self._closed or self._taken == position

    def _take(self) -> Prepared:
        prepared = self._waiting[0].result()
        self._waiting.popleft()
        self._held_bytes += prepared.size_bytes
        self._taken += 1
        self._reader.memory.release(0)  # the row behind it may be the one that must be let in now
        self._reader.encoded.release(0)
        return prepared

    def _release_result(self, future: Future[Prepared]) -> None:
        if not future.cancelled() and not future.exception():
            self._reader.memory.release(future.result().size_bytes)


class Reader(Closeable):
    """Prepares the rows of some units at a time.

    Args:
        preprocess: How an image becomes a sample.
        cores: How many decode at a time.
        memory_bytes: Most bytes of pixels and samples together; a single image may take more.

    Attributes:
        memory: Holds pixels and samples.
        encoded: Holds what is read and not yet decoded.
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
            quarantined: Rows that must not be touched, by their position, and why.
            ahead: How many are prepared before they are asked for, beside those that are being read.
        """
        return Preparation(self, rows, quarantined, ahead + self._threads)

    def submit(self, row: Row, is_next: Callable[[], bool]) -> Future[Prepared]:
        """Prepare a row on a thread that reads, then on one that decodes.

        Args:
            row: The row.
            is_next: Whether everybody waits for this one.
        """
        done: Future[Prepared] = Future()
        self._reading.submit(self._read, row, is_next, done)
        return done

    def close(self) -> None:
        """End the threads."""
        self._reading.shutdown(cancel_futures=True)
        self._decoding.shutdown()

    def _read(self, row: Row, is_next: Callable[[], bool], done: Future[Prepared]) -> None:
        """Read a row, wait for memory for its pixels, and pass it to a decoder thread."""
        if not done.set_running_or_notify_cancel():
            return
        begun, expected = time.perf_counter(), self._expected_bytes
        self.encoded.acquire(expected, is_next)
        try:
            content = row.load()
        except BaseException as error:  # noqa: BLE001 - raised where the row is awaited
            self.encoded.release(expected)
            _settle(done, Prepared(row=row, read_s=time.perf_counter() - begun), error)
            return
        read = Prepared(row=row, read_s=time.perf_counter() - begun)
        self._expected_bytes = max(len(content), self._expected_bytes * 7 // 8)
        size = _BYTES_PER_PIXEL * decoding.count_pixels(content)
        self.memory.acquire(size, is_next)
        self._decoding.submit(self._decode, read, content, done, _Held(pixels=size, encoded=expected))

    def _decode(self, read: Prepared, content: bytes, done: Future[Prepared], held: _Held) -> None:
        """Settle a row with its sample, whose memory is held from now on."""
        begun = time.thread_time()
        try:
            image = decoding.prepare(content, self._preprocess)
        except BaseException as error:  # noqa: BLE001 - raised where the row is awaited
            self._release(held)
            _settle(done, read, error)
            return
        decode_s = time.thread_time() - begun
        self._release(held, image.sample.nbytes)
        done.set_result(replace(read, image=image, decode_s=decode_s))

    def _release(self, held: _Held, kept_bytes: int = 0) -> None:
        self.memory.release(held.pixels - kept_bytes)
        self.encoded.release(held.encoded)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """Bytes that are held for a row while it is decoded."""

    pixels: int
    encoded: int


def _settle(done: Future[Prepared], read: Prepared, error: BaseException) -> None:
    """Settle a row with its own error; anything else is raised where the row is awaited."""
    own = isinstance(error, GraphkilnError | OSError) and not isinstance(error, InputChanged | SourceUnavailable)
    if own:
        done.set_result(replace(read, error=str(error)))
    else:
        done.set_exception(error)
