"""Encoders: convert the outputs of a model to columns, with the same values as clients get.

| encoder         | columns                                                                               |
|-----------------|---------------------------------------------------------------------------------------|
| `best_classes`  | `indices`, `labels` (if classes have names), `scores`: lists, best first              |
| `graph_ranking` | the same, if the graph contains a top-k itself                                        |
| `all_scores`    | `scores`: a list of fixed length, in the order of the classes                         |
| `detections`    | `boxes`, `indices`, `labels`, `scores`, `masks`, `keypoints`: lists, best first       |
| `class_maps`    | `height` and `width` of the image, `segments`: a struct per class, the largest first  |
| `vectors`       | `vector`: a list of floats                                                            |
| `raw_outputs`   | a column for each output, by its name                                                 |
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from graphkiln_backend.graph import task as tasks
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
from graphkiln_backend.scoring.messages import DEFAULT_TOP_K, ScoreRequest

RESERVED = ("id", "model", "version", "error")  # columns of every table
SHAPE = b"shape"  # key of the field metadata with the shape of a row, as JSON
Size = tuple[int, int]  # height and width of an upright image, in pixels
Outputs = Mapping[str, AnyArray]
_T = TypeVar("_T")
_RANK = 2

# COCO's uncompressed RLE: `size` is height and width, `counts` run down the columns and start with zeros.
MASK = pa.struct([pa.field("size", pa.list_(pa.int32())), pa.field("counts", pa.list_(pa.int32()))])
# Column -> key of a detection and the type of its value.
_DETECTION = {
    "boxes": ("box", pa.list_(pa.float64())),
    "indices": ("index", pa.int32()),
    "labels": ("label", pa.string()),
    "scores": ("score", pa.float32()),
    "masks": ("mask", MASK),
    "keypoints": ("keypoints", pa.list_(pa.list_(pa.float64()))),
}
_SEGMENT = pa.struct(
    [
        pa.field("label", pa.string()),
        pa.field("index", pa.int32()),
        pa.field("share", pa.float64()),
        pa.field("mask", MASK),
    ]
)
# Arrow has no bf16; fp32 represents all of its values.
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


@dataclass(frozen=True, slots=True)
class Encoder:
    """Converts the outputs of a batch to columns.

    Attributes:
        schema: The columns.
        outputs: Names of the outputs that it needs.
        encode: Takes these outputs, with the batch as first dimension, and the image size of each row; returns one
            array per column. Raises `ExecutionError` if an output contradicts the signature.
    """

    schema: pa.Schema
    outputs: tuple[str, ...]
    encode: Callable[[Outputs, Sequence[Size]], list[pa.Array]]


def choose_encoder(signature: Signature, contract: Contract, request: ScoreRequest) -> Encoder:
    """Choose the encoder of a run.

    Args:
        signature: Signature of the graph; the first dimension of each output is the batch.
        contract: Task and labels of the version.
        request: The run.

    Raises:
        ScoringError: The model lacks a requested output, or has no scores of classes.
    """
    if request.top_k < 1:
        raise ScoringError(f"top_k must be at least 1, got {request.top_k}")
    specs = {spec.name: spec for spec in signature.outputs}
    if request.outputs:
        return raw_outputs(_named_outputs(specs, request), (*RESERVED, *request.keep_columns))
    if not is_classification(contract.task):
        return _task_encoder(specs, contract, request)
    if contract.ranking:
        _check_ranking(specs[contract.ranking.scores], request)
        return graph_ranking(contract.ranking, specs[contract.ranking.scores].dtype, request.top_k)
    spec = specs[contract.output or next(iter(specs))]
    if spec.dtype is DType.BYTES or (spec.has_rank and not 1 <= len(spec.shape) <= _RANK):
        raise ScoringError(
            f"output '{spec.name}' has no scores of classes: {spec}, expected [rows, classes]",
            hint=f"--output NAME writes an output unchanged: {', '.join(specs)}",
        )
    if request.scores:
        return all_scores(spec, softmax=request.softmax)
    return best_classes(spec, request.top_k, contract.labels, softmax=request.softmax)


def _task_encoder(specs: Mapping[str, TensorSpec], contract: Contract, request: ScoreRequest) -> Encoder:
    if request.scores or request.softmax or request.top_k != DEFAULT_TOP_K:
        kind = contract.task.kind if contract.task else "unknown"
        raise ScoringError(
            f"the task of the model is {kind}, which has no scores of classes",
            hint="leave out --scores, --softmax and --top-k",
        )
    match contract:
        case Contract(task=Embedding() as task):
            return vectors(task, specs[task.vectors])
        case Contract(task=Detection() as task, preprocess=Preprocess() as preprocess):
            return detections(task, contract.labels, preprocess)
        case Contract(task=Segmentation() as task, preprocess=Preprocess() as preprocess):
            return class_maps(task, contract.labels, preprocess)
    raise ScoringError(
        "positions in an image need the preprocessing of the model, which is unknown",
        hint="convert the model with graphkiln convert --preprocess JSON",
    )


def _named_outputs(specs: Mapping[str, TensorSpec], request: ScoreRequest) -> list[TensorSpec]:
    if request.softmax:
        raise ScoringError(
            "--output writes outputs unchanged and cannot be used with --softmax",
            hint="--scores --softmax writes the probabilities of all classes",
        )
    for name in request.outputs:
        if name not in specs:
            hint = did_you_mean(name, specs, otherwise=f"it has {', '.join(specs)}")
            raise ScoringError(f"the model has no output '{name}'", hint=hint)
    return [specs[name] for name in dict.fromkeys(request.outputs)]


def _check_ranking(spec: TensorSpec, request: ScoreRequest) -> None:
    """Refuse options that need more classes than a graph with its own top-k returns."""
    if request.scores or request.softmax:
        what = "softmax over some of the scores" if request.softmax else "score of the other classes"
        raise ScoringError(
            f"the model returns its best classes only: there is no {what}",
            hint="convert it without --top-k" + (", or with --softmax --top-k" if request.softmax else ""),
        )
    there = spec.shape[-1] if spec.shape else 1
    if isinstance(there, int) and there < request.top_k != DEFAULT_TOP_K:
        raise ScoringError(
            f"the model returns its best {there} classes only, not {request.top_k}",
            hint=f"--top-k {there}, or convert it without --top-k",
        )


def best_classes(spec: TensorSpec, k: int, labels: Sequence[str] = (), *, softmax: bool = False) -> Encoder:
    """Rank the scores of all classes, `[rows, classes]` or `[rows]`, as the client does.

    The label of a class without a name is empty. Probabilities are computed in double precision.
    """
    dtype = _score_dtype(spec.dtype, softmax=softmax)

    def encode(outputs: Outputs, _: Sequence[Size]) -> list[pa.Array]:
        scores = _scores_of(outputs, spec.name)
        # Partitioning row by row takes a third of the time of sorting, for 1,000 classes.
        indices = np.stack([tasks.top_k(row, k)[0] for row in scores])
        best = tasks.softmax(scores) if softmax else scores
        return _class_columns(indices, np.take_along_axis(best, indices, axis=-1), labels, dtype)

    return Encoder(_class_schema(labels, dtype), (spec.name,), encode)


def graph_ranking(ranking: Ranking, dtype: DType, k: int) -> Encoder:
    """Write the first `k` classes of a graph that contains a top-k."""
    dtype = _score_dtype(dtype, softmax=False)

    def encode(outputs: Outputs, _: Sequence[Size]) -> list[pa.Array]:
        scores, indices = outputs[ranking.scores], outputs[ranking.indices]
        fits = indices.shape == scores.shape and indices.ndim == _RANK and indices.dtype.kind in "iu"
        if not fits or (indices.size and indices.min() < 0):
            raise ExecutionError(
                f"{indices.dtype}{list(indices.shape)} are not class indices of {list(scores.shape)} scores"
            )
        return _class_columns(indices[:, :k], scores[:, :k], ranking.labels, dtype)

    return Encoder(_class_schema(ranking.labels, dtype), (ranking.scores, ranking.indices), encode)


def _class_schema(labels: Sequence[str], dtype: DType) -> pa.Schema:
    fields = [pa.field("indices", pa.list_(pa.int32()))]
    fields += [pa.field("labels", pa.list_(pa.string()))] if labels else []
    return pa.schema([*fields, pa.field("scores", pa.list_(arrow_type(dtype)))])


def _class_columns(indices: AnyArray, scores: AnyArray, labels: Sequence[str], dtype: DType) -> list[pa.Array]:
    """Build the columns of `[rows, k]` indices, which are not negative, and scores."""
    columns = [lists(indices.astype(np.int32))]
    if labels:
        names = np.asarray([*labels, ""], dtype=object)
        columns.append(lists(names[np.minimum(indices.astype(np.int64), len(labels))]))
    return [*columns, lists(scores.astype(dtype.numpy, copy=False))]


def all_scores(spec: TensorSpec, *, softmax: bool = False) -> Encoder:
    """Write the scores of all classes in order.

    Raises:
        ScoringError: The number of classes is not fixed.
    """
    dtype = _score_dtype(spec.dtype, softmax=softmax)
    classes = spec.shape[1] if len(spec.shape) == _RANK else 1
    if not isinstance(classes, int):
        raise ScoringError(
            f"output '{spec.name}' has no fixed number of classes: {spec}",
            hint=f"--output {spec.name} writes it unchanged",
        )

    def encode(outputs: Outputs, _: Sequence[Size]) -> list[pa.Array]:
        scores = _scores_of(outputs, spec.name)
        if scores.shape[1] != classes:
            raise ExecutionError(f"output '{spec.name}' has {scores.shape[1]} scores, expected {classes}")
        return [lists(tasks.softmax(scores) if softmax else scores.astype(dtype.numpy, copy=False))]

    return Encoder(pa.schema([pa.field("scores", pa.list_(arrow_type(dtype)))]), (spec.name,), encode)


def _score_dtype(dtype: DType, *, softmax: bool) -> DType:
    """Return the dtype of written scores: fp64 for probabilities, fp32 for 16-bit floats, which some readers lack."""
    if softmax:
        return DType.FP64
    return DType.FP32 if dtype in (DType.FP16, DType.BF16) else dtype


def _scores_of(outputs: Outputs, name: str) -> AnyArray:
    """Return an output as `[rows, classes]`; a single score per row belongs to the only class."""
    scores = outputs[name]
    if scores.ndim == 1:
        return scores[:, None]
    if scores.ndim != _RANK:
        raise ExecutionError(
            f"output '{name}' has the shape {list(scores.shape)}, expected [rows, classes]",
            hint=f"--output {name} writes it unchanged",
        )
    return scores


def vectors(task: Embedding, spec: TensorSpec) -> Encoder:
    """Write the embedding of each image, normalized if the task says so."""
    features = spec.shape[-1] if spec.has_rank else None

    def encode(outputs: Outputs, _: Sequence[Size]) -> list[pa.Array]:
        found = np.stack(list(_read_rows(lambda sample: read_vector(task, sample), outputs)))
        if isinstance(features, int) and features and found.shape[1] != features:
            raise ExecutionError(f"a vector has {found.shape[1]} features, expected {features}")
        return [lists(found)]

    return Encoder(pa.schema([pa.field("vector", pa.list_(pa.float32()))]), (task.vectors,), encode)


def detections(task: Detection, labels: Sequence[str], preprocess: Preprocess) -> Encoder:
    """Write the detections in each image above the task's threshold, in pixels of the image."""
    given = {"labels": labels, "masks": task.masks, "keypoints": task.keypoints}
    schema = pa.schema(
        [pa.field(name, pa.list_(kind)) for name, (_, kind) in _DETECTION.items() if given.get(name, True)]
    )

    def read(sample: Sample, frame: Frame) -> dict[str, Any]:
        found = [each.to_dict() for each in read_detections(task, sample, frame, labels)]
        return {name: [each[_DETECTION[name][0]] for each in found] for name in schema.names}

    return _image_encoder(read, schema, tasks.output_names(task), preprocess)


