"""Image tasks (classify, detect, segment, embed): the outputs that each requests, and the results read from them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph import task as graph_task
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_backend.graph.task import VERBS, Ranking, Task, is_classification, output_names
from graphkiln_backend.images.answers import (
    Detection,
    Sample,
    SegmentedImage,
    read_detections,
    read_segmentation,
    read_vector,
)
from graphkiln_backend.images.frame import Frame, frame_of
from graphkiln_client.published import Labels, ServedVersion

Detections = tuple[Detection, ...]
Vector = npt.NDArray[np.float32]

T = TypeVar("T")
_Task = TypeVar("_Task", graph_task.Detection, graph_task.Segmentation, graph_task.Embedding)

# Limits of the highest class index: some labels may be missing, but a corrupt index must not allocate gigabytes.
_MAX_MISSING_LABELS, _MAX_LABEL_SPARSITY = 1 << 16, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """One class of a ranking.

    Attributes:
        label: Class name; empty if the model has no labels.
        score: Score as returned by the model (logit or probability), or softmax probability.
        position: Position in a per-position output, for example `(y, x)`; empty for an output `[classes]`.
    """

    index: int
    label: str
    score: float
    position: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Classification:
        """Parse one element of a classification output, `score:index[:label]`.

        Source: Triton's classification extension.

        Raises:
            ProtocolError: The text is malformed.
        """
        score, _, rest = text.partition(":")
        index, _, label = rest.partition(":")
        try:
            # Labels files written on Windows have a byte order mark and carriage returns.
            plain_label = label.removesuffix("\r").removeprefix("\ufeff")
            return cls(index=int(index), label=plain_label, score=float(score))
        except ValueError:
            raise ProtocolError(f"expected a classification 'score:index[:label]', got {text[:80]!r}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The classification of one image.

    Attributes:
        source: Path or description of the image.
        latency_ms: Milliseconds from sending the request to receiving the response, including retries. All images of
            a request have the same. Includes preprocessing only for images that are sent encoded.
        outputs: Classes by output name, best first; grouped by position for per-position outputs.
    """

    source: str
    model: str
    version: str
    request_id: str
    latency_ms: float
    outputs: Mapping[str, tuple[Classification, ...]]

    @property
    def classifications(self) -> tuple[Classification, ...]:
        """Classes of the first output; most models have only one."""
        return next(iter(self.outputs.values()))

    @property
    def top(self) -> Classification:
        """Best class of the first output."""
        return self.classifications[0]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON-compatible data.

        All classes are in one list, `classifications`. Entries have an `output` key if the model has several outputs,
        and a `position` key if the output has positions. Scores that are not finite become None.
        """
        several = len(self.outputs) > 1
        rows = [
            {**({"output": name} if several else {}), **_to_dict(entry)}
            for name, entries in self.outputs.items()
            for entry in entries
        ]
        fields = {name: getattr(self, name) for name in ("source", "model", "version", "request_id", "latency_ms")}
        return {**fields, "classifications": rows}


def _to_dict(entry: Classification) -> dict[str, Any]:
    score = entry.score if math.isfinite(entry.score) else None
    row: dict[str, Any] = {"index": entry.index, "label": entry.label, "score": score}
    return {**row, "position": list(entry.position)} if entry.position else row


def classifications(
    indices: npt.NDArray[np.int64], scores: AnyArray, labels: Sequence[str]
) -> tuple[Classification, ...]:
    """Build the classifications of one sample.

    Args:
        indices: Class indices, best first, `[*positions, k]`.
        scores: Their scores, `[*positions, k]`.
        labels: Labels by class index; may be shorter than the number of classes.
    """
    entries = []
    for position in np.ndindex(indices.shape):
        index = int(indices[position])
        label = labels[index] if index < len(labels) else ""
        entries.append(Classification(index=index, label=label, score=float(scores[position]), position=position[:-1]))
    return tuple(entries)


def parse_labels(output: AnyArray) -> Labels:
    """Parse labels by class index from a classification output with all classes.

    Args:
        output: BYTES `[classes]`, or `[batch, classes]`, of which the first row is read.

    Raises:
        ProtocolError: The output is malformed.
    """
    elements = output[0].ravel() if output.ndim > 1 and len(output) else output.ravel()
    parsed = [Classification.parse(bytes(element).decode("utf-8", "replace")) for element in elements]
    labels = {entry.index: entry.label for entry in parsed}
    limit = max(_MAX_MISSING_LABELS, _MAX_LABEL_SPARSITY * len(elements))
    if labels and not 0 <= min(labels) <= max(labels) < limit:
        invalid = min(labels) if min(labels) < 0 else max(labels)
        raise ProtocolError(f"the server returned class index {invalid}, expected 0 to {limit - 1}")
    return tuple(labels.get(index, "") for index in range(max(labels, default=-1) + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Response to a request with one or several images.

    Attributes:
        sources: Path or description of each image.
        sizes: Height and width of each upright image; empty if the task does not need them.
        samples: Outputs of each image by name.
    """

    sources: Sequence[str]
    sizes: Sequence[tuple[int, int]]
    samples: Sequence[Sample]
    model: str
    version: str
    request_id: str
    latency_ms: float


