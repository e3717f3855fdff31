"""Rows -> batches -> answers: the session computes a batch while the rows of the next ones are read and decoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError, SignatureError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.images import decoding
from graphkiln_backend.scoring.encoders import Encoder
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import Row, StageTimes
from graphkiln_backend.scoring.reading import PreparedRow, Reader
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import trim_memory

_BATCHES_AHEAD = 2
_TRIM_S = 10.0  # between two returns of free memory to the system; after each unit it would cost 3% of the time
_BATCH_BYTES = 256 << 20  # of samples; batches of large rows have fewer rows
_COMBINED_BYTES = 256 << 20  # larger tables are not copied into one chunk, whose lists have 32-bit offsets
_SAMPLE_RANK = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The answers of a unit.

    Attributes:
        table: One row per row of the unit, in order: `id`, kept columns, the encoder's columns, `model`, `version` and
            `error`. Either the error or the answers are null.
        times: Seconds per stage, without the commit.
    """

    table: pa.Table
    times: StageTimes


class Scorer(Closeable):
    """Scores units, several at a time in different threads: one makes a batch while another one computes.

    Args:
        session: Computes batches.
        reader: Prepares rows; closed with the scorer.
        image_input: Input of the session.
        encoder: Converts its outputs.
        batch_size: Maximum number of rows per batch.
        model: Name and version of the model, for the columns.
        check: Proves the session again; raises a `GraphkilnError` if it computes wrong answers.

    Attributes:
        computing: Lock of the session, which allows one caller at a time.
        computed_batches: Number of batches that the session has computed.
    """

    def __init__(
        self,
        session: Session,
        reader: Reader,
        *,
        image_input: ImageInput,
        encoder: Encoder,
        batch_size: int,
        model: tuple[str, int],
        check: Callable[[], None],
    ) -> None:
        self.session, self.image_input, self.encoder, self.batch_size = session, image_input, encoder, batch_size
        self.model, self.check = model, check
        self.computing = threading.Lock()
        self.computed_batches = 0
        self._reader = reader
        self._trimmed_at = time.monotonic()

    def close(self) -> None:
        """Stop the threads."""
        self._reader.close()

    def answer(self, rows: Iterable[Row], quarantined: Mapping[int, str] | None = None) -> Scored:
        """Answer every row.

        Args:
            rows: The rows.
            quarantined: Rows to skip, by position, with the reason that becomes their error.

        Raises:
            InputChanged: A row differs from the plan.
            SourceUnavailable: Temporary failure of the source.
            GraphkilnError: The session failed, and no row is to blame.
        """
        unit = _Unit(self)
        with self._reader.prepare(rows, quarantined or {}, _BATCHES_AHEAD * self.batch_size) as preparation:
            for batch in unit.batches(preparation):
                unit.compute(batch)
                preparation.release(batch)
        scored = Scored(table=unit.answers.table(), times=StageTimes(**unit.seconds))
        if time.monotonic() - self._trimmed_at > _TRIM_S:  # the next unit may need memory in other sizes
            self._trimmed_at = time.monotonic()
            pa.default_memory_pool().release_unused()
            trim_memory()
        return scored


