"""`Client` and `Model`: the synchronous client.

The client is written once, as coroutines in `async_client`. `run` drives such a coroutine in the caller's thread over a
blocking transport, which never suspends it. `image_requests` turns images into requests and responses into answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from copy import copy
from typing import Any, Self, TypeVar, Unpack

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.answers import SegmentedImage
from graphkiln_backend.images.decoding import ImageLike
from graphkiln_backend.system.closing import Closeable
from graphkiln_client import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT_S, DEFAULT_URL
from graphkiln_client.async_client import AsyncClient, AsyncModel, Many, ManyOptions, ModelOptions, OnError, Progress
from graphkiln_client.published import Health, ServedModel
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
from graphkiln_client.transports.base import InferResponse, Transport
from graphkiln_client.transports.endpoint import Compression, Endpoint, Security

T = TypeVar("T")
R = TypeVar("R")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a blocking transport to its end, without an event loop.

    Raises:
        RuntimeError: The coroutine was suspended.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine on a blocking transport was suspended")


def open_blocking(endpoint: Endpoint, compression: Compression) -> Transport:
    """Open a transport that blocks the calling thread; each protocol imports a heavy library.

    Raises:
        InvalidInput: The CA file or the client certificate cannot be read.
    """
    if endpoint.scheme in ("http", "https"):
        from graphkiln_client.transports.http_blocking import HttpTransport

        return HttpTransport(endpoint, compression)
    from graphkiln_client.transports.grpc_transport import GrpcTransport

    return GrpcTransport(endpoint, compression)


class Client(Closeable):
    """A connection to one server. Thread-safe; connections are kept open until `close`.

    Args:
        url: `http://`, `https://`, `grpc://` or `grpcs://` and `host:port`. `user:password@` is sent as a header.
        timeout_s: Deadline in seconds of one request, including its retries; also sent to the server. `classify` and
            similar methods may send several requests, each with this deadline.
        max_retries: Retries after connection failures, overload and "not ready" errors.
        compression: Compression of requests; useful only over slow networks.
        fetch_urls: Allow images to be given as `https://` URLs.
        **security: `headers`, `ca_file`, `client_cert`, `client_key` and `admin_key`: see `Security`.

    Raises:
        InvalidInput: The URL, a header, a certificate file or the admin key is invalid.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        compression: Compression = "",
        fetch_urls: bool = False,
        **security: Unpack[Security],
    ) -> None:
        self._client = AsyncClient(
            url,
            timeout_s=timeout_s,
            max_retries=max_retries,
            compression=compression,
            fetch_urls=fetch_urls,
            transport_for=open_blocking,
            **security,
        )
        self.url = self._client.url

    def model(self, name: str, version: str = "", **options: Unpack[ModelOptions]) -> Model:
        """Return a model of the server. Sends no request.

        Args:
            name: Model name.
            version: Version, or empty for the server's choice.
            **options: `preprocess`, `labels` and `images`: see `ModelOptions`.
        """
        return Model(self._client.model(name, version, **options))

    def ready(self) -> bool:
        """Check that every model of the server is ready.

        Raises:
            ClientError: The request failed.
        """
        return run(self._client.ready())

    def health(self) -> Health:
        """Return the state of the server and the models that are not ready.

        Raises:
            ClientError: The request failed.
        """
        return run(self._client.health())

    def models(self) -> tuple[ServedModel, ...]:
        """List all model versions in the server's repository index, sorted by name and version.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ClientError: The request failed.
        """
        return run(self._client.models())

    def statistics(self) -> list[dict[str, Any]]:
        """Return the statistics of all loaded versions (Triton's statistics extension). Needs no admin key.

        Raises:
            ClientError: The request failed.
        """
        return run(self._client.statistics())

    def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """Load or reload a model.

        With `--model-control-mode=explicit` this also serves new versions; in the other modes `graphkiln serve`
        reloads the versions that it already serves.

        Args:
            name: Model name.
            config: Configuration that replaces config.pbtxt until the next load, in the form of `Model.config`; only
                in explicit mode.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ServerError: The model cannot be loaded; the message has the reason.
            ModelNotReady: The server does not allow loading on demand.
            ClientError: The request failed.
        """
        run(self._client.load(name, config))

    def unload(self, name: str) -> None:
        """Unload a model. Returns before the server has finished the model's pending requests.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ModelNotReady: The server does not allow unloading on demand.
            ClientError: The request failed.
        """
        run(self._client.unload(name))

    @contextmanager
    def shared_memory(self) -> Iterator[Self]:
        """Exchange tensors with a server on this machine through shared memory.

        Yields:
            A client whose models use shared memory.

        Raises:
            InvalidInput: Shared memory is not available.
        """
        context = self._client.shared_memory()
        shared = copy(self)
        shared._client = run(context.__aenter__())  # noqa: SLF001 - a copy of self
        try:
            yield shared
        finally:
            run(context.__aexit__(None, None, None))

    def close(self) -> None:
        """Close all connections."""
        run(self._client.close())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class Model:
    """A model on a server. Thread-safe; metadata, labels and preprocess spec are cached until the version changes."""

    def __init__(self, model: AsyncModel) -> None:
        self._model = model
        self.name = model.name
        self.version = model.version

    @property
    def metadata(self) -> dict[str, Any]:
        """KServe v2 metadata of the model: names, datatypes and shapes (-1 for dynamic dimensions).

        Raises:
            ClientError: The request failed.
        """
        return run(self._model.metadata())

    @property
    def config(self) -> dict[str, Any]:
        """Triton configuration of the model; empty if the server lacks the configuration extension.

        Raises:
            ClientError: The request failed.
        """
        return run(self._model.config())

    @property
    def preprocess(self) -> Preprocess:
        """Preprocess spec: the one passed to `Client.model`, or the published one.

        Raises:
            InvalidInput: The model publishes no preprocess spec.
            ProtocolError: The published spec is malformed.
        """
        return run(self._model.preprocess())

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of this version (Triton's statistics extension).

        Raises:
            ClientError: The request failed.
        """
        return run(self._model.statistics())

    def infer(self, inputs: Mapping[str, AnyArray], outputs: Iterable[str] = ()) -> dict[str, AnyArray]:
        """Run the model on tensors.

        Args:
            inputs: Arrays by input name, with the batch dimension.
            outputs: Names of the requested outputs; empty for all.

        Returns:
            Arrays by output name, as read-only views of the response.

        Raises:
            ClientError: The request failed.
        """
        return run(self._model.infer(inputs, outputs))

    def repeatable(self, inputs: Mapping[str, AnyArray]) -> Callable[[], InferResponse]:
        """Encode a request once and send it many times, for load generators.

        Args:
            inputs: As for `infer`.

        Returns:
            A thread-safe function that sends the request, without retries.

        Raises:
            ClientError: The inputs cannot be sent.
        """
        send = run(self._model.repeatable(inputs))
        return lambda: run(send())

    def classify(
        self, image: ImageLike, *, top_k: int = 5, softmax: bool = False, outputs: Sequence[str] = ()
    ) -> Result:
        """Classify one image.

        Args:
            image: Path, encoded bytes, Pillow image, uint8 pixels `[height, width, 3]`, or an `https://` URL if the
                client has `fetch_urls`.
            top_k: Maximum number of classes, best first.
            softmax: Convert scores to probabilities.
            outputs: Names of the outputs to rank; empty for all.

        Raises:
            InvalidInput: The image cannot be read, or the model is not an image classifier.
            ClientError: The request failed.
        """
        return run(self._model.classify(image, top_k=top_k, softmax=softmax, outputs=outputs))

    def detect(self, image: ImageLike, *, score_threshold: float | None = None) -> Detections:
        """Detect objects in an image.

        Args:
            image: As for `classify`.
            score_threshold: Minimum score of a detection; None for the model's default.

        Returns:
            Detections in pixels of the image, best first.

        Raises:
            InvalidInput: The image cannot be read, or the model is not a detector.
            ClientError: The request failed.
        """
        return run(self._model.detect(image, score_threshold=score_threshold))

    def segment(self, image: ImageLike) -> SegmentedImage:
        """Classify every pixel of an image.

        Raises:
            InvalidInput: The image cannot be read, or the model is not a segmenter.
            ClientError: The request failed.
        """
        return run(self._model.segment(image))

    def embed(self, image: ImageLike, *, normalize: bool | None = None) -> Vector:
        """Compute the embedding of an image, float32 `[features]`.

        Args:
            image: As for `classify`.
            normalize: Scale the vector to unit length; None for the model's default.

        Raises:
            InvalidInput: The image cannot be read, or the model computes no embeddings.
            ClientError: The request failed.
        """
        return run(self._model.embed(image, normalize=normalize))

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
    ) -> Iterator[Result | ClientError]:
        """Classify images in concurrent batches and yield the results in the order of the images.

        Args:
            images: As for `classify`; read lazily.
            top_k: As for `classify`.
            softmax: As for `classify`.
            outputs: As for `classify`.
            batch_size: Maximum number of images in one request; also limited by the model's maximum batch size.
            concurrency: Maximum number of requests in flight, and number of decoding threads.
            on_error: `"raise"`, or `"return"` to yield the error of an image in place of its result.
            progress: Called with the number of results so far, in the caller's thread.
        """
        many = Many(batch_size=batch_size, concurrency=concurrency, on_error=on_error, progress=progress)
        return self._many(images, Classify(top_k=top_k, softmax=softmax, ranked=tuple(outputs)), many)

    def detect_many(
        self, images: Iterable[ImageLike], *, score_threshold: float | None = None, **options: Unpack[ManyOptions]
    ) -> Iterator[Detections | ClientError]:
        """Run `detect` on many images; options and order as for `classify_many`."""
        return self._many(images, Detect(score_threshold=score_threshold), Many(**options))

    def segment_many(
        self, images: Iterable[ImageLike], **options: Unpack[ManyOptions]
    ) -> Iterator[SegmentedImage | ClientError]:
        """Run `segment` on many images; options and order as for `classify_many`."""
        return self._many(images, Segment(), Many(**options))

    def embed_many(
        self, images: Iterable[ImageLike], *, normalize: bool | None = None, **options: Unpack[ManyOptions]
    ) -> Iterator[Vector | ClientError]:
        """Run `embed` on many images; options and order as for `classify_many`."""
        return self._many(images, Embed(normalize=normalize), Many(**options))

    def _many(self, images: Iterable[ImageLike], task: ImageTask[T], many: Many) -> Iterator[T | ClientError]:
        def answer(batch: list[ImageLike]) -> list[T | ClientError]:
            return run(self._model.answer(batch, task))

        batches = run(self._model.batches(images, task, many))
        with closing(map_in_threads(answer, batches, many.concurrency)) as answers_by_batch:
            for answers in answers_by_batch:
                for each in answers:
                    yield many.report(each)


def map_in_threads(work: Callable[[T], R], items: Iterable[T], concurrency: int) -> Generator[R]:
    """Map items in a thread pool, in order. Items are read lazily in the caller's thread; an error ends the map."""
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="graphkiln-client") as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) >= 2 * concurrency:  # a queued item for every thread
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