def class_maps(task: Segmentation, labels: Sequence[str], preprocess: Preprocess) -> Encoder:
    """Write the class map of each image at its original size, as run lengths."""
    schema = pa.schema([("height", pa.int32()), ("width", pa.int32()), ("segments", pa.list_(_SEGMENT))])

    def read(sample: Sample, frame: Frame) -> dict[str, Any]:
        return read_segmentation(task, sample, frame, labels).to_dict()

    return _image_encoder(read, schema, tasks.output_names(task), preprocess)


def _image_encoder(
    read: Callable[[Sample, Frame], Mapping[str, Any]],
    schema: pa.Schema,
    names: Iterable[str],
    preprocess: Preprocess,
) -> Encoder:
    """Build an encoder from a function that reads the outputs of one row as plain data."""

    def encode(outputs: Outputs, sizes: Sequence[Size]) -> list[pa.Array]:
        frames = (frame_of(preprocess, size) for size in sizes)
        rows = _read_rows(lambda sample: read(sample, next(frames)), outputs)
        # Converting row by row to Arrow takes a tenth of the memory.
        kind = pa.struct(list(schema))
        columns: list[pa.Array] = pa.concat_arrays([pa.array([row], kind) for row in rows]).flatten()
        return columns

    return Encoder(schema, tuple(names), encode)


