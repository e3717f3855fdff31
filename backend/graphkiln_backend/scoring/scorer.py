"""Rows -> batches -> answers: the session computes while the rows of the next batches are read and decoded."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import pyarrow as pa

from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError, GraphkilnError, SignatureError
from graphkiln_backend.images import decoding
from graphkiln_backend.scoring.answers import Answers
from graphkiln_backend.scoring.encoders.base import Encoder
from graphkiln_backend.scoring.image_input import BatchBuffer, ImageInput
from graphkiln_backend.scoring.reading import Prepared, Reader
from graphkiln_backend.scoring.rows import Row
from graphkiln_backend.system.closing import Closeable

_BATCHES_AHEAD = 2
# What is given back must be fetched again page by page: of units that take a second, each would pay 3% for it.
_RETURN_S = 10.0
# Samples of a batch; a batch of fewer rows than usual is computed where rows are larger than usual.
_BATCH_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """What each stage of some units took, in seconds. Stages overlap: their sum is no elapsed time.

    Attributes:
        read_s: Elapsed while rows were read, summed over all readers: what a store takes to answer.
        decode_s: Processor time of decoding and preprocessing.
        wait_s: Elapsed while a batch waited for its rows: what faster reading or more cores for decoding would save.
        compute_s: Elapsed in the session.
        encode_s: Processor time of making columns from outputs.
        commit_s: Elapsed in the destination.
    """

    read_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    encode_s: float = 0.0
    commit_s: float = 0.0

    def __add__(self, other: StageTimes) -> StageTimes:
        """Of the units of both."""
        names = [field.name for field in fields(self)]
        return StageTimes(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What a unit was answered.

    Attributes:
        table: A row per row of the unit, in its order: `id`, kept columns, the encoder's columns, `model`, `version`
            and `error`, which is null where the answers are not.
        times: What its stages took.
    """

    table: pa.Table
    times: StageTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """How rows become answers.

    Attributes:
        session: Computes; one thread at a time.
        image_input: What it takes of images.
        encoder: Turns outputs into columns.
        batch_size: Rows that are computed together.
        model: Its name, for the column.
        version: Its number, for the column.
        check: Proves the session again; raises a `GraphkilnError` where it computes wrongly.
    """

    session: Session
    image_input: ImageInput
    encoder: Encoder
    batch_size: int
    model: str
    version: int
    check: Callable[[], None]


class Scorer(Closeable):
    """Answers rows; several threads may score a unit each: the batch of one is made while that of another is computed.

    Args:
        computation: How rows become answers.
        reader: Prepares them; owned.

    Attributes:
        rows_done: Rows that have an answer or an error, of all units so far: where it stands still, something hangs.
    """

    def __init__(self, computation: Computation, reader: Reader) -> None:
        self.rows_done = 0
        self._returned_at = time.monotonic()
        self._computation, self._reader = computation, reader
        self._computing = threading.Lock()

    def close(self) -> None:
        """Ends the threads."""
        self._reader.close()

    def score(self, rows: Iterable[Row], quarantined: Mapping[int, str] | None = None) -> Scored:
        """Answers every row.

        Args:
            rows: The rows.
            quarantined: Rows that must not be touched, by their position, and why; that is their error.

        Raises:
            InputChanged: A row is no longer what was planned.
            SourceUnavailable: The input cannot be read just now.
            GraphkilnError: The session failed, and no row is to blame.
        """
        unit = _Unit(self._computation, self._computing)
        with self._reader.prepare(rows, quarantined or {}, _BATCHES_AHEAD * self.batch_size) as preparation:
            for batch in unit.batches(preparation):
                unit.compute(batch)
                preparation.release(batch)
                self.rows_done += len(batch)
        scored = Scored(table=unit.answers.table(), times=StageTimes(**unit.seconds))
        self._return_memory()
        return scored

    def _return_memory(self) -> None:
        """Gives freed memory back to the system: what one unit needed, the next may need in other pieces."""
        if time.monotonic() - self._returned_at > _RETURN_S:
            self._returned_at = time.monotonic()
            pa.default_memory_pool().release_unused()
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
                trim(0)

    @property
    def batch_size(self) -> int:
        """Rows that are computed together."""
        return self._computation.batch_size


class _Unit:
    """A unit while it is scored."""

    def __init__(self, computation: Computation, computing: threading.Lock) -> None:
        self._computation, self._computing = computation, computing
        self._batches = BatchBuffer()
        self.answers = Answers(computation.encoder.schema, computation.model, computation.version)
        self.seconds = dict.fromkeys(("read_s", "decode_s", "wait_s", "compute_s", "encode_s"), 0.0)

    def batches(self, rows: Iterable[Prepared]) -> Iterator[list[Prepared]]:
        """Cuts rows into what is computed together: of one shape, and within what the graph takes."""
        batch: list[Prepared] = []
        samples: list[AnyArray] = []
        begun = time.perf_counter()
        for one in rows:
            if samples and one.sample is not None and not self._fits(samples, one.sample):
                self.seconds["wait_s"] += time.perf_counter() - begun
                yield batch
                batch, samples, begun = [], [], time.perf_counter()
            batch.append(one)
            samples += [] if one.sample is None else [one.sample]
            self.seconds["read_s"] += one.read_s
            self.seconds["decode_s"] += one.decode_s
        self.seconds["wait_s"] += time.perf_counter() - begun
        if batch:
            yield batch

    def _fits(self, samples: Sequence[AnyArray], sample: AnyArray) -> bool:
        full = len(samples) == self._computation.batch_size
        return not full and sample.shape == samples[0].shape and (len(samples) + 1) * sample.nbytes <= _BATCH_BYTES

    def compute(self, batch: Sequence[Prepared]) -> None:
        """Adds the answers of a batch."""
        images = [one.image for one in batch if one.image]
        found = iter(self._answer(images)) if images else iter(())
        errors = [next(found) if one.image else one.error for one in batch]
        self.answers.add([one.row for one in batch], errors)

    def _answer(self, images: Sequence[decoding.Prepared]) -> list[str | None]:
        """Computes images and adds their columns; the error of each that fails by itself, None of each that does not.

        Raises:
            GraphkilnError: All fail, and the session no longer computes what it was proven by either.
        """
        try:
            self._run(images)
        except (ExecutionError, SignatureError) as error:
            return self._answer_alone(images, error)
        return [None] * len(images)

    def _answer_alone(self, images: Sequence[decoding.Prepared], error: GraphkilnError) -> list[str | None]:
        if len(images) == 1:
            with self._computing:
                self._computation.check()
            return [str(error)]
        return [self._answer([image])[0] for image in images]

    def _run(self, images: Sequence[decoding.Prepared]) -> None:
        encoder, image_input = self._computation.encoder, self._computation.image_input
        begun = time.thread_time()
        feeds = image_input.feeds([image.sample for image in images], self._batches)
        fed = time.thread_time()
        with self._computing:
            started = time.perf_counter()
            outputs = self._computation.session.run(feeds, encoder.outputs)
            self.seconds["compute_s"] += time.perf_counter() - started
        computed = time.thread_time()
        sizes = [(image.height, image.width) for image in images]
        self.answers.add_columns(encoder.encode(image_input.rows(outputs, len(images)), sizes))
        self.seconds["encode_s"] += fed - begun + time.thread_time() - computed