class _Unit:
    """A unit that is being scored."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._batches = BatchBuffer()
        self.answers = Answers(scorer.encoder.schema, *scorer.model)
        self.seconds = dict.fromkeys(("read_s", "decode_s", "wait_s", "compute_s", "encode_s"), 0.0)

    def batches(self, rows: Iterable[PreparedRow]) -> Iterator[list[PreparedRow]]:
        """Group rows into batches of one sample shape, limited in rows and bytes; rows with an error join any batch."""
        batch: list[PreparedRow] = []
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
        full = len(samples) == self._scorer.batch_size
        return not full and sample.shape == samples[0].shape and (len(samples) + 1) * sample.nbytes <= _BATCH_BYTES

    def compute(self, batch: Sequence[PreparedRow]) -> None:
        """Compute a batch and collect its answers."""
        images = [one.image for one in batch if one.image]
        found = iter(self._answer(images)) if images else iter(())
        errors = [next(found) if one.image else one.error for one in batch]
        self.answers.add([one.row for one in batch], errors)

    def _answer(self, images: Sequence[decoding.Prepared]) -> list[str | None]:
        """Compute images together, or one by one if that fails.

        Returns:
            An error or None for each image.

        Raises:
            GraphkilnError: An image fails alone, and so does the proof of the session.
        """
        try:
            self._run(images)
        except (ExecutionError, SignatureError) as error:
            if len(images) > 1:
                return [self._answer([image])[0] for image in images]
            with self._scorer.computing:
                self._scorer.check()
            return [str(error)]
        return [None] * len(images)

    def _run(self, images: Sequence[decoding.Prepared]) -> None:
        encoder, image_input = self._scorer.encoder, self._scorer.image_input
        begun = time.thread_time()
        feeds = image_input.feeds([image.sample for image in images], self._batches)
        fed = time.thread_time()
        with self._scorer.computing:
            started = time.perf_counter()
            outputs = self._scorer.session.run(feeds, encoder.outputs)
            self.seconds["compute_s"] += time.perf_counter() - started
            self._scorer.computed_batches += 1
        computed = time.thread_time()
        sizes = [(image.height, image.width) for image in images]
        self.answers.add_columns(encoder.encode(image_input.rows(outputs, len(images)), sizes))
        self.seconds["encode_s"] += fed - begun + time.thread_time() - computed


class Answers:
    """Collects the answers of a unit into a table.

    Args:
        schema: Columns of the encoder.
        model: Model name.
        version: Version number.
    """

    def __init__(self, schema: pa.Schema, model: str, version: int) -> None:
        self._schema, self._model, self._version = schema, model, version
        self._ids: list[str] = []
        self._kept: dict[str, list[pa.Array]] = {}
        self._errors: list[str | None] = []
        self._answered: list[list[pa.Array]] = [[] for _ in schema]

    def add(self, rows: Sequence[Row], errors: Sequence[str | None]) -> None:
        """Add rows in order, with an error or None for each."""
        for row in rows:
            self._ids.append(row.id)
            for name, value in row.kept.items():
                self._kept.setdefault(name, []).append(value)
        self._errors += errors

    def add_columns(self, columns: Sequence[pa.Array]) -> None:
        """Add the answers of the next rows without an error, as one array per column of the schema."""
        for collected, column in zip(self._answered, columns, strict=True):
            collected.append(column)

    def table(self) -> pa.Table:
        """Build the table of all added rows.

        Raises:
            ScoringError: A kept column has the name of an output column.
        """
        schema = result_schema({name: values[0].type for name, values in self._kept.items()}, self._schema)
        rows = len(self._ids)
        columns = [
            pa.array(self._ids, pa.string()),
            *map(pa.chunked_array, self._kept.values()),
            *self._spread(),
            pa.repeat(self._model, rows),
            pa.repeat(pa.scalar(self._version, pa.int64()), rows),
            pa.array(self._errors, pa.string()),
        ]
        table = pa.table(columns, schema=schema)
        return table.combine_chunks() if table.nbytes <= _COMBINED_BYTES else table

    def _spread(self) -> list[pa.ChunkedArray]:
        """Return the encoder's columns with nulls for rows with an error."""
        columns = [
            pa.chunked_array(collected, field.type)
            for collected, field in zip(self._answered, self._schema, strict=True)
        ]
        scored = np.asarray([error is None for error in self._errors], dtype=bool)
        if scored.all():
            return columns
        if not scored.any():
            return [pa.chunked_array([pa.nulls(len(scored), field.type)]) for field in self._schema]
        positions = pa.array(np.cumsum(scored) - 1, mask=~scored)
        return [column.take(positions) for column in columns]


def result_schema(kept: Mapping[str, pa.DataType], answers: pa.Schema) -> pa.Schema:
    """Return the columns of results.

    Args:
        kept: Columns of the input and their types.
        answers: Columns of the encoder.

    Raises:
        ScoringError: A kept column has the name of an output column.
    """
    fields = [pa.field("id", pa.string()), *(pa.field(name, kind) for name, kind in kept.items()), *answers]
    fields += [pa.field("model", pa.string()), pa.field("version", pa.int64()), pa.field("error", pa.string())]
    check_names([field.name for field in fields])
    return pa.schema(fields)


