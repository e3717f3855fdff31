"""Encoders: from a model's outputs to the columns of a result."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from graphkiln_backend.graph import task as tasks
from graphkiln_backend.graph import task as topk
from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError, ProtocolError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import ANY_RANK, Signature, TensorSpec
from graphkiln_backend.graph.task import Detection, Embedding, Ranking, Segmentation, is_classification
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.images.answers import Sample, read_detections, read_segmentation, read_vector
from graphkiln_backend.images.frame import Frame, frame_of
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.request import DEFAULT_TOP_K, ScoreRequest

Size = tuple[int, int]  # height and width of an upright image, in pixels


class Encoder(Protocol):
    """Turns the outputs of a batch into columns."""

    @property
    def schema(self) -> pa.Schema:
        """The columns that it writes, the same for every batch."""
        ...

    @property
    def outputs(self) -> Sequence[str]:
        """The outputs that it needs."""
        ...

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size]) -> list[pa.Array]:
        """One array per column of the schema, a value per row of the batch.

        Args:
            outputs: By name, each with a row of the batch in its first dimension.
            sizes: Sizes of the image of each row, which answers about places are brought back to.

        Raises:
            ExecutionError: An output is not what the graph says of it.
        """
        ...


# Detections: lists of boxes, classes and scores, the best first, in pixels of the image.

# COCO's uncompressed run lengths: `size` is height and width, `counts` go down the columns and begin with zeros.
MASK = pa.struct([pa.field("size", pa.list_(pa.int32())), pa.field("counts", pa.list_(pa.int32()))])
# The columns: what a detection calls it, and the type of one.
_KEYS = {
    "boxes": ("box", pa.list_(pa.float64())),
    "indices": ("index", pa.int32()),
    "labels": ("label", pa.string()),
    "scores": ("score", pa.float32()),
    "masks": ("mask", MASK),
    "keypoints": ("keypoints", pa.list_(pa.list_(pa.float64()))),
}


class Detections:
    """The columns `boxes`, `indices`, `labels` (where classes have names), `scores`, and what else the model gives.

    Each holds a list for a row: `boxes` x1, y1, x2, y2, `masks` run lengths, `keypoints` lists of x, y, score.

    Args:
        task: Which outputs hold them; what scores less than its threshold is left out, as clients do it.
        labels: Class names by index; empty for none. A class without one has an empty name.
        preprocess: How images became samples.
    """

    def __init__(self, task: tasks.Detection, labels: Sequence[str], preprocess: Preprocess) -> None:
        self.outputs: Sequence[str] = tasks.output_names(task)
        self._task, self._labels, self._preprocess = task, labels, preprocess
        given = {"labels": labels, "masks": task.masks, "keypoints": task.keypoints}
        fields = [pa.field(name, pa.list_(kind)) for name, (_, kind) in _KEYS.items() if given.get(name, True)]
        self.schema = pa.schema(fields)

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size]) -> list[pa.Array]:
        """Read each row, as clients do."""
        return columns_of(self._rows(outputs, sizes), self.schema)

    def _rows(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size]) -> Iterator[dict[str, Any]]:
        for found in read_images(self._read, outputs, self._preprocess, sizes):
            yield {name: [each[_KEYS[name][0]] for each in found] for name in self.schema.names}

    def _read(self, sample: Sample, frame: Frame) -> list[dict[str, Any]]:
        return [each.to_dict() for each in read_detections(self._task, sample, frame, self._labels)]


# Rows of a batch, read as clients read them.

_T = TypeVar("_T")


def read_rows(read: Callable[[Sample], _T], outputs: Mapping[str, AnyArray]) -> Iterator[_T]:
    """Read each row when it is asked for: the class map of a large image takes as much memory as its pixels.

    Args:
        read: The answer that the outputs of one row hold.
        outputs: By name, each with a row of the batch in its first dimension.

    Raises:
        ExecutionError: An output is not what the task says.
    """
    rows = len(next(iter(outputs.values())))
    try:
        yield from (read({name: values[row] for name, values in outputs.items()}) for row in range(rows))
    except ProtocolError as error:
        raise ExecutionError(str(error)) from error


def read_images(
    read: Callable[[Sample, Frame], _T],
    outputs: Mapping[str, AnyArray],
    preprocess: Preprocess,
    sizes: Sequence[Size],
) -> Iterator[_T]:
    """The same where the answer is about places in an image.

    Args:
        read: The answer that the outputs of one row hold, in pixels of its image.
        outputs: As above.
        preprocess: How the images became samples.
        sizes: Sizes of the images.

    Raises:
        ExecutionError: An output is not what the task says.
    """
    frames = (frame_of(preprocess, size) for size in sizes)
    return read_rows(lambda sample: read(sample, next(frames)), outputs)


def columns_of(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> list[pa.Array]:
    """Plain data as columns; each row becomes Arrow's before the next is asked for, which takes a tenth of the memory.

    Args:
        rows: At least one, with a value for each field.
        schema: The fields.
    """
    kind = pa.struct(list(schema))
    columns: list[pa.Array] = pa.concat_arrays([pa.array([row], kind) for row in rows]).flatten()
    return columns


# The scores of all classes, in the order of the classes.


class AllScores:
    """The column `scores`: a list of one length, a score per class.

    Args:
        output: Name of the output of scores, `[rows, classes]` or `[rows]`.
        dtype: dtype of its elements.
        classes: How many there are.
        softmax: Whether scores become probabilities, computed in double precision as the client does.
    """

    def __init__(self, output: str, dtype: DType, classes: int, *, softmax: bool = False) -> None:
        self.outputs: Sequence[str] = (output,)
        self._classes, self._softmax = classes, softmax
        self._dtype = score_dtype(dtype, softmax=softmax)
        self.schema = pa.schema([pa.field("scores", pa.list_(arrow_type(self._dtype)))])

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size] = ()) -> list[pa.Array]:
        """One list per row."""
        del sizes
        scores = scores_of(outputs, self.outputs[0])
        if scores.shape[1] != self._classes:
            raise ExecutionError(f"output '{self.outputs[0]}' has {scores.shape[1]} scores, expected {self._classes}")
        written = topk.softmax(scores) if self._softmax else scores.astype(self._dtype.numpy, copy=False)
        return [lists(written)]


def score_dtype(dtype: DType, *, softmax: bool) -> DType:
    """The dtype of written scores: fp64 for probabilities, fp32 for 16-bit floats, which not every reader knows."""
    if softmax:
        return DType.FP64
    return DType.FP32 if dtype in (DType.FP16, DType.BF16) else dtype


def scores_of(outputs: Mapping[str, AnyArray], name: str) -> AnyArray:
    """An output as `[rows, classes]`; one score per row is that of the only class.

    Args:
        outputs: By name.
        name: Which.

    Raises:
        ExecutionError: It has another number of dimensions.
    """
    scores = outputs[name]
    if scores.ndim == 1:
        return scores[:, None]
    if scores.ndim != _RANK:
        raise ExecutionError(
            f"output '{name}' has the shape {list(scores.shape)}, expected [rows, classes]",
            hint=f"--output {name} writes it as it is",
        )
    return scores


# From numpy's arrays to Arrow's, without a copy where both keep numbers alike.

# Arrow has no bf16; fp32 holds each of its numbers.
_TYPES: Mapping[DType, pa.DataType] = {
    DType.BOOL: pa.bool_(),
    DType.UINT8: pa.uint8(),
    DType.UINT16: pa.uint16(),
    DType.UINT32: pa.uint32(),
    DType.UINT64: pa.uint64(),
    DType.INT8: pa.int8(),
    DType.INT16: pa.int16(),
    DType.INT32: pa.int32(),
    DType.INT64: pa.int64(),
    DType.FP16: pa.float16(),
    DType.BF16: pa.float32(),
    DType.FP32: pa.float32(),
    DType.FP64: pa.float64(),
    DType.BYTES: pa.string(),
}


def arrow_type(dtype: DType) -> pa.DataType:
    """The type of a column of such elements."""
    return _TYPES[dtype]


def elements(values: AnyArray) -> pa.Array:
    """All elements of an array in one dimension, in row-major order.

    Raises:
        ExecutionError: A text is not UTF-8.
    """
    dtype = DType.from_numpy(values.dtype)
    flat = values.reshape(-1)
    if dtype is DType.BYTES:
        return _texts(flat)
    return pa.array(flat.astype(np.float32) if dtype is DType.BF16 else np.ascontiguousarray(flat), _TYPES[dtype])


def lists(values: AnyArray) -> pa.ListArray:
    """`[rows, ...]` as one list per row, in row-major order.

    Never lists of a fixed size, whatever the length: Arrow writes those to Parquet where one is null, as of a row with
    an error, and then cannot read the file.
    """
    rows, length = len(values), math.prod(values.shape[1:])
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * length), elements(values))


def _texts(flat: AnyArray) -> pa.Array:
    try:
        return pa.array([one.decode() if isinstance(one, bytes) else str(one) for one in flat.tolist()], pa.string())
    except UnicodeError as error:
        raise ExecutionError(f"the model returns a text that is not UTF-8: {error}") from error


# The vector of an image, as clients get it: normalized where the task says so.


class Vectors:
    """The column `vector`: a list of floats, each of one length where the graph says how many.

    Args:
        task: Which output holds them.
        spec: Spec of that output.
    """

    def __init__(self, task: Embedding, spec: TensorSpec) -> None:
        self.outputs: Sequence[str] = (task.vectors,)
        self._task = task
        features = spec.shape[-1] if spec.has_rank else None
        self._features = features if isinstance(features, int) else None
        self.schema = pa.schema([pa.field("vector", pa.list_(pa.float32()))])

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size] = ()) -> list[pa.Array]:
        """Read each row, as clients do."""
        del sizes
        vectors = np.stack(list(read_rows(partial(read_vector, self._task), outputs)))
        if self._features and vectors.shape[1] != self._features:
            raise ExecutionError(f"a vector has {vectors.shape[1]} features, expected {self._features}")
        return [lists(vectors)]


# Class maps: run lengths of each class, at the size of the image.

_SEGMENT = pa.struct(
    [
        pa.field("label", pa.string()),
        pa.field("index", pa.int32()),
        pa.field("share", pa.float64()),
        pa.field("mask", MASK),
    ]
)


class ClassMaps:
    """The columns `height` and `width` of the image, and `segments`: a struct for each class that occurs.

    The largest class comes first; pixels where the model did not look belong to none.

    Args:
        task: Which output holds them.
        labels: Class names by index; a class without one has an empty name.
        preprocess: How images became samples.
    """

    def __init__(self, task: tasks.Segmentation, labels: Sequence[str], preprocess: Preprocess) -> None:
        self.outputs: Sequence[str] = tasks.output_names(task)
        self._task, self._labels, self._preprocess = task, labels, preprocess
        sides = [pa.field("height", pa.int32()), pa.field("width", pa.int32())]
        self.schema = pa.schema([*sides, pa.field("segments", pa.list_(_SEGMENT))])

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size]) -> list[pa.Array]:
        """Read each row, as clients do."""
        return columns_of(read_images(self._read, outputs, self._preprocess, sizes), self.schema)

    def _read(self, sample: Sample, frame: Frame) -> dict[str, Any]:
        return read_segmentation(self._task, sample, frame, self._labels).to_dict()


# The best classes of a row: ranked here as the client ranks them, or by the graph itself.


class ClassColumns:
    """The columns `indices`, `labels` (where classes have names) and `scores`: lists, best first.

    Args:
        labels: Class names by index; empty for none. A class without one has an empty name.
        dtype: dtype of the scores as they are written.
    """

    def __init__(self, labels: Sequence[str], dtype: DType) -> None:
        self._labels = np.asarray([*labels, ""], dtype=object) if labels else None
        self._dtype = dtype
        fields = [pa.field("indices", pa.list_(pa.int32()))]
        fields += [pa.field("labels", pa.list_(pa.string()))] if labels else []
        self.schema = pa.schema([*fields, pa.field("scores", pa.list_(arrow_type(dtype)))])

    def arrays(self, indices: AnyArray, scores: AnyArray) -> list[pa.Array]:
        """One array per column.

        Args:
            indices: `[rows, k]`, not negative.
            scores: Scores of the same shape.
        """
        columns = [lists(indices.astype(np.int32))]
        if self._labels is not None:
            columns.append(lists(self._labels[np.minimum(indices.astype(np.int64), len(self._labels) - 1)]))
        return [*columns, lists(scores.astype(self._dtype.numpy, copy=False))]


class TopK:
    """Ranks the scores of all classes.

    Args:
        output: Name of the output of scores, `[rows, classes]` or `[rows]`.
        dtype: dtype of its elements.
        k: How many classes, at least 1.
        labels: Class names by index; empty for none.
        softmax: Whether scores become probabilities, computed in double precision as the client does.
    """

    def __init__(self, output: str, dtype: DType, k: int, labels: Sequence[str] = (), *, softmax: bool = False) -> None:
        self.outputs: Sequence[str] = (output,)
        self._k, self._softmax = k, softmax
        self._columns = ClassColumns(labels, score_dtype(dtype, softmax=softmax))
        self.schema = self._columns.schema

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size] = ()) -> list[pa.Array]:
        """Rank each row, as the client does."""
        del sizes
        scores = scores_of(outputs, self.outputs[0])
        # Row by row the best are found by a partition: of 1,000 classes in a third of the time that sorting takes.
        indices = np.stack([topk.top_k(row, self._k)[0] for row in scores])
        best = topk.softmax(scores) if self._softmax else scores
        return self._columns.arrays(indices, np.take_along_axis(best, indices, axis=-1))


class Ranked:
    """Reads the best classes where the graph holds a top-k itself.

    Args:
        ranking: Its outputs, and the names of the classes.
        dtype: dtype of the scores.
        k: How many classes at most.
    """

    def __init__(self, ranking: Ranking, dtype: DType, k: int) -> None:
        self.outputs: Sequence[str] = (ranking.scores, ranking.indices)
        self._k = k
        self._columns = ClassColumns(ranking.labels, score_dtype(dtype, softmax=False))
        self.schema = self._columns.schema

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size] = ()) -> list[pa.Array]:
        """The first `k` of each row, as they are."""
        del sizes
        scores, indices = (outputs[name] for name in self.outputs)
        fits = indices.shape == scores.shape and indices.ndim == 2 and indices.dtype.kind in "iu"
        if not fits or (indices.size and indices.min() < 0):
            raise ExecutionError(
                f"{indices.dtype}{list(indices.shape)} are no class indices of {list(scores.shape)} scores"
            )
        return self._columns.arrays(indices[:, : self._k], scores[:, : self._k])


# Outputs as they are: a column for each, by its name.

SHAPE = b"shape"  # the key of a field's metadata that holds the shape of a row, as JSON


class Tensors:
    """A column per output; what it holds follows from the output's shape without its first dimension.

    | shape of a row   | column                                                                     |
    |------------------|----------------------------------------------------------------------------|
    | none             | the element                                                                |
    | fixed sizes      | a list of one length, in row-major order; the field's metadata: `shape`    |
    | sizes that vary  | a list, in row-major order, and `NAME_shape` with the sizes                |

    Elements keep their type; texts are strings, and bf16, which Arrow does not have, becomes fp32.

    Args:
        specs: The outputs. The first dimension of each is the row.
        reserved: Names of columns that others write; an output of such a name goes to `output:NAME`.
    """

    def __init__(self, specs: Sequence[TensorSpec], reserved: Sequence[str] = ()) -> None:
        self.outputs: Sequence[str] = tuple(spec.name for spec in specs)
        self._shapes = {spec.name: _row_shape(spec) for spec in specs}
        fields: list[pa.Field] = []
        for spec in specs:
            name = f"output:{spec.name}" if spec.name in reserved else spec.name
            kind, shape = arrow_type(spec.dtype), self._shapes[spec.name]
            if shape is None:
                fields += [pa.field(name, pa.list_(kind)), pa.field(f"{name}_shape", pa.list_(pa.int32()))]
            elif shape:
                fields.append(pa.field(name, pa.list_(kind), metadata={SHAPE: json.dumps(shape)}))
            else:
                fields.append(pa.field(name, kind))
        self.schema = pa.schema(fields)

    def encode(self, outputs: Mapping[str, AnyArray], sizes: Sequence[Size] = ()) -> list[pa.Array]:
        """The rows of each output."""
        del sizes
        return [array for name, shape in self._shapes.items() for array in _rows_of(name, shape, outputs[name])]


def _row_shape(spec: TensorSpec) -> tuple[int, ...] | None:
    """The shape of an output's rows; None where it varies."""
    row = spec.shape[1:]
    varies = spec.shape == (ANY_RANK,) or any(isinstance(size, str) for size in row)
    # A list of length 0 has no rows that count.
    return None if varies or 0 in row else tuple(int(size) for size in row)


