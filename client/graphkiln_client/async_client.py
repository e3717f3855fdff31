"""`AsyncClient` and `AsyncModel`: a connection to a server and a model there, as event loops use them.

`image_requests` holds what happens between an image and its answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from copy import copy
from functools import partial
from typing import Any, Self, TypedDict, TypeVar, Unpack

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, InvalidInput, Unauthorized
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.answers import SegmentedImage
from graphkiln_backend.images.decoding import ImageLike
from graphkiln_client.connection import Connection
from graphkiln_client.defaults import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT_S, DEFAULT_URL
from graphkiln_client.image_requests import ImageRequests
from graphkiln_client.many import Many, ManyOptions, OnError, Progress, map_in_tasks
from graphkiln_client.preparing import Form
from graphkiln_client.published import check_statistics
from graphkiln_client.remote_model import RemoteModel, new_request_id
from graphkiln_client.results import Health, Result, ServedModel
from graphkiln_client.shared_memory import RegionPool
from graphkiln_client.tasks import Classify, Detect, Detections, Embed, ImageTask, Segment, Vector
from graphkiln_client.transports import open_async
from graphkiln_client.transports.base import PLAIN, InferResponse, Transport
from graphkiln_client.transports.endpoint import Compression, Endpoint, Security

T = TypeVar("T")

_DIED = "is not healthy"  # Triton's words for an instance whose process ended
_ITS_LOG = "a process was killed while it loaded the model; the server's log says by which signal and what to try"
_LONGEST_S = 2e6  # for infinity, too: the system's calls take milliseconds in 32 bits, which are 24 days


class AsyncClient:
    """A connection to one server, for an event loop: `Client` with `await`. Task-safe.

    `transport_for` opens the transport; the synchronous client passes one that blocks.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        compression: Compression = "",
        fetch_urls: bool = False,
        transport_for: Callable[[Endpoint, Compression], Transport] = open_async,
        **security: Unpack[Security],
    ) -> None:
        if not timeout_s > 0 or max_retries < 0:
            raise InvalidInput(f"timeout_s must be above 0 and max_retries at least 0, got {timeout_s}, {max_retries}")
        endpoint = Endpoint.parse(url, **security)
        self.url = str(endpoint)
        self._fetch_urls = fetch_urls
        self._connection = Connection(transport_for(endpoint, compression), min(timeout_s, _LONGEST_S), max_retries)
        self._regions: RegionPool | None = None  # in the context of `shared_memory`

    def model(self, name: str, version: str = "", **options: Unpack[ModelOptions]) -> AsyncModel:
        """See `Client.model`."""
        return AsyncModel(
            self._connection, name, version, fetch_urls=self._fetch_urls, regions=self._regions, **options
        )

    async def ready(self) -> bool:
        """See `Client.ready`."""
        return await self._connection.call(self._connection.wire.ready())

    async def health(self) -> Health:
        """See `Client.health`."""
        wire = self._connection.wire
        if not await self._connection.call(wire.live()):
            return Health(live=False, ready=False)
        ready = await self._connection.call(wire.ready())
        metadata = await self._connection.call(wire.server_metadata())
        not_ready = () if ready else await self._not_ready()
        server = f"{metadata.get('name', '')} {metadata.get('version', '')}".strip()
        return Health(live=True, ready=ready, server=server, not_ready=not_ready)

    async def models(self) -> tuple[ServedModel, ...]:
        """See `Client.models`."""
        rows = await self._connection.call(self._connection.wire.repository_index())
        return tuple(sorted(map(ServedModel.parse, rows), key=lambda row: (row.name, row.version)))

    async def statistics(self) -> list[dict[str, Any]]:
        """See `Client.statistics`."""
        return check_statistics(await self._connection.call(self._connection.wire.model_statistics("", "")))

    async def _not_ready(self) -> tuple[ServedModel, ...]:
        """Empty where only the server's administrator may list its models: whether it is ready is still known."""
        try:
            return tuple(model for model in await self.models() if not model.ready)
        except Unauthorized:
            return ()

    async def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """See `Client.load`."""
        try:
            await self._connection.call(self._connection.wire.load(name, json.dumps(config) if config else ""))
        except ClientError as error:
            if _DIED in error.message:
                error.hint = _ITS_LOG
            raise

    async def unload(self, name: str) -> None:
        """See `Client.unload`."""
        await self._connection.call(self._connection.wire.unload(name))

    @asynccontextmanager
    async def shared_memory(self) -> AsyncIterator[Self]:
        """See `Client.shared_memory`."""
        shared = copy(self)
        shared._regions = regions = RegionPool(self._connection)  # noqa: SLF001 - its own class
        try:
            yield shared
        finally:
            await regions.close()

    async def close(self) -> None:
        """See `Client.close`."""
        await self._connection.transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


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
    """A model on a server. Task-safe; metadata, labels and preprocess spec are kept until the server has others."""

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
