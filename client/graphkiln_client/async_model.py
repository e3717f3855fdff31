"""`AsyncModel`: a model on a server, as event loops use it."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, Unpack

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.answers import SegmentedImage
from graphkiln_backend.images.decoding import ImageLike
from graphkiln_client.classification import (
    ManyOptions,
    OnError,
    Progress,
    ResultReporter,
    check_options,
    check_sizes,
    only,
    split_batches,
)
from graphkiln_client.classifier import Classifier
from graphkiln_client.connection import Connection
from graphkiln_client.encoded_images import Form
from graphkiln_client.image_requests import ImageRequests
from graphkiln_client.image_tasks import Detections, ImageTasks, Vector
from graphkiln_client.inference import Inference, new_request_id
from graphkiln_client.metadata import ModelInfo
from graphkiln_client.ordered_map import map_in_tasks
from graphkiln_client.results import Result
from graphkiln_client.shared_memory import RegionPool
from graphkiln_client.transports.base import PLAIN, InferResponse

T = TypeVar("T")


class AsyncModel:
    """A model on a server. Task-safe; its metadata, labels and preprocess spec are kept while one version answers."""

    def __init__(
        self,
        connection: Connection,
        name: str,
        version: str,
        *,
        preprocess: Preprocess | None,
        labels: Sequence[str] | None,
        fetch_urls: bool,
        images: Form = "auto",
        regions: RegionPool | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self._info = ModelInfo(connection, name, version)
        self._inference = Inference(connection, self._info, regions)
        self._requests = ImageRequests(
            connection, self._info, self._inference, preprocess=preprocess, fetch_urls=fetch_urls, form=images
        )
        self._classifier = Classifier(self._requests, labels=labels)
        self._tasks = ImageTasks(self._requests, labels=labels)

    async def metadata(self) -> dict[str, Any]:
        """The model's KServe v2 metadata: names, datatypes and shapes (-1 where they may vary).

        Raises:
            ClientError: The request failed.
        """
        return await self._info.metadata()

    async def config(self) -> dict[str, Any]:
        """The model's Triton configuration; empty where the server has no such extension.

        Raises:
            ClientError: The request failed.
        """
        return await self._info.config()

    async def preprocess(self) -> Preprocess:
        """The preprocess spec: the given one, or the published one.

        Raises:
            InvalidInput: The model publishes none.
            ProtocolError: What it publishes is not a spec.
        """
        return await self._requests.preprocess()

    async def statistics(self) -> dict[str, Any]:
        """The statistics of this version, or of the preferred one (Triton's statistics extension).

        Raises:
            ClientError: The request failed.
        """
        return await self._info.statistics()

    async def infer(self, inputs: Mapping[str, AnyArray], outputs: Iterable[str] = ()) -> dict[str, AnyArray]:
        """Runs the model on tensors.

        Args:
            inputs: Arrays by input name, with the batch dimension.
            outputs: Names of the requested outputs; empty for all.

        Returns:
            Arrays by output name; read-only views of the response.

        Raises:
            ClientError: The request failed.
        """
        return dict((await self._inference.infer(inputs, dict.fromkeys(outputs, PLAIN), new_request_id())).outputs)

    async def repeatable(self, inputs: Mapping[str, AnyArray]) -> Callable[[], Coroutine[Any, Any, InferResponse]]:
        """Encodes a request once, to be sent many times: for load generators, whose own work must not count.

        Args:
            inputs: As for `infer`.

        Returns:
            A function that sends the request, without retries.

        Raises:
            ClientError: The inputs cannot be sent.
        """
        return await self._inference.prepare(inputs)

    async def classify(
        self, image: ImageLike, *, top_k: int = 5, softmax: bool = False, outputs: Sequence[str] = ()
    ) -> Result:
        """Classifies one image.

        Args:
            image: Path, encoded bytes, Pillow image, uint8 pixels `[height, width, 3]`, or an `https://` URL where
                the client may fetch them.
            top_k: How many classes, best first; at most as many as the model has.
            softmax: Whether scores become probabilities.
            outputs: Which outputs to rank; empty for all.

        Raises:
            InvalidInput: The image cannot be read, or the model is not an image classifier.
            ClientError: The request failed.
        """
        return only(await self.classify_batch([image], top_k=top_k, softmax=softmax, outputs=outputs))

    async def classify_many(
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
        """Classifies images, several batches at a time, and yields the results in the order of the images.

        Args:
            images: As for `classify`; read lazily.
            top_k: As for `classify`.
            softmax: As for `classify`.
            outputs: As for `classify`.
            batch_size: Most images in one request; limited by what the model takes.
            concurrency: Most requests in flight.
            on_error: `"return"` yields the error of an image in its place instead of raising it.
            progress: Called with the number of results so far, in the consumer's own task.
        """
        batches = await self.batches(images, batch_size, concurrency, outputs)
        classify = functools.partial(self.classify_batch, top_k=top_k, softmax=softmax, outputs=outputs)
        reporter = ResultReporter(on_error, progress)
        async with aclosing(map_in_tasks(classify, batches, concurrency)) as results_by_batch:
            async for results in results_by_batch:
                for result in results:
                    yield reporter.report(result)

    async def batches(
        self, images: Iterable[ImageLike], batch_size: int, concurrency: int, outputs: Sequence[str]
    ) -> Iterable[list[ImageLike]]:
        """The images in lists of at most `batch_size`, or of what the model takes at once; read lazily.

        Raises:
            InvalidInput: A number is less than 1, or the model is not an image classifier.
        """
        check_sizes(batch_size, concurrency)
        return split_batches(images, min(batch_size, await self._classifier.max_batch_size(outputs)))

    async def classify_batch(
        self, images: Sequence[ImageLike], *, top_k: int, softmax: bool, outputs: Sequence[str]
    ) -> list[Result | ClientError]:
        """Classifies images in as few requests as their shapes allow; an image that fails has its error there.

        Raises:
            InvalidInput: The model is not an image classifier, or `top_k` is less than 1.
        """
        return await self._classifier.classify(images, top_k=top_k, softmax=softmax, outputs=outputs)

    async def detect(self, image: ImageLike, *, score_threshold: float | None = None) -> Detections:
        """Finds things in an image.

        Args:
            image: As for `classify`.
            score_threshold: The least score of a detection; None for the model's own.

        Returns:
            What was found, the best first, in pixels of the image.

        Raises:
            InvalidInput: The image cannot be read, or the model is no detector.
            ClientError: The request failed.
        """
        return only(await self.detect_batch([image], score_threshold=score_threshold))

    async def segment(self, image: ImageLike) -> SegmentedImage:
        """Finds the class of every pixel of an image.

        Args:
            image: As for `classify`.

        Raises:
            InvalidInput: The image cannot be read, or the model is no segmenter.
            ClientError: The request failed.
        """
        return only(await self.segment_batch([image]))

    async def embed(self, image: ImageLike, *, normalize: bool | None = None) -> Vector:
        """The vector of an image, float32 `[features]`.

        Args:
            image: As for `classify`.
            normalize: Whether it is divided by its length; None for what the model says.

        Raises:
            InvalidInput: The image cannot be read, or the model gives no vectors.
            ClientError: The request failed.
        """
        return only(await self.embed_batch([image], normalize=normalize))

    async def detect_batch(
        self, images: Sequence[ImageLike], *, score_threshold: float | None = None
    ) -> list[Detections | ClientError]:
        """As `detect`, in as few requests as the images' shapes allow; an image that fails has its error there."""
        return await self._tasks.detect(images, score_threshold)

    async def segment_batch(self, images: Sequence[ImageLike]) -> list[SegmentedImage | ClientError]:
        """As `segment`, likewise."""
        return await self._tasks.segment(images)

    async def embed_batch(
        self, images: Sequence[ImageLike], *, normalize: bool | None = None
    ) -> list[Vector | ClientError]:
        """As `embed`, likewise."""
        return await self._tasks.embed(images, normalize)

    def detect_many(
        self, images: Iterable[ImageLike], *, score_threshold: float | None = None, **options: Unpack[ManyOptions]
    ) -> AsyncIterator[Detections | ClientError]:
        """As `detect`, several batches at a time; options and order as for `classify_many`."""
        return self._many(functools.partial(self.detect_batch, score_threshold=score_threshold), images, options)

    def segment_many(
        self, images: Iterable[ImageLike], **options: Unpack[ManyOptions]
    ) -> AsyncIterator[SegmentedImage | ClientError]:
        """As `segment`, likewise."""
        return self._many(self.segment_batch, images, options)

    def embed_many(
        self, images: Iterable[ImageLike], *, normalize: bool | None = None, **options: Unpack[ManyOptions]
    ) -> AsyncIterator[Vector | ClientError]:
        """As `embed`, likewise."""
        return self._many(functools.partial(self.embed_batch, normalize=normalize), images, options)

    async def _many(
        self,
        answer: Callable[[list[ImageLike]], Coroutine[Any, Any, list[T | ClientError]]],
        images: Iterable[ImageLike],
        options: ManyOptions,
    ) -> AsyncIterator[T | ClientError]:
        check_options(options)
        batch_size, concurrency = options.get("batch_size", 16), options.get("concurrency", 8)
        batches = await self.task_batches(images, batch_size, concurrency)
        reporter = ResultReporter(options.get("on_error", "raise"), options.get("progress"))
        async with aclosing(map_in_tasks(answer, batches, concurrency)) as results_by_batch:
            async for results in results_by_batch:
                for result in results:
                    yield reporter.report(result)

    async def task_batches(
        self, images: Iterable[ImageLike], batch_size: int, concurrency: int
    ) -> Iterable[list[ImageLike]]:
        """As `batches`, for the other tasks.

        Raises:
            InvalidInput: A number is less than 1, or the model takes no images.
        """
        check_sizes(batch_size, concurrency)
        return split_batches(images, min(batch_size, await self._tasks.max_batch_size()))
