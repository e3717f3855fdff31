"""`Client` and `Model`: the asynchronous client, driven to the end of each call in the caller's thread.

`image_requests` holds what happens between an image and its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from typing import Any, Self, TypeVar, Unpack

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.answers import SegmentedImage
from graphkiln_backend.images.decoding import ImageLike
from graphkiln_backend.system.closing import Closeable
from graphkiln_client.async_client import AsyncClient, AsyncModel, ModelOptions
from graphkiln_client.defaults import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT_S, DEFAULT_URL
from graphkiln_client.many import Many, ManyOptions, OnError, Progress, map_in_threads
from graphkiln_client.results import Health, Result, ServedModel
from graphkiln_client.runner import run
from graphkiln_client.tasks import Classify, Detect, Detections, Embed, ImageTask, Segment, Vector
from graphkiln_client.transports import open_blocking
from graphkiln_client.transports.base import InferResponse
from graphkiln_client.transports.endpoint import Compression, Security

T = TypeVar("T")


class Client(Closeable):
    """A connection to one server. Thread-safe; keeps its connections until closed.

    Args:
        url: `http://`, `https://`, `grpc://` or `grpcs://`, then `host:port`; `user:password@` is sent as a header.
        timeout_s: Seconds that one request to the server may take, its retries together; also sent to the server.
            `classify` and the like may make several, each with this time.
        max_retries: Further attempts after a failure that may pass: no connection, overload, not ready.
        compression: How requests are compressed; worth it over slow networks only.
        fetch_urls: Allow images to be given as `https://` URLs.
        **security: `headers`, `ca_file`, `client_cert`, `client_key` and `admin_key`: see `Security`.

    Raises:
        InvalidInput: The URL, a header, a file or the admin key cannot be used.
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
        """A model of the server; no request is sent before the first use.

        Args:
            name: Model name.
            version: Version, or empty for the one that the server's version policy prefers.
            **options: `preprocess`, `labels` and `images`: see `ModelOptions`.
        """
        return Model(self._client.model(name, version, **options))

    def ready(self) -> bool:
        """True if every model of the server is ready.

        Raises:
            ClientError: The request failed.
        """
        return run(self._client.ready())

    def health(self) -> Health:
        """The state of the server, and the models that are not ready.

        Raises:
            ClientError: The request failed.
        """
        return run(self._client.health())

    def models(self) -> tuple[ServedModel, ...]:
        """Every model version that the server knows, by name and version.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ClientError: The request failed.
        """
        return run(self._client.models())

    def statistics(self) -> list[dict[str, Any]]:
        """The statistics of every version that is loaded, which need no admin key (Triton's statistics extension).

        Raises:
            ClientError: The request failed.
        """
        return run(self._client.statistics())

    def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """Load or reload a model.

        With `--model-control-mode=explicit`, new versions are served by this call; in its other modes `graphkiln serve`
        loads again what it serves.

        Args:
            name: Model name.
            config: In place of its config.pbtxt until it is loaded again, in the form of `Model.config`; only in
                explicit mode.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ServerError: The model cannot be loaded; the message says why.
            ModelNotReady: The server does not load on demand.
            ClientError: The request failed.
        """
        run(self._client.load(name, config))

    def unload(self, name: str) -> None:
        """Unload a model; return before the server has finished the model's requests.

        Raises:
            Unauthorized: The server's admin key is missing or wrong.
            ModelNotReady: The server does not unload on demand.
            ClientError: The request failed.
        """
        run(self._client.unload(name))

    @contextmanager
    def shared_memory(self) -> Iterator[Self]:
        """A context with this client, whose models exchange tensors with a server on this machine by shared memory.

        Raises:
            InvalidInput: Shared memory is not available.
        """
        context = self._client.shared_memory()
        shared = copy(self)
        shared._client = run(context.__aenter__())  # noqa: SLF001 - its own class
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
    """A model on a server. Thread-safe; metadata, labels and preprocess spec are kept until the server has others."""

    def __init__(self, model: AsyncModel) -> None:
        self._model = model
        self.name = model.name
        self.version = model.version

    @property
    def metadata(self) -> dict[str, Any]:
        """The model's KServe v2 metadata: names, datatypes and shapes (-1 where they may vary).

        Raises:
            ClientError: The request failed.
        """
        return run(self._model.metadata())

    @property
    def config(self) -> dict[str, Any]:
        """The model's Triton configuration; empty where the server has no such extension.

        Raises:
            ClientError: The request failed.
        """
        return run(self._model.config())

    @property
    def preprocess(self) -> Preprocess:
        """The preprocess spec: the given one, or the published one.

        Raises:
            InvalidInput: The model publishes none.
            ProtocolError: It is malformed.
        """
        return run(self._model.preprocess())

    def statistics(self) -> dict[str, Any]:
        """The statistics of this version, or of the preferred one (Triton's statistics extension).

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
            Arrays by output name; read-only views of the response.

        Raises:
            ClientError: The request failed.
        """
        return run(self._model.infer(inputs, outputs))

    def repeatable(self, inputs: Mapping[str, AnyArray]) -> Callable[[], InferResponse]:
        """Encode a request once, to be sent many times: for load generators, whose own work must not count.

        Args:
            inputs: As for `infer`.

        Returns:
            A function that sends the request, without retries. Thread-safe.

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
            image: Path, encoded bytes, Pillow image, uint8 pixels `[height, width, 3]`, or an `https://` URL where
                the client may fetch them.
            top_k: How many classes, best first; at most as many as the model has.
            softmax: Turn scores into probabilities.
            outputs: Which outputs to rank; empty for all.

        Raises:
            InvalidInput: The image cannot be read, or the model is not an image classifier.
            ClientError: The request failed.
        """
        return run(self._model.classify(image, top_k=top_k, softmax=softmax, outputs=outputs))

    def detect(self, image: ImageLike, *, score_threshold: float | None = None) -> Detections:
        """Find things in an image.

        Args:
            image: As for `classify`.
            score_threshold: The least score of a detection; None for the model's own.

        Returns:
            Detections, best first, in pixels of the image.

        Raises:
            InvalidInput: The image cannot be read, or the model is no detector.
            ClientError: The request failed.
        """
        return run(self._model.detect(image, score_threshold=score_threshold))

    def segment(self, image: ImageLike) -> SegmentedImage:
        """Find the class of every pixel of an image.

        Raises:
            InvalidInput: The image cannot be read, or the model is no segmenter.
            ClientError: The request failed.
        """
        return run(self._model.segment(image))

    def embed(self, image: ImageLike, *, normalize: bool | None = None) -> Vector:
        """Compute the vector of an image, float32 `[features]`.

        Args:
            image: As for `classify`.
            normalize: Divide it by its length, or do not; None for the model's own choice.

        Raises:
            InvalidInput: The image cannot be read, or the model gives no vectors.
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
        """Classify images, several batches at a time, and yield the results in the order of the images.

        Args:
            images: As for `classify`; read lazily.
            top_k: As for `classify`.
            softmax: As for `classify`.
            outputs: As for `classify`.
            batch_size: Most images in one request; limited by what the model takes.
            concurrency: Most requests in flight; as many threads decode.
            on_error: `"return"` yields the error of an image in its place instead of raising it.
            progress: Called with the number of results so far, in the caller's thread.
        """
        many = Many(batch_size=batch_size, concurrency=concurrency, on_error=on_error, progress=progress)
        return self._many(images, Classify(top_k=top_k, softmax=softmax, ranked=tuple(outputs)), many)

    def detect_many(
        self, images: Iterable[ImageLike], *, score_threshold: float | None = None, **options: Unpack[ManyOptions]
    ) -> Iterator[Detections | ClientError]:
        """As `detect`, several batches at a time; options and order as for `classify_many`."""
        return self._many(images, Detect(score_threshold=score_threshold), Many(**options))

    def segment_many(
        self, images: Iterable[ImageLike], **options: Unpack[ManyOptions]
    ) -> Iterator[SegmentedImage | ClientError]:
        """As `segment`, likewise."""
        return self._many(images, Segment(), Many(**options))

    def embed_many(
        self, images: Iterable[ImageLike], *, normalize: bool | None = None, **options: Unpack[ManyOptions]
    ) -> Iterator[Vector | ClientError]:
        """As `embed`, likewise."""
        return self._many(images, Embed(normalize=normalize), Many(**options))

    def _many(self, images: Iterable[ImageLike], task: ImageTask[T], many: Many) -> Iterator[T | ClientError]:
        def answer(batch: list[ImageLike]) -> list[T | ClientError]:
            return run(self._model.answer(batch, task))

        batches = run(self._model.batches(images, task, many))
        with closing(map_in_threads(answer, batches, many.concurrency)) as answers_by_batch:
            for answers in answers_by_batch:
                for each in answers:
                    yield many.report(each)
