"""Detection, segmentation and embedding of images by one model, as its task says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.graph.preprocess import INPUT
from graphkiln_backend.graph.task import VERBS, Task, is_classification, output_names
from graphkiln_backend.graph.task import Detection as DetectionTask
from graphkiln_backend.graph.task import Embedding as EmbeddingTask
from graphkiln_backend.graph.task import Segmentation as SegmentationTask
from graphkiln_backend.images.answers import (
    Detection,
    Sample,
    SegmentedImage,
    read_detections,
    read_segmentation,
    read_vector,
)
from graphkiln_backend.images.decoding import ImageLike, Prepared
from graphkiln_backend.images.frame import Frame, frame_of
from graphkiln_client.classification import split_samples
from graphkiln_client.classifier import image_input, is_batching, max_batch_size, takes_several
from graphkiln_client.encoded_images import to_tensor
from graphkiln_client.image_requests import ImageRequests, batch_of
from graphkiln_client.inference import new_request_id
from graphkiln_client.served_version import ServedVersion
from graphkiln_client.transports.base import PLAIN

Detections = tuple[Detection, ...]
Vector = npt.NDArray[np.float32]

_T = TypeVar("_T")
_Task = TypeVar("_Task", DetectionTask, SegmentationTask, EmbeddingTask)
_VERBS = {DetectionTask: "detect", SegmentationTask: "segment", EmbeddingTask: "embed"}


class ImageTasks:
    """Answers about images, in pixels of the images. Task-safe.

    Args:
        requests: What is sent of images, and the versions that answer.
        labels: In place of the labels that the version has; by class index.
    """

    def __init__(self, requests: ImageRequests, *, labels: Sequence[str] | None) -> None:
        self._requests = requests
        self._given_labels = None if labels is None else tuple(labels)

    async def max_batch_size(self) -> int:
        """Most images in one request.

        Raises:
            InvalidInput: The model takes no images.
        """
        await self._requests.preprocess()
        served = await self._requests.served_version()
        return max_batch_size(image_input(served, "a task")["shape"], served.config)

    async def detect(
        self, images: Sequence[ImageLike], score_threshold: float | None
    ) -> list[Detections | ClientError]:
        """The detections of each image; an image that fails has its error there.

        Raises:
            InvalidInput: The model is no detector, or the threshold is no score.
        """
        if score_threshold is not None and not 0 <= score_threshold <= 1:
            raise InvalidInput(f"score_threshold must be from 0 to 1, got {score_threshold:g}")

        def read(task: DetectionTask, sample: Sample, frame: Frame, labels: Sequence[str]) -> Detections:
            return read_detections(task, sample, frame, labels, score_threshold)

        return await self._answer(images, DetectionTask, read)

    async def segment(self, images: Sequence[ImageLike]) -> list[SegmentedImage | ClientError]:
        """The class map of each image; an image that fails has its error there.

        Raises:
            InvalidInput: The model is no segmenter.
        """
        return await self._answer(images, SegmentationTask, read_segmentation)

    async def embed(self, images: Sequence[ImageLike], normalize: bool | None) -> list[Vector | ClientError]:
        """The vector of each image; an image that fails has its error there.

        Raises:
            InvalidInput: The model gives no vectors.
        """

        def read(task: EmbeddingTask, sample: Sample, frame: Frame, labels: Sequence[str]) -> Vector:
            del frame, labels
            return read_vector(task, sample, normalize)

        return await self._answer(images, EmbeddingTask, read)

    async def _answer(
        self,
        images: Sequence[ImageLike],
        kind: type[_Task],
        read: Callable[[_Task, Sample, Frame, Sequence[str]], _T],
    ) -> list[_T | ClientError]:
        async def ask(served: ServedVersion) -> list[_T | ClientError]:
            task = check_kind(served, kind)
            question = _Question(self._requests, served, task, partial(read, task), self._given_labels)
            return await self._requests.answer_as_asked(images, served, question.ask_encoded, question.ask)

        return await self._requests.follow(ask)


class _Question(Generic[_T]):
    """What is asked of one version about images.

    Args:
        requests: Sends what is asked.
        served: The version.
        task: Its task.
        read: Reads the answer about one image.
        labels: In place of the labels that the version has; None for those.
    """

    def __init__(
        self,
        requests: ImageRequests,
        served: ServedVersion,
        task: Task,
        read: Callable[[Sample, Frame, Sequence[str]], _T],
        labels: Sequence[str] | None,
    ) -> None:
        self._requests, self._served, self._task, self._read = requests, served, task, read
        self._labels = _labels_of(served) if labels is None else labels

    async def ask(self, sources: Sequence[str], prepared: Sequence[Prepared]) -> list[_T]:
        """Asks about samples of one shape in one request."""
        del sources
        row = image_input(self._served, VERBS[self._task.kind])
        samples = [each.sample for each in prepared]
        batched = len(row["shape"]) == samples[0].ndim + 1
        tensor = batch_of(samples) if batched else samples[0]
        sizes = [(each.height, each.width) for each in prepared]
        return await self._infer({row["name"]: tensor}, sizes, batched=batched, encoded=False)

    async def ask_encoded(self, sources: Sequence[str], encoded: Sequence[bytes]) -> list[_T]:
        """Asks about images as they are in one request; what is no image is not sent."""
        del sources
        sizes = await self._requests.upright_sizes(encoded)
        tensor = to_tensor(encoded, batched=is_batching(self._served))
        batched = takes_several(image_input(self._served, VERBS[self._task.kind])["shape"])
        return await self._infer({INPUT: tensor}, sizes, batched=batched, encoded=True)

    async def _infer(
        self, inputs: Mapping[str, AnyArray], sizes: Sequence[tuple[int, int]], *, batched: bool, encoded: bool
    ) -> list[_T]:
        """Asks about images of the given heights and widths."""
        names = output_names(self._task)
        requested = dict.fromkeys(names, PLAIN)
        response = await self._requests.infer(self._served, inputs, requested, new_request_id(), encoded=encoded)
        columns = {name: split_samples(response, name, len(sizes), batched=batched) for name in names}
        spec = self._requests.spec_of(self._served)
        samples = [{name: columns[name][index] for name in names} for index in range(len(sizes))]
        return [
            self._read(sample, frame_of(spec, size), self._labels) for sample, size in zip(samples, sizes, strict=True)
        ]


def check_kind(served: ServedVersion, kind: type[_Task]) -> _Task:
    """The task of a version, which must be of a kind.

    Raises:
        InvalidInput: It is of another.
    """
    task = served.task
    if isinstance(task, kind):
        return task
    if task is None or is_classification(task):
        said, other = "does not say that it does", "classify"
    else:
        said, other = f"answers otherwise: its task is {task.kind}", VERBS[task.kind]
    raise InvalidInput(
        f"'{served.model}' cannot {_VERBS[kind]}: it {said}",
        hint=f"use {other}, or convert the model with its task: graphkiln convert --task",
    )


def _labels_of(served: ServedVersion) -> tuple[str, ...]:
    return served.contract.labels if served.contract else ()
