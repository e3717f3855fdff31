"""Tasks of image models and their outputs: labels, top-k ranking, detection, segmentation, embedding.

The manifest holds the task, the server publishes it, and client, scoring and proof use it to read outputs. Outputs are
padded so that requests of several clients can share a batch: a graph returns the same number of rows for every image,
and the number of valid rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from graphkiln_backend.graph.decoding import decode_json, decode_value, encode_json, parse_json
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ManifestError
from graphkiln_backend.graph.files import TEXT_LIMIT, read_bytes
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.graph.signature import Signature, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = LazyModule("numpy")

# Keys of config.pbtxt's `parameters` under which task and ranking are published, as JSON.
TASK = "task"
RANKING = "ranking"

# Display names of tasks in clients and on the command line.
VERBS = {"classification": "classify", "detection": "detect", "segmentation": "segment", "embedding": "embed"}

_FLOATS = (DType.FP32, DType.FP16, DType.BF16)
_INTEGERS = (DType.INT64, DType.INT32)
_CLASS_MAPS = (*_INTEGERS, DType.UINT8)

_T = TypeVar("_T", bound="Classification | Detection | Segmentation | Embedding")


def _tensor(types: tuple[DType, ...], rank: int, **sizes: int) -> dict[str, Any]:
    """Metadata of a field that names an output: element types, number of dimensions, fixed sizes.

    Args:
        types: Allowed element types.
        rank: Number of dimensions, with the batch.
        sizes: `last`: the size of the last dimension.
    """
    return {"types": types, "rank": rank, **sizes}


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """A score for each class; the default for versions without a task."""

    kind: Literal["classification"] = "classification"


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """Boxes around objects, best first. Fields name outputs of the graph.

    Attributes:
        kind: Discriminator of the tasks in a manifest.
        boxes: FP32 `[batch, detections, 4]`: x1, y1, x2, y2 in pixels of the model's input, by falling score.
        scores: FP32 `[batch, detections]`.
        classes: INT64 `[batch, detections]`: lines of the labels file, the first is 0.
        counts: INT32 `[batch]`: number of valid detections; the rest is padded with zeros.
        masks: FP32 `[batch, detections, height, width]`: probabilities; or None.
        mask_frame: Area of a mask: its `box`, as in torchvision, or the `image`, the whole input.
        keypoints: FP32 `[batch, detections, keypoints, 3]`: x, y in pixels of the input, score; or None.
        score_threshold: Default threshold; detections with lower scores are left out.
    """

    boxes: str = field(metadata=_tensor(_FLOATS, 3, last=4))
    scores: str = field(metadata=_tensor(_FLOATS, 2))
    classes: str = field(metadata=_tensor(_INTEGERS, 2))
    counts: str = field(metadata=_tensor(_INTEGERS, 1))
    masks: str | None = field(default=None, metadata=_tensor(_FLOATS, 4))
    mask_frame: Literal["box", "image"] = "box"
    keypoints: str | None = field(default=None, metadata=_tensor(_FLOATS, 4, last=3))
    score_threshold: float = 0.5
    kind: Literal["detection"] = "detection"

    def __post_init__(self) -> None:
        if not 0 <= self.score_threshold <= 1:
            raise ManifestError(f"task.score_threshold must be from 0 to 1, got {self.score_threshold}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Segmentation:
    """A class for each pixel. Exactly one of `scores` and `classes` is set.

    Attributes:
        kind: Discriminator of the tasks in a manifest.
        scores: FP32 `[batch, classes, height, width]`, over the model's input at any stride.
        classes: INT64, INT32 or UINT8 `[batch, height, width]`, likewise: lines of the labels file, the first is 0.
    """

    scores: str | None = field(default=None, metadata=_tensor(_FLOATS, 4))
    classes: str | None = field(default=None, metadata=_tensor(_CLASS_MAPS, 3))
    kind: Literal["segmentation"] = "segmentation"

    def __post_init__(self) -> None:
        if (self.scores is None) == (self.classes is None):
            raise ManifestError("task: a segmentation names either its scores or its classes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """A vector for each image.

    Attributes:
        kind: Discriminator of the tasks in a manifest.
        vectors: FP32 `[batch, features]`.
        normalize: Whether clients divide vectors by their length.
    """

    vectors: str = field(metadata=_tensor(_FLOATS, 2))
    normalize: bool = False
    kind: Literal["embedding"] = "embedding"


# Ranking: outputs of a top-k embedded in the graph, and names of the classes.
#
# Triton attaches labels to scores by their position in the output; in a top-k output the position is the rank.


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Outputs of an embedded top-k.

    Attributes:
        scores: Name of the output of scores, `[batch, k]`, best first.
        indices: Name of the output of class indices, integers of the same shape.
        labels: Class names by index; empty for none.
    """

    scores: str
    indices: str
    labels: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> Ranking:
        """Parse a published ranking.

        Raises:
            ManifestError: Not JSON, or not a ranking; the message names the bad key.
        """
        return decode_json(cls, text, what="the ranking", path=RANKING)

    def to_json(self) -> str:
        """Serialize the ranking as one line of JSON."""
        return encode_json(self)