class ImageTask(ABC, Generic[T]):
    """A task that is requested for images.

    Attributes:
        in_pixels: True if answers are in pixels of the image, so that its size is needed.
    """

    in_pixels: ClassVar[bool] = False

    @abstractmethod
    def outputs(self, served: ServedVersion) -> tuple[str, ...]:
        """Return the names of the outputs to request.

        Raises:
            InvalidInput: The version has another task, or lacks an output.
            ProtocolError: The published metadata is malformed.
        """

    def labelled_outputs(self, served: ServedVersion) -> tuple[str, ...]:
        """Return the outputs whose labels `read` needs."""
        del served
        return ()

    @abstractmethod
    def read(self, served: ServedVersion, reply: Reply) -> list[T]:
        """Read the result for each image of a reply.

        Raises:
            ClientError: The outputs do not fit the task.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Classify(ImageTask[Result]):
    """Rank the classes of each image.

    Attributes:
        top_k: Maximum number of classes per image and position.
        ranked: Names of the outputs to rank; empty for all.

    Raises:
        InvalidInput: `top_k` is less than 1.
    """

    top_k: int
    softmax: bool
    ranked: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise InvalidInput(f"top_k must be at least 1, got {self.top_k}")

    def outputs(self, served: ServedVersion) -> tuple[str, ...]:
        """See `ImageTask.outputs`."""
        # Boxes and embeddings are not class scores: rank them only if the caller names the output.
        task = served.task
        if not (self.ranked or task is None or is_classification(task)):
            raise InvalidInput(
                f"'{served.model}' cannot classify: its task is {task.kind}",
                hint=f"use {VERBS[task.kind]}, or rank an output anyway with classify(image, outputs=[NAME]) in Python",
            )
        names = tuple(output["name"] for output in served.metadata["outputs"])
        if unknown := set(self.ranked) - set(names):
            raise InvalidInput(
                f"'{served.model}' has no output {', '.join(sorted(unknown))}", hint=f"outputs: {', '.join(names)}"
            )
        ranking = self._graph_ranking(served)
        if ranking and self.softmax:
            raise InvalidInput(
                f"'{served.model}' returns only its best classes, and a softmax needs all scores",
                hint="convert the model with --softmax --top-k",
            )
        return (ranking.scores, ranking.indices) if ranking else self.ranked or names

    def labelled_outputs(self, served: ServedVersion) -> tuple[str, ...]:
        """See `ImageTask.labelled_outputs`."""
        return () if self._graph_ranking(served) else self.outputs(served)

    def read(self, served: ServedVersion, reply: Reply) -> list[Result]:
        """See `ImageTask.read`."""
        return [
            Result(
                source=source,
                model=reply.model,
                version=reply.version,
                request_id=reply.request_id,
                latency_ms=reply.latency_ms,
                outputs=self._rank(served, sample),
            )
            for source, sample in zip(reply.sources, reply.samples, strict=True)
        ]

    def _rank(self, served: ServedVersion, sample: Sample) -> dict[str, tuple[Classification, ...]]:
        if ranking := self._graph_ranking(served):
            labels = ranking.labels if served.given_labels is None else served.given_labels
            scores, indices = sample[ranking.scores], sample[ranking.indices]
            return {ranking.scores: read_ranking(scores, indices, self.top_k, labels)}
        return {
            name: rank_scores(scores, self.top_k, served.known_labels(name) or (), softmax=self.softmax)
            for name, scores in sample.items()
        }

    def _graph_ranking(self, served: ServedVersion) -> Ranking | None:
        return None if self.ranked else served.ranking


@dataclass(frozen=True, kw_only=True, slots=True)
class Detect(ImageTask[Detections]):
    """Detect objects in images.

    Attributes:
        score_threshold: Minimum score of a detection; None for the model's default.

    Raises:
        InvalidInput: The threshold is not between 0 and 1.
    """

    in_pixels: ClassVar[bool] = True
    score_threshold: float | None

    def __post_init__(self) -> None:
        if self.score_threshold is not None and not 0 <= self.score_threshold <= 1:
            raise InvalidInput(f"score_threshold must be between 0 and 1, got {self.score_threshold:g}")

    def outputs(self, served: ServedVersion) -> tuple[str, ...]:
        """See `ImageTask.outputs`."""
        return output_names(_task_of(served, graph_task.Detection, "detect"))

    def read(self, served: ServedVersion, reply: Reply) -> list[Detections]:
        """See `ImageTask.read`."""
        task, labels = _task_of(served, graph_task.Detection, "detect"), served.class_labels
        samples = zip(reply.samples, _frames(served, reply), strict=True)
        return [read_detections(task, sample, frame, labels, self.score_threshold) for sample, frame in samples]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment(ImageTask[SegmentedImage]):
    """Classify every pixel of images."""

    in_pixels: ClassVar[bool] = True

    def outputs(self, served: ServedVersion) -> tuple[str, ...]:
        """See `ImageTask.outputs`."""
        return output_names(_task_of(served, graph_task.Segmentation, "segment"))

    def read(self, served: ServedVersion, reply: Reply) -> list[SegmentedImage]:
        """See `ImageTask.read`."""
        task, labels = _task_of(served, graph_task.Segmentation, "segment"), served.class_labels
        samples = zip(reply.samples, _frames(served, reply), strict=True)
        return [read_segmentation(task, sample, frame, labels) for sample, frame in samples]


@dataclass(frozen=True, kw_only=True, slots=True)
class Embed(ImageTask[Vector]):
    """Compute embeddings of images.

    Attributes:
        normalize: Scale vectors to unit length; None for the model's default.
    """

    normalize: bool | None

    def outputs(self, served: ServedVersion) -> tuple[str, ...]:
        """See `ImageTask.outputs`."""
        return output_names(_task_of(served, graph_task.Embedding, "embed"))

    def read(self, served: ServedVersion, reply: Reply) -> list[Vector]:
        """See `ImageTask.read`."""
        task = _task_of(served, graph_task.Embedding, "embed")
        return [read_vector(task, sample, self.normalize) for sample in reply.samples]


def rank_scores(scores: AnyArray, k: int, labels: Sequence[str], *, softmax: bool) -> tuple[Classification, ...]:
    """Rank the scores of one sample, `[classes]` or `[*positions, classes]`.

    Raises:
        InvalidInput: The output cannot be ranked.
    """
    indices, best = graph_task.top_k(np.atleast_1d(scores), k)
    if softmax:
        best = np.take_along_axis(graph_task.softmax(np.atleast_1d(scores)), indices, axis=-1)
    return classifications(indices, best, labels)


def read_ranking(scores: AnyArray, indices: AnyArray, k: int, labels: Sequence[str]) -> tuple[Classification, ...]:
    """Read the best `k` classes of one sample from a graph with an embedded top-k.

    Args:
        scores: Scores, best first, `[*positions, classes]`.
        indices: Class indices, `[*positions, classes]`.
        k: Maximum number of classes.
        labels: Labels by class index.

    Raises:
        ProtocolError: The indices are not class indices of these scores.
    """
    fits = indices.shape == scores.shape and indices.dtype.kind in "iu" and indices.ndim
    if not fits or (indices.size and indices.min() < 0):
        raise ProtocolError(
            f"expected non-negative class indices of shape {list(scores.shape)}, got "
            f"{indices.dtype}{list(indices.shape)}"
        )
    return classifications(indices[..., :k].astype(np.int64), scores[..., :k], labels)


def _task_of(served: ServedVersion, kind: type[_Task], verb: str) -> _Task:
    """Return the task of a version; raise `InvalidInput` if it has another kind."""
    task: Task | None = served.task
    if isinstance(task, kind):
        return task
    if task is None or is_classification(task):
        reason, other = "its config.pbtxt declares no such task", "classify"
    else:
        reason, other = f"its task is {task.kind}", VERBS[task.kind]
    raise InvalidInput(
        f"'{served.model}' cannot {verb}: {reason}",
        hint=f"use {other}, or declare the task with graphkiln convert --task",
    )


def _frames(served: ServedVersion, reply: Reply) -> list[Frame]:
    return [frame_of(served.preprocess, size) for size in reply.sizes]