def _read_rows(read: Callable[[Sample], _T], outputs: Outputs) -> Iterator[_T]:
    """Read rows lazily: the class map of a large image takes as much memory as its pixels."""
    rows = len(next(iter(outputs.values())))
    try:
        yield from (read({name: values[row] for name, values in outputs.items()}) for row in range(rows))
    except ProtocolError as error:
        raise ExecutionError(str(error)) from error


def raw_outputs(specs: Sequence[TensorSpec], reserved: Sequence[str] = ()) -> Encoder:
    """Write outputs unchanged. The columns depend on the shape without the batch dimension.

    | shape of a row   | column                                                                     |
    |------------------|----------------------------------------------------------------------------|
    | scalar           | the element                                                                |
    | fixed            | a list of fixed length, in row-major order, and `shape` in the metadata    |
    | dynamic          | a list, in row-major order, and `NAME_shape` with the sizes                |

    Args:
        specs: The outputs, with the batch as first dimension.
        reserved: Names of other columns; an output of such a name is written to `output:NAME`.
    """
    shapes = {spec.name: _row_shape(spec) for spec in specs}
    fields: list[pa.Field] = []
    for spec in specs:
        name = f"output:{spec.name}" if spec.name in reserved else spec.name
        kind, shape = arrow_type(spec.dtype), shapes[spec.name]
        if shape is None:
            fields += [pa.field(name, pa.list_(kind)), pa.field(f"{name}_shape", pa.list_(pa.int32()))]
        elif shape:
            fields.append(pa.field(name, pa.list_(kind), metadata={SHAPE: json.dumps(shape)}))
        else:
            fields.append(pa.field(name, kind))

    def encode(outputs: Outputs, _: Sequence[Size]) -> list[pa.Array]:
        return [array for name, shape in shapes.items() for array in _rows_of(name, shape, outputs[name])]

    return Encoder(pa.schema(fields), tuple(shapes), encode)