def check_names(names: Sequence[str]) -> None:
    """Check that column names are unique.

    Raises:
        ScoringError: A kept column has the name of an output column.
    """
    for name in names:
        if names.count(name) > 1:
            hint = "rename it in the input, or leave it out of --keep-columns"
            raise ScoringError(f"the input and the output both have a column '{name}'", hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageInput:
    """The input tensor of a graph that takes images.

    Attributes:
        batched: True if its first dimension is the batch.
        max_rows: Maximum number of images per run.
    """

    name: str
    batched: bool
    max_rows: int

    @classmethod
    def of(cls, signature: Signature, preprocess: Preprocess, max_batch_size: int) -> ImageInput:
        """Find the image input of a graph.

        Args:
            signature: Signature of the graph.
            preprocess: Preprocessing of the model.
            max_batch_size: Setting of the configuration. With 0, rows are computed one by one even if the graph has a
                batch dimension, because they may depend on each other.

        Raises:
            ScoringError: Preprocessed images do not fit the input.
        """
        if len(signature.inputs) != 1:
            names = ", ".join(spec.name for spec in signature.inputs) or "none"
            raise ScoringError(f"expected a model with one input, the image, got {len(signature.inputs)}: {names}")
        spec = signature.inputs[0]
        batched = len(spec.shape) == _SAMPLE_RANK + 1
        if problem := _problem(spec, preprocess, batched=batched):
            raise ScoringError(
                f"preprocessed images do not fit the input '{spec.name}': {problem}",
                hint="correct the preprocess spec: graphkiln convert --preprocess JSON",
            )
        return cls(name=spec.name, batched=batched, max_rows=max(1, max_batch_size) if batched else 1)

    def signature_of_rows(self, signature: Signature) -> Signature:
        """Add a batch dimension to the outputs of a signature that has none."""
        if self.batched:
            return signature
        outputs = [
            TensorSpec(name=spec.name, dtype=spec.dtype, shape=("batch", *spec.shape) if spec.has_rank else spec.shape)
            for spec in signature.outputs
        ]
        return Signature(inputs=signature.inputs, outputs=tuple(outputs))

    def feeds(self, samples: Sequence[AnyArray], batches: BatchBuffer) -> dict[str, AnyArray]:
        """Build the feeds of at most `max_rows` samples of one shape; valid until `batches` is used again."""
        if not self.batched:
            return {self.name: samples[0]}
        return {self.name: batches.stack(samples) if len(samples) > 1 else samples[0][np.newaxis]}

    def rows(self, outputs: dict[str, AnyArray], count: int) -> dict[str, AnyArray]:
        """Return outputs with one row per image.

        Raises:
            ExecutionError: An output has another number of rows than there are images.
        """
        if not self.batched:
            return {name: values[np.newaxis] for name, values in outputs.items()}
        for name, values in outputs.items():
            if values.shape[:1] != (count,):
                raise ExecutionError(f"output '{name}' has the shape {list(values.shape)} for {count} images")
        return outputs


def _problem(spec: TensorSpec, preprocess: Preprocess, *, batched: bool) -> str:
    """Return why samples do not fit an input, or an empty string."""
    if preprocess.dtype is not spec.dtype:
        return f"they are {preprocess.dtype}, it is {spec}"
    if batched and isinstance(spec.shape[0], int) and spec.shape[0] != 1:
        return f"its batch size is fixed at {spec.shape[0]}: {spec}"
    sample = preprocess.misfit(spec.shape)
    return f"they are {sample}, it is {spec}" if sample else ""


class BatchBuffer:
    """Memory that is reused for each batch: new memory must be cleared by the system first.

    For 8 images of 224 x 224, that took five times as long as copying them.
    """

    def __init__(self) -> None:
        self._memory: AnyArray = np.empty(0, np.uint8)

    def stack(self, samples: Sequence[AnyArray]) -> AnyArray:
        """Stack samples of one shape and dtype to `[rows, ...]`; the next call overwrites the result."""
        first = samples[0]
        size = len(samples) * first.nbytes
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        batch = self._memory[:size].view(first.dtype).reshape(len(samples), *first.shape)
        return np.stack(samples, out=batch)
