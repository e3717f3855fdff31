"""The image tasks: which outputs of a model answer each of them, and how these are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

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
from graphkiln_client.published import ServedVersion
from graphkiln_client.results import Classification, Result, classifications

Detections = tuple[Detection, ...]
Vector = npt.NDArray[np.float32]

T = TypeVar("T")
_Task = TypeVar("_Task", graph_task.Detection, graph_task.Segmentation, graph_task.Embedding)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The response to a request of one or several images.

    Attributes:
        sources: Name of each image.
        sizes: Height and width of each upright image; empty where the task needs none.
        samples: The outputs of each image, by name.
        model: The model that ran.
        version: Its version.
        request_id: The id that the request carried.
        latency_ms: See `Result.latency_ms`.
    """

    sources: Sequence[str]
    sizes: Sequence[tuple[int, int]]
    samples: Sequence[Sample]
    model: str
    version: str
    request_id: str
    latency_ms: float


class ImageTask(ABC, Generic[T]):
    """A question about images.

    Attributes:
        in_pixels: True if answers are in pixels of the image, whose size is then needed.
    """

    in_pixels: ClassVar[bool] = False

    @abstractmethod
    def outputs(self, served: ServedVersion) -> tuple[str, ...]:
        """The outputs to request.

        Raises:
            InvalidInput: The version has another task, or lacks an output.
            ProtocolError: What it publishes is malformed.
        """

    def labelled_outputs(self, served: ServedVersion) -> tuple[str, ...]:
        """Outputs whose labels must be known before `read`."""
        del served
        return ()

    @abstractmethod
    def read(self, served: ServedVersion, reply: Reply) -> list[T]:
        """The answer about each image of a reply.

        Raises:
            ClientError: The outputs do not fit the task.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Classify(ImageTask[Result]):
    """Rank the classes of images by every output that is requested.

    Attributes:
        top_k: Most classes of an image, or of a position of an output.
        softmax: Turn scores into probabilities.
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
        # Corners of boxes and features are no scores of classes: they are ranked only where an output is named.
        task = served.task
        if not (self.ranked or task is None or is_classification(task)):
            raise InvalidInput(
                f"'{served.model}' cannot classify: its task is {task.kind}",
                hint=f"use {VERBS[task.kind]}; Python's classify(image, outputs=[NAME]) ranks an output all the same",
            )
        names = tuple(output["name"] for output in served.metadata["outputs"])
        if unknown := set(self.ranked) - set(names):
            raise InvalidInput(
                f"'{served.model}' has no output {', '.join(sorted(unknown))}", hint=f"it has {', '.join(names)}"
            )
        ranking = self._embedded(served)
        if ranking and self.softmax:
            raise InvalidInput(
                f"'{served.model}' returns its best classes only: there is no softmax over some of the scores",
                hint="convert the model with --softmax --top-k",
            )
        return (ranking.scores, ranking.indices) if ranking else self.ranked or names

    def labelled_outputs(self, served: ServedVersion) -> tuple[str, ...]:
        """See `ImageTask.labelled_outputs`."""
        return () if self._embedded(served) else self.outputs(served)

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
        if ranking := self._embedded(served):
            labels = ranking.labels if served.given_labels is None else served.given_labels
            scores, indices = sample[ranking.scores], sample[ranking.indices]
            return {ranking.scores: read_ranking(scores, indices, self.top_k, labels)}
        return {
            name: rank_scores(scores, self.top_k, served.known_labels(name) or (), softmax=self.softmax)
            for name, scores in sample.items()
        }

    def _embedded(self, served: ServedVersion) -> Ranking | None:
        return None if self.ranked else served.ranking


@dataclass(frozen=True, kw_only=True, slots=True)
class Detect(ImageTask[Detections]):
    """Find things in images.

    Attributes:
        score_threshold: The least score of a detection; None for the model's own.

    Raises:
        InvalidInput: The threshold is no score.
    """

    in_pixels: ClassVar[bool] = True
    score_threshold: float | None

    def __post_init__(self) -> None:
        if self.score_threshold is not None and not 0 <= self.score_threshold <= 1:
            raise InvalidInput(f"score_threshold must be from 0 to 1, got {self.score_threshold:g}")

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
    """Find the class of every pixel of images."""

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
    """Compute the vectors of images.

    Attributes:
        normalize: Divide vectors by their length, or do not; None for the model's own choice.
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
    """Read one sample's classes as its graph ranked them, no more than `k` of them.

    Args:
        scores: `[*positions, classes]`, best first.
        indices: Class indices of the same shape.
        k: How many classes.
        labels: By class index.

    Raises:
        ProtocolError: The indices are no class indices of these scores.
    """
    fits = indices.shape == scores.shape and indices.dtype.kind in "iu" and indices.ndim
    if not fits or (indices.size and indices.min() < 0):
        raise ProtocolError(f"{indices.dtype}{list(indices.shape)} are no class indices of {list(scores.shape)} scores")
    return classifications(indices[..., :k].astype(np.int64), scores[..., :k], labels)


def _task_of(served: ServedVersion, kind: type[_Task], verb: str) -> _Task:
    """The task of a version, which must be of a kind.

    Raises:
        InvalidInput: It is of another kind.
    """
    task: Task | None = served.task
    if isinstance(task, kind):
        return task
    if task is None or is_classification(task):
        reason, other = "its config.pbtxt names no such task", "classify"
    else:
        reason, other = f"its task is {task.kind}", VERBS[task.kind]
    raise InvalidInput(
        f"'{served.model}' cannot {verb}: {reason}",
        hint=f"use {other}, or convert the model with its task: graphkiln convert --task",
    )


def _frames(served: ServedVersion, reply: Reply) -> list[Frame]:
    return [frame_of(served.preprocess, size) for size in reply.sizes]