def _rows_of(output: str, shape: tuple[int, ...] | None, values: AnyArray) -> list[pa.Array]:
    if shape is None:
        return [lists(values), lists(np.tile(np.asarray(values.shape[1:], np.int32), (len(values), 1)))]
    if values.shape[1:] != shape:
        found = f"output '{output}' has the shape {list(values.shape)}"
        raise ExecutionError(f"{found}, expected {list(shape)} for each row")
    return [lists(values) if shape else elements(values)]


RESERVED = ("id", "model", "version", "error")  # columns that every table has
_RANK = 2


def choose_encoder(signature: Signature, contract: Contract, request: ScoreRequest) -> Encoder:
    """The encoder of a run.

    Args:
        signature: Signature of the graph; the first dimension of each output is the row.
        contract: What the version says of its classes.
        request: The run.

    Raises:
        ScoringError: The model has no such outputs, none that can be ranked, or a task without scores of classes.
    """
    if request.top_k < 1:
        raise ScoringError(f"top_k must be at least 1, got {request.top_k}")
    specs = {spec.name: spec for spec in signature.outputs}
    if request.outputs:
        _check_plain(request)
        return Tensors(_named(specs, request.outputs), (*RESERVED, *request.keep_columns))
    if not is_classification(contract.task):
        return _of_task(specs, contract, request)
    if contract.ranking:
        return _ranked(specs, contract, request)
    spec = _checked_scores(specs, contract.output or next(iter(specs)))
    if not request.scores:
        return TopK(spec.name, spec.dtype, request.top_k, contract.labels, softmax=request.softmax)
    classes = spec.shape[1] if len(spec.shape) == _RANK else 1
    if not isinstance(classes, int):
        raise ScoringError(
            f"output '{spec.name}' does not say how many classes it has: {spec}",
            hint=f"--output {spec.name} writes it as it is",
        )
    return AllScores(spec.name, spec.dtype, classes, softmax=request.softmax)