# Discriminated by `kind`.
Task = Classification | Detection | Segmentation | Embedding

# How outputs are read: the ranking of a graph with an embedded top-k, or a task.
Reading = Ranking | Task


def is_classification(task: Task | None) -> bool:
    """Return true for classification, the default task."""
    return task is None or isinstance(task, Classification)


def read_task(text: str) -> Task:
    """Parse a published task.

    Raises:
        ManifestError: Not JSON, or no task; the message names the bad key.
    """
    task: Task = decode_value(Task, parse_json(text, what="the task"), path=TASK)
    return task


def output_names(task: Task) -> tuple[str, ...]:
    """Names of the outputs of a task, in the order of its fields."""
    return tuple(name for _, name, _ in _outputs(task))


def rename_outputs(task: _T, names: Mapping[str, str]) -> _T:
    """Rename the outputs of a task.

    Args:
        task: Task with the old names.
        names: Old name -> new name; other names are kept.
    """
    changed: dict[str, Any] = {key: names.get(name, name) for key, name, _ in _outputs(task)}
    return replace(task, **changed)


def check_task(task: Task | None, labels: Sequence[str], signature: Signature, origin: object) -> None:
    """Check that a graph has the outputs that its task needs, and that there is a label per class.

    Args:
        task: The task, or None.
        labels: Labels by class index; empty for none.
        signature: Of the graph.
        origin: Source of the labels, for the error message.

    Raises:
        ManifestError: An output is missing or has the wrong type or shape, or the number of labels is wrong.
    """
    if task is None or isinstance(task, Classification):
        check_count(labels, signature, origin)
        return
    specs = {spec.name: spec for spec in signature.outputs}
    for key, name, wanted in _outputs(task):
        if name not in specs:
            raise ManifestError(
                f"'{TASK}.{key}' names the output '{name}', which the graph does not have",
                hint=f"it has {', '.join(map(str, signature.outputs))}",
            )
        _check_output(specs[name], wanted, key)
    if isinstance(task, Segmentation) and task.scores:
        scores = specs[task.scores]
        if scores.has_rank and isinstance(classes := scores.shape[1], int):
            _check_number(labels, classes, scores.name, origin)


