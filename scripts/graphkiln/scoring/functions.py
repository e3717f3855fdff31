"""Models as functions of data frames: batches of images in, the columns of `graphkiln score` out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

import numpy as np
import pyarrow as pa

from graphkiln.scoring.options import ScoreOptions, build_request
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.loaded_model import shared_models
from graphkiln_backend.scoring.messages import ScoreRequest
from graphkiln_backend.scoring.model import read_run_model
from graphkiln_backend.scoring.scorer import Answers, check_names
from graphkiln_backend.scoring.scratch import Scratch, scratch_folder
from graphkiln_backend.scoring.sources.batches import array_of_images, image_column, rows_of
from graphkiln_backend.system.closing import Closeable

if TYPE_CHECKING:
    import daft
    import polars
    import pyspark.sql
    import ray.data

BATCH_ROWS = 256
_ERRORS = ("null", "raise")


class UdfOptions(TypedDict, total=False):
    """Options of `udf`, with the names and meanings of those of `score`.

    Attributes:
        settings: Settings that override the model's configuration: `{"precision": "bf16"}` or `["precision=bf16"]`.
        top_k: Classes per row.
        scores: Return the scores of all classes instead.
        outputs: Names of outputs to return unchanged instead; or one name.
        softmax: Turn scores into probabilities.
        image_column: Column of tables with the image or its path; empty for the only one with bytes.
        cores_per_worker: Cores that a process uses for the model; 0 for all cores of the machine.
        cache: Folder of the artifact cache on each node; None for a temporary one.
    """

    settings: Mapping[str, str] | Sequence[str] | str
    top_k: int
    scores: bool
    outputs: Sequence[str] | str
    softmax: bool
    image_column: str
    cores_per_worker: int
    cache: Path | str | None


def udf(
    model: str | Path, *, on_error: Literal["null", "raise"] = "null", **options: Unpack[UdfOptions]
) -> ScoringFunction:
    """Make a function that scores batches of data frames as a worker of `graphkiln score` scores units.

    The version and everything that changes an answer are fixed now: a process in which the function finds another
    model raises an error.

    Args:
        model: `STORE/NAME`, `STORE/NAME:VERSION` or `STORE/NAME/VERSION`; local or in a remote store.
        on_error: `"null"` to return nulls and the reason for a row without an answer, `"raise"` to raise an error.
        options: See `UdfOptions`.

    Raises:
        GraphkilnError: There is no such version, its preprocessing is unknown, or an option does not fit.
    """
    if on_error not in _ERRORS:
        raise ScoringError(f"on_error is {on_error!r}", hint=f"expected {' or '.join(map(repr, _ERRORS))}")
    if unknown := options.keys() - UdfOptions.__annotations__.keys():
        raise TypeError(f"udf() got an unexpected option '{min(unknown)}'")
    with scratch_folder(Scratch.MODEL) as folder:
        request, found = read_run_model(build_request("", model, "", cast(ScoreOptions, options)), folder.path)
        schema = Answers(found.encoder(request).schema, found.name, found.version).table().schema
        return ScoringFunction(
            request=request,
            configuration=found.configuration(request),
            schema=schema.remove(schema.get_field_index("id")),
            on_error=on_error,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringFunction(Closeable):
    """A model as a function of batches, made by `udf`.

    It can be pickled: it consists of the model's address, its options and a digest. A process builds and proves its
    session in the first call; all copies of the function in the process, in any thread, share the session. Golden
    samples are replayed after every hundred rows.

    Attributes:
        request: The model and the options.
        configuration: Digest of everything that changes an answer.
        schema: Columns of the answers, as `graphkiln score` writes them, without `id`.
        on_error: `null` or `raise`.
    """

    request: ScoreRequest
    configuration: str
    schema: pa.Schema
    on_error: str

    @property
    def type(self) -> pa.StructType:
        """Arrow type of an answer: a struct with a field for each column of `schema`."""
        return pa.struct(list(self.schema))

    def __call__(self, batch: Any) -> Any:
        """Score a batch.

        Args:
            batch: A column of images (of Arrow, NumPy, pandas, Polars or Daft, or a list): encoded images as bytes,
                `{bytes, path}`, paths or addresses, or uint8 pixels. Or a table with such a column: a `pyarrow.Table`,
                a `RecordBatch`, or a dict of NumPy arrays.

        Returns:
            For a column, a struct for each row: as a Polars series for a Polars series, otherwise as an Arrow array.
            For a table, the table with the columns of `schema` added.

        Raises:
            ScoringError: The batch has no images; or, with `on_error="raise"`, a row has no answer.
            GraphkilnError: The session cannot be built, computes wrong answers, or failed.
        """
        if isinstance(batch, Mapping):
            return self._extend_arrays(batch)
        if isinstance(batch, pa.Table):
            return self._extend(batch)
        if isinstance(batch, pa.RecordBatch):
            table = self._extend(pa.Table.from_batches([batch])).combine_chunks()
            return table.to_batches()[0] if len(table) else pa.RecordBatch.from_pylist([], schema=table.schema)
        answers = self._score(batch).to_struct_array()
        is_polars = type(batch).__module__.partition(".")[0] == "polars"
        if is_polars:
            return type(batch)(batch.name, answers)
        return answers.chunk(0) if answers.num_chunks == 1 else answers

    def close(self) -> None:
        """Free the session of this process once running calls have returned; another call builds it again."""
        shared_models().release(self.request, self.configuration)

    def daft(self, images: daft.Expression, *, batch_size: int = BATCH_ROWS, **options: Any) -> daft.Expression:
        """Score a column of Daft.

        Args:
            images: The column.
            batch_size: Maximum number of rows of a call.
            options: Options of `daft.cls`.

        Returns:
            A column of structs; `.unnest()` makes columns of them.
        """
        import daft

        class Scorer:
            def __init__(self, function: ScoringFunction) -> None:
                self._function = function

            @daft.method.batch(return_dtype=daft.DataType.from_arrow_type(self.type), batch_size=batch_size)
            def score(self, images: daft.Series) -> pa.Array:
                return self._function(images)

        # Threads of one process share a session; Daft would start processes for some columns.
        scorer = daft.cls(Scorer, **{"use_process": False} | options)(self)
        answers: daft.Expression = scorer.score(images)
        return answers

    def ray(self, dataset: ray.data.Dataset, **options: Any) -> ray.data.Dataset:
        """Add the columns of the answers to a dataset of Ray Data.

        Args:
            dataset: The dataset; option `image_column` names its column of images.
            options: Options of `map_batches`; `compute=ray.data.ActorPoolStrategy(size=4)` for four processes.
        """
        import ray.data

        defaults: dict[str, Any] = {"batch_format": "pyarrow", "batch_size": BATCH_ROWS}
        if "concurrency" not in options:
            defaults["compute"] = ray.data.ActorPoolStrategy(size=1)
        return dataset.map_batches(_Actor, fn_constructor_args=(self,), **defaults | options)

    def polars(self, images: polars.Expr | str) -> polars.Expr:
        """Score a column of Polars.

        Args:
            images: The column or its name.

        Returns:
            A column of structs; `.unnest` of the frame makes columns of them.
        """
        import polars

        column = polars.col(images) if isinstance(images, str) else images
        kind = polars.Series(values=pa.nulls(0, self.type)).dtype
        return column.map_batches(self, return_dtype=kind, is_elementwise=True)

    def spark(self, images: pyspark.sql.Column | str, *, batch_size: int = BATCH_ROWS) -> pyspark.sql.Column:
        """Score a column of Spark with `predict_batch_udf`.

        Args:
            images: The column or its name.
            batch_size: Maximum number of rows of a call.

        Returns:
            A column of structs; `answer.*` makes columns of them.
        """
        from pyspark.ml.functions import predict_batch_udf
        from pyspark.sql.pandas.types import from_arrow_type

        kind = from_arrow_type(self.type)
        return predict_batch_udf(self._predict, return_type=kind, batch_size=batch_size)(images)

    def _predict(self) -> Callable[[Any], dict[str, Any]]:
        """Return the function that `predict_batch_udf` calls with the images of a batch."""

        def predict(images: np.ndarray[Any, Any]) -> dict[str, Any]:
            answers = self._score(images)
            return {
                field.name: (_Lists if pa.types.is_list(field.type) else _objects)(answers[field.name].to_pylist())
                for field in answers.schema
            }

        return predict

    def _score(self, images: Any) -> pa.Table:
        """Score a column of images; raise an error for the first row without an answer if that is requested."""
        rows = rows_of(images)
        if not rows:  # some frameworks call functions with empty batches on the driver
            return self.schema.empty_table()
        with shared_models().lend(self.request, self.configuration) as model:
            answers = model.answer(rows).drop_columns("id")
        if self.on_error == "raise" and answers.column("error").null_count < len(rows):
            row, reason = next((row, reason) for row, reason in enumerate(answers["error"].to_pylist()) if reason)
            raise ScoringError(
                f"row {row} of a batch of {len(rows)} has no answer: {reason}",
                hint='on_error="null" returns nulls and the reason for such rows',
            )
        return answers

    def _extend(self, batch: pa.Table) -> pa.Table:
        check_names([*batch.schema.names, *self.schema.names])
        answers = self._score(image_column(batch, self.request.image_column))
        return pa.table([*batch.columns, *answers.columns], schema=pa.schema([*batch.schema, *answers.schema]))

    def _extend_arrays(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        check_names([*batch, *self.schema.names])
        answers = self._score(batch[array_of_images(batch, self.request.image_column)])
        return {**batch, **{name: answers[name].to_numpy() for name in answers.schema.names}}


class _Actor:
    """The callable class that Ray Data needs for a pool of actors."""

    def __init__(self, function: ScoringFunction) -> None:
        self._function = function

    def __call__(self, batch: Any) -> Any:
        return self._function(batch)


class _Lists(list[Any]):
    """A column of lists, some of them null, with the shape that `predict_batch_udf` asks for."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), 0


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=object)
