"""`AsyncModel`: a model on a server, as event loops use it.

What lies between an image and its answer is in `image_requests`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.answers import SegmentedImage
from graphkiln_backend.images.decoding import ImageLike
from graphkiln_client.connection import Connection
from graphkiln_client.image_requests import ImageRequests
from graphkiln_client.many import Many, ManyOptions, OnError, Progress, map_in_tasks
from graphkiln_client.preparing import Form
from graphkiln_client.remote_model import RemoteModel, new_request_id
from graphkiln_client.results import Result
from graphkiln_client.shared_memory import RegionPool
from graphkiln_client.tasks import Classify, Detect, Detections, Embed, ImageTask, Segment, Vector
from graphkiln_client.transports.base import PLAIN, InferResponse

T = TypeVar("T")


class ModelOptions(TypedDict, total=False):
    """Options of a client for one model.

    Attributes:
        preprocess: In place of the spec that the server publishes.
        labels: In place of the labels that the server knows; by class index.
        images: `"encoded"` sends images encoded, `"tensor"` decodes them here; `"auto"` (default) sends them encoded
            where that is smaller and the server takes them.
    """

    preprocess: Preprocess | None
    labels: Sequence[str] | None
    images: Form


class AsyncModel:
    """A model on a server. Task-safe; its metadata, labels and preprocess spec are kept while one version answers."""

    def __init__(
        self,
        connection: Connection,
        name: str,
        version: str,
        *,
        fetch_urls: bool = False,
        regions: RegionPool | None = None,
        preprocess: Preprocess | None = None,
        labels: Sequence[str] | None = None,
        images: Form = "auto",
    ) -> None:
        self.name = name
        self.version = version
        self._remote = RemoteModel(connection, name, version, regions)
        self._requests = ImageRequests(
            self._remote, preprocess=preprocess, labels=labels, fetch_urls=fetch_urls, form=images
        )

    async def metadata(self) -> dict[str, Any]:
        """See `Model.metadata`."""
        return await self._remote.metadata()

    async def config(self) -> dict[str, Any]:
        """See `Model.config`."""
        return await self._remote.config()

    async def preprocess(self) -> Preprocess:
        """See `Model.preprocess`."""
        return await self._requests.preprocess()

    async def statistics(self) -> dict[str, Any]:
        """See `Model.statistics`."""
        return await self._remote.statistics()

    async def infer(self, inputs: Mapping[str, AnyArray], outputs: Iterable[str] = ()) -> dict[str, AnyArray]:
        """See `Model.infer`."""
        return dict((await self._remote.infer(inputs, dict.fromkeys(outputs, PLAIN), new_request_id())).outputs)

    async def repeatable(self, inputs: Mapping[str, AnyArray]) -> Callable[[], Coroutine[Any, Any, InferResponse]]:
        """See `Model.repeatable`."""
        return await self._remote.encode_once(inputs)

    async def classify(
        self, image: ImageLike, *, top_k: int = 5, softmax: bool = False, outputs: Sequence[str] = ()
    ) -> Result:
        """See `Model.classify`."""
        return await self._one(image, Classify(top_k=top_k, softmax=softmax, ranked=tuple(outputs)))

    async def detect(self, image: ImageLike, *, score_threshold: float | None = None) -> Detections:
        """See `Model.detect`."""
        return await self._one(image, Detect(score_threshold=score_threshold))

    async def segment(self, image: ImageLike) -> SegmentedImage:
        """See `Model.segment`."""
        return await self._one(image, Segment())

    async def embed(self, image: ImageLike, *, normalize: bool | None = None) -> Vector:
        """See `Model.embed`."""
        return await self._one(image, Embed(normalize=normalize))

    def classify_many(
        self,
        images: Iterable[ImageLike],
        *,
        top_k: int = 5,
        softmax: bool = False,
        outputs: Sequence[str] = (),
        batch_size: int = 16,
        concurrency: int = 8,
        on_error: OnError = "raise",
        progress: Progress | None = None,
    ) -> AsyncIterator[Result | ClientError]:
        """See `Model.classify_many`; `progress` is called in the consumer's task."""
        many = Many(batch_size=batch_size, concurrency=concurrency, on_error=on_error, progress=progress)
        return self._many(images, Classify(top_k=top_k, softmax=softmax, ranked=tuple(outputs)), many)

    def detect_many(
        self, images: Iterable[ImageLike], *, score_threshold: float | None = None, **options: Unpack[ManyOptions]
    ) -> AsyncIterator[Detections | ClientError]:
        """As `detect`, several batches at a time; options and order as for `classify_many`."""
        return self._many(images, Detect(score_threshold=score_threshold), Many(**options))

    def segment_many(
        self, images: Iterable[ImageLike], **options: Unpack[ManyOptions]
    ) -> AsyncIterator[SegmentedImage | ClientError]:
        """As `segment`, likewise."""
        return self._many(images, Segment(), Many(**options))

    def embed_many(
        self, images: Iterable[ImageLike], *, normalize: bool | None = None, **options: Unpack[ManyOptions]
    ) -> AsyncIterator[Vector | ClientError]:
        """As `embed`, likewise."""
        return self._many(images, Embed(normalize=normalize), Many(**options))

    async def _one(self, image: ImageLike, task: ImageTask[T]) -> T:
        (answer,) = await self.answer([image], task)
        if isinstance(answer, ClientError):
            raise answer
        return answer

    async def _many(
        self, images: Iterable[ImageLike], task: ImageTask[T], many: Many
    ) -> AsyncIterator[T | ClientError]:
        batches = await self.batches(images, task, many)
        work = partial(self.answer, task=task)
        async with aclosing(map_in_tasks(work, batches, many.concurrency)) as answers_by_batch:
            async for answers in answers_by_batch:
                for answer in answers:
                    yield many.report(answer)

    async def answer(self, images: Sequence[ImageLike], task: ImageTask[T]) -> list[T | ClientError]:
        """See `ImageRequests.answer`."""
        return await self._requests.answer(images, task)

    async def batches(self, images: Iterable[ImageLike], task: ImageTask[T], many: Many) -> Iterable[list[ImageLike]]:
        """The images in lists of what goes into one request, read lazily.

        Raises:
            InvalidInput: It is one image, or the model takes no images, or has another task.
        """
        return many.split(images, await self._requests.max_batch_size(task))