def _row_shape(spec: TensorSpec) -> tuple[int, ...] | None:
    """Return the shape of a row, or None if it is dynamic."""
    row = spec.shape[1:]
    varies = spec.shape == (ANY_RANK,) or any(isinstance(size, str) for size in row)
    # The number of rows cannot be derived from lists of length 0.
    return None if varies or 0 in row else tuple(int(size) for size in row)


def _rows_of(output: str, shape: tuple[int, ...] | None, values: AnyArray) -> list[pa.Array]:
    if shape is None:
        return [lists(values), lists(np.tile(np.asarray(values.shape[1:], np.int32), (len(values), 1)))]
    if values.shape[1:] != shape:
        found = f"output '{output}' has the shape {list(values.shape)}"
        raise ExecutionError(f"{found}, expected {list(shape)} for each row")
    return [lists(values) if shape else elements(values)]


def arrow_type(dtype: DType) -> pa.DataType:
    """Return the Arrow type of a dtype."""
    return _TYPES[dtype]


def elements(values: AnyArray) -> pa.Array:
    """Convert an array to Arrow in row-major order, without a copy if the representation is the same.

    Raises:
        ExecutionError: A string is not UTF-8.
    """
    dtype = DType.from_numpy(values.dtype)
    flat = values.reshape(-1)
    if dtype is not DType.BYTES:
        return pa.array(flat.astype(np.float32) if dtype is DType.BF16 else np.ascontiguousarray(flat), _TYPES[dtype])
    try:
        return pa.array([one.decode() if isinstance(one, bytes) else str(one) for one in flat.tolist()], pa.string())
    except UnicodeError as error:
        raise ExecutionError(f"the model returned a string that is not UTF-8: {error}") from error


def lists(values: AnyArray) -> pa.ListArray:
    """Convert `[rows, ...]` to one list per row, in row-major order.

    The type is never a fixed-size list: Arrow can write those with nulls to Parquet, but cannot read them back.
    """
    rows, length = len(values), math.prod(values.shape[1:])
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * length), elements(values))
