"""`AsyncClient` and `AsyncModel`: the client for event loops.

`image_requests` turns images into requests and responses into answers.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, get_args

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, InvalidInput, Unauthorized
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.answers import SegmentedImage
from graphkiln_backend.images.decoding import ImageLike
from graphkiln_client import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT_S, DEFAULT_URL
from graphkiln_client.connection import Connection
from graphkiln_client.image_requests import ImageRequests
from graphkiln_client.preparing import Form
from graphkiln_client.published import Health, ServedModel, check_statistics
from graphkiln_client.remote_model import RemoteModel, new_request_id
from graphkiln_client.shared_memory import RegionPool
from graphkiln_client.tasks import (
    Classify,
    Detect,
    Detections,
    Embed,
    ImageTask,
    Result,
    Segment,
    Vector,
)
from graphkiln_client.transports.base import PLAIN, InferResponse, Transport
from graphkiln_client.transports.endpoint import Compression, Endpoint, Security

T = TypeVar("T")
R = TypeVar("R")
OnError = Literal["raise", "return"]
Progress = Callable[[int], None]

_INSTANCE_DIED = "is not healthy"  # Triton's message if the process of a model instance has ended
_INSTANCE_DIED_HINT = "a process was killed while loading the model; the server's log has the signal and advice"
_MAX_TIMEOUT_S = 2e6  # replaces larger values and infinity: system calls take a 32-bit number of milliseconds


def open_async(endpoint: Endpoint, compression: Compression) -> Transport:
    """Open a transport for an event loop; each protocol imports a heavy library.

    Raises:
        InvalidInput: The CA file or the client certificate cannot be read.
    """
    if endpoint.scheme in ("http", "https"):
        from graphkiln_client.transports.http_async import AsyncHttpTransport

        return AsyncHttpTransport(endpoint, compression)
    from graphkiln_client.transports.grpc_transport import AsyncGrpcTransport

    return AsyncGrpcTransport(endpoint, compression)


class AsyncClient:
    """A connection to one server for an event loop: `Client` with `await`. Task-safe.

    `transport_for` opens the transport; the synchronous client passes one for blocking transports.
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
        self._connection = Connection(transport_for(endpoint, compression), min(timeout_s, _MAX_TIMEOUT_S), max_retries)
        self._regions: RegionPool | None = None  # set by `shared_memory`

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
        """List what is not ready and not replaced; empty without permission to read the repository index."""
        try:
            models = await self.models()
        except Unauthorized:
            return ()
        serving = {model.name for model in models if model.ready}
        return tuple(m for m in models if not (m.ready or (m.state == "UNLOADED" and m.name in serving)))

    async def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """See `Client.load`."""
        try:
            await self._connection.call(self._connection.wire.load(name, json.dumps(config) if config else ""))
        except ClientError as error:
            if _INSTANCE_DIED in error.message:
                error.hint = _INSTANCE_DIED_HINT
            raise

    async def unload(self, name: str) -> None:
        """See `Client.unload`."""
        await self._connection.call(self._connection.wire.unload(name))

    @asynccontextmanager
    async def shared_memory(self) -> AsyncIterator[Self]:
        """See `Client.shared_memory`."""
        shared = copy(self)
        shared._regions = regions = RegionPool(self._connection)  # noqa: SLF001 - a copy of self
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
        preprocess: Overrides the preprocess spec published by the server.
        labels: Overrides the server's labels; by class index.
        images: `"encoded"` sends encoded images, `"tensor"` decodes them in the client. `"auto"` (default) sends
            encoded images if they are smaller than the tensor and the server accepts them.
    """

    preprocess: Preprocess | None
    labels: Sequence[str] | None
    images: Form


class ManyOptions(TypedDict, total=False):
    """Keyword arguments of `detect_many`, `segment_many` and `embed_many`; see `Client.classify_many`."""

    batch_size: int
    concurrency: int
    on_error: OnError
    progress: Progress | None


@dataclass(kw_only=True)
class Many:
    """Options of a request for many images, and the number of answers so far.

    Raises:
        InvalidInput: `batch_size` or `concurrency` is less than 1, or `on_error` is unknown.
    """

    batch_size: int = 16
    concurrency: int = 8
    on_error: OnError = "raise"
    progress: Progress | None = None
    _done: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.concurrency < 1:
            sizes = f"{self.batch_size} and {self.concurrency}"
            raise InvalidInput(f"batch_size and concurrency must be at least 1, got {sizes}")
        if self.on_error not in get_args(OnError):
            raise InvalidInput(f"on_error must be 'raise' or 'return', got {self.on_error!r}")

    def report(self, answer: T | ClientError) -> T | ClientError:
        """Count an answer and return it; raise an error if `on_error` is `"raise"`."""
        if isinstance(answer, ClientError) and self.on_error == "raise":
            raise answer
        self._done += 1
        if self.progress:
            self.progress(self._done)
        return answer


def _is_single_image(images: object) -> bool:
    """Return True for a single image. `[images, height, width]` and 4-D arrays are several."""
    if isinstance(images, np.ndarray):
        return images.ndim < 3 or (images.ndim == 3 and images.shape[2] in (3, 4))
    return isinstance(images, str | bytes) or not isinstance(images, Iterable)


def _split(images: Iterable[ImageLike], size: int) -> Iterator[list[ImageLike]]:
    remaining = iter(images)
    while batch := list(islice(remaining, size)):
        yield batch


class AsyncModel:
    """A model on a server, shared by any tasks; metadata, labels and preprocess spec are cached until it changes."""

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
        """See `Model.classify_many`. `progress` is called in the consumer's task."""
        many = Many(batch_size=batch_size, concurrency=concurrency, on_error=on_error, progress=progress)
        return self._many(images, Classify(top_k=top_k, softmax=softmax, ranked=tuple(outputs)), many)

    def detect_many(
        self, images: Iterable[ImageLike], *, score_threshold: float | None = None, **options: Unpack[ManyOptions]
    ) -> AsyncIterator[Detections | ClientError]:
        """See `Model.detect_many`."""
        return self._many(images, Detect(score_threshold=score_threshold), Many(**options))

    def segment_many(
        self, images: Iterable[ImageLike], **options: Unpack[ManyOptions]
    ) -> AsyncIterator[SegmentedImage | ClientError]:
        """See `Model.segment_many`."""
        return self._many(images, Segment(), Many(**options))

    def embed_many(
        self, images: Iterable[ImageLike], *, normalize: bool | None = None, **options: Unpack[ManyOptions]
    ) -> AsyncIterator[Vector | ClientError]:
        """See `Model.embed_many`."""
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
        """Split images lazily into the lists that fit into one request.

        Raises:
            InvalidInput: A single image was passed, the model takes no images, or it has another task.
        """
        if _is_single_image(images):
            raise InvalidInput(
                f"expected several images, got one {type(images).__name__}",
                hint="pass a list, [image], or use the method for a single image",
            )
        return _split(images, min(many.batch_size, await self._requests.max_batch_size(task)))


async def map_in_tasks(
    work: Callable[[T], Coroutine[Any, Any, R]], items: Iterable[T], concurrency: int
) -> AsyncGenerator[R]:
    """Map items in concurrent tasks, in order. Items are read lazily; an error ends the map."""
    pending: deque[asyncio.Task[R]] = deque()
    try:
        for item in items:
            pending.append(asyncio.create_task(work(item)))
            if len(pending) >= concurrency:
                yield await pending.popleft()
        while pending:
            yield await pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