def _outputs(task: Task) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Field, name and metadata of each output of a task."""
    for each in fields(task):
        name = getattr(task, each.name)
        if "types" in each.metadata and name is not None:
            yield each.name, name, each.metadata


def _check_output(spec: TensorSpec, wanted: Mapping[str, Any], key: str) -> None:
    last = wanted.get("last")
    fits = (
        spec.dtype in wanted["types"]
        and (not spec.has_rank or len(spec.shape) == wanted["rank"])
        and (last is None or not isinstance(spec.shape[-1], int) or spec.shape[-1] == last)
    )
    if not fits:
        types = " or ".join(map(str, wanted["types"]))
        size = f", {last} in the last" if last else ""
        raise ManifestError(f"'{TASK}.{key}' must name {types} of {wanted['rank']} dimensions{size}, got {spec}")


# Labels files have one class name per line, as in Triton.

_SAVE_AS = "save the file as UTF-8, one label per line"
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def read_labels(path: Path) -> tuple[str, ...]:
    """Read the labels of a file, without a byte order mark and carriage returns of Windows.

    Only a line feed ends a line, as in Triton, which also ends a label at a null character.

    Raises:
        ManifestError: The file cannot be read, is not UTF-8, or holds null characters or other carriage returns.
    """
    try:
        text = read_bytes(path, TEXT_LIMIT).decode("utf-8-sig")
    except OSError as error:
        raise ManifestError(f"cannot read labels from {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"cannot read labels from {path}: they are not UTF-8: {error}", hint=_SAVE_AS) from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    for number, line in enumerate(lines, 1):
        if "\0" in line or "\r" in line:
            raise ManifestError(f"cannot read labels from {path}: line {number} is {line[:40]!r}", hint=_SAVE_AS)
    return tuple(lines if lines[-1] else lines[:-1])


def labels_text(labels: Sequence[str]) -> str:
    """Make the content of a labels file.

    Raises:
        ManifestError: A label contains a line feed or is otherwise not one line.
    """
    for index, label in enumerate(labels):
        if _CONTROL.search(label):
            raise ManifestError(
                f"the label of class {index} holds a control character: {label[:80]!r}", hint="a label is one line"
            )
    return "".join(f"{label}\n" for label in labels)


def class_output(signature: Signature) -> int:
    """Position of the output with a score for each class, which labels name.

    It is the first output, unless that is one class of each row, as scikit-learn's classifiers answer: then the scores
    follow.
    """
    if signature.outputs and not signature.outputs[0].dtype.is_float:
        for position, spec in enumerate(signature.outputs):
            if spec.dtype.is_float and len(spec.shape) == 2 and isinstance(spec.shape[-1], int):
                return position
    return 0


def count_classes(signature: Signature) -> int | None:
    """Number of classes if the output of classes is `[batch, classes]`, else None."""
    shape = signature.outputs[class_output(signature)].shape if signature.outputs else ()
    last = shape[-1] if len(shape) == 2 else None
    return last if isinstance(last, int) else None


def check_count(labels: Sequence[str], signature: Signature, origin: object) -> None:
    """Check that there is one label per class.

    Raises:
        ManifestError: The numbers differ.
    """
    if (classes := count_classes(signature)) is not None:
        _check_number(labels, classes, signature.outputs[class_output(signature)].name, origin)


def _check_number(labels: Sequence[str], classes: int, output: str, origin: object) -> None:
    if labels and len(labels) != classes:
        raise ManifestError(
            f"{origin} has {len(labels)} labels, but output '{output}' has {classes} classes",
            hint="one line for each class, in the order of the output",
        )


# The best classes of a score tensor, with a defined order for ties, NaN and infinities.


def top_k(scores: AnyArray, k: int) -> tuple[npt.NDArray[np.int64], AnyArray]:
    """Find the `k` best classes along the last axis, best first.

    Order: higher scores first, then the lower index; NaN comes after everything, `-inf` included.

    Args:
        scores: `[..., classes]`, floats, integers or booleans.
        k: Number of classes to return, limited to all classes.

    Returns:
        Indices and scores, both `[..., min(k, classes)]`; scores in the dtype of the input.

    Raises:
        InvalidInput: The tensor holds strings, has no axis, or `k` is less than 1.
    """
    if k < 1:
        raise InvalidInput(f"top_k must be at least 1, got {k}")
    if scores.ndim < 1 or scores.dtype.kind in "OSU":
        raise InvalidInput(f"{scores.dtype}{list(scores.shape)} cannot be ranked", hint="read the output with infer()")
    keys = _sort_keys(scores)
    order = _best_first(keys, min(k, scores.shape[-1]))
    return order, np.take_along_axis(scores, order, axis=-1)


def softmax(scores: AnyArray) -> npt.NDArray[np.float64]:
    """Probabilities along the last axis.

    `-inf` becomes 0; where a score is NaN, or all are `-inf`, or one is `+inf`, there is no distribution: NaN.

    Args:
        scores: `[..., classes]`, numbers.
    """
    wide = scores.astype(np.float64)
    with np.errstate(invalid="ignore"):
        powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    result: npt.NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return result


def _sort_keys(scores: AnyArray) -> AnyArray:
    """Make sort keys in ascending order, best first. Negation would overflow for the smallest integer."""
    if scores.dtype.kind in "iub":
        return np.invert(scores)  # ~x = -x - 1, and reverses unsigned numbers and booleans, too
    wide = scores if scores.dtype.itemsize >= np.dtype(np.float32).itemsize else scores.astype(np.float32)
    return np.negative(wide)  # numpy sorts NaN last


def _best_first(keys: AnyArray, k: int) -> npt.NDArray[np.int64]:
    """Indices of the `k` least keys, stable.

    A partition finds the k-th key, then only candidates up to it are sorted: 21,000 classes cost 0.1 ms instead of 1.
    """
    classes = keys.shape[-1]
    if k >= classes or keys.size != classes:
        return np.argsort(keys, axis=-1, kind="stable")[..., :k]
    flat = keys.reshape(-1)
    worst = np.partition(flat, k - 1)[k - 1]
    candidates = np.flatnonzero(flat <= worst) if worst == worst else np.arange(classes)  # noqa: PLR0124 - NaN
    best: npt.NDArray[np.int64] = candidates[np.argsort(flat[candidates], kind="stable")[:k]]
    return best.reshape(*keys.shape[:-1], k)