def _of_task(specs: Mapping[str, TensorSpec], contract: Contract, request: ScoreRequest) -> Encoder:
    """The encoder of a version that scores no classes.

    Raises:
        ScoringError: Scores of classes are requested, or the place of a sample in its image is not known.
    """
    if request.scores or request.softmax or request.top_k != DEFAULT_TOP_K:
        raise ScoringError(
            f"the model answers a {contract.task.kind if contract.task else 'task'}, which has no scores of classes",
            hint="leave out --scores, --softmax and --top-k",
        )
    match contract:
        case Contract(task=Embedding() as task):
            return Vectors(task, specs[task.vectors])
        case Contract(task=Detection() as task, preprocess=Preprocess() as preprocess):
            return Detections(task, contract.labels, preprocess)
        case Contract(task=Segmentation() as task, preprocess=Preprocess() as preprocess):
            return ClassMaps(task, contract.labels, preprocess)
    raise ScoringError(
        "places in an image are not known without its preprocessing",
        hint="convert the model with graphkiln convert --preprocess JSON",
    )


def _check_plain(request: ScoreRequest) -> None:
    if request.softmax:
        raise ScoringError(
            "--output writes what the model returns as it is, without --softmax",
            hint="--scores --softmax writes the probabilities of all classes",
        )


def _named(specs: Mapping[str, TensorSpec], names: Collection[str]) -> list[TensorSpec]:
    for name in names:
        if name not in specs:
            hint = did_you_mean(name, specs, otherwise=f"it has {', '.join(specs)}")
            raise ScoringError(f"the model has no output '{name}'", hint=hint)
    return [specs[name] for name in dict.fromkeys(names)]


def _ranked(specs: Mapping[str, TensorSpec], contract: Contract, request: ScoreRequest) -> Encoder:
    """The encoder of a graph that ranks its classes itself."""
    if request.scores or request.softmax or contract.ranking is None:
        what = "softmax over some of the scores" if request.softmax else "score of the other classes"
        raise ScoringError(
            f"the model returns its best classes only: there is no {what}",
            hint="convert it without --top-k" + (", or with --softmax --top-k" if request.softmax else ""),
        )
    spec = specs[contract.ranking.scores]
    there = spec.shape[-1] if spec.shape else 1
    if isinstance(there, int) and there < request.top_k != DEFAULT_TOP_K:
        raise ScoringError(
            f"the model returns its best {there} classes only, not {request.top_k}",
            hint=f"--top-k {there}, or convert it without --top-k",
        )
    return Ranked(contract.ranking, spec.dtype, request.top_k)


def _checked_scores(specs: Mapping[str, TensorSpec], name: str) -> TensorSpec:
    """The output that scores classes.

    Raises:
        ScoringError: Nothing can be ranked in it.
    """
    spec = specs[name]
    if spec.dtype is DType.BYTES or (spec.has_rank and not 1 <= len(spec.shape) <= _RANK):
        raise ScoringError(
            f"output '{name}' holds no scores of classes: {spec}, expected [rows, classes]",
            hint=f"--output NAME writes an output as it is: {', '.join(specs)}",
        )
    return spec
