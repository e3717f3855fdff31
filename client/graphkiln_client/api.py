"""`Client` and `Model`: what users call. The asynchronous client, driven to the end of each call by its caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import ImageLike
from graphkiln_client.asynchronous import DEFAULT_URL, AsyncClient, AsyncSharedMemory
from graphkiln_client.asynchronous_model import AsyncModel
from graphkiln_client.classifying import OnError, Progress, Progressing
from graphkiln_client.driving import run
from graphkiln_client.results import Health, Result, ServedModel
from graphkiln_client.transports.base import InferResponse
from graphkiln_client.transports.endpoint import Compression
from graphkiln_client.transports.opening import open_blocking


class Client:
    """A connection to one server. Thread-safe; keeps its connections until closed.

    Args:
        url: `http://`, `https://`, `grpc://` or `grpcs://`, then `host:port`; `user:password@` is sent as a header.
        timeout_s: Seconds that one call may take, all its attempts together; the server is told, too.
        max_retries: Further attempts after a failure that may pass: no connection, overload, not ready.
        headers: Sent with every call, for example `{"Authorization": "Bearer ..."}`; never shown.
        ca_file: Certificate authorities to trust in place of the system's.
        compression: How requests are compressed; pays only over slow networks.
        fetch_urls: Whether images may be given as `https://` URLs.

    Raises:
        InvalidInput: The URL, a header or the CA file cannot be used.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = 30.0,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        ca_file: str | Path | None = None,
        compression: Compression = "",
        fetch_urls: bool = False,
    ) -> None:
        self._client = AsyncClient(
            url,
            timeout_s=timeout_s,
            max_retries=max_retries,
            headers=headers,
            ca_file=ca_file,
            compression=compression,
            fetch_urls=fetch_urls,
            transport_for=open_blocking,
        )
        self.url = self._client.url

    def model(
        self, name: str, version: str = "", *, preprocess: Preprocess | None = None, labels: Sequence[str] | None = None
    ) -> Model:
        """A model of the server; nothing is asked before the first use.

        Args:
            name: Model name.
            version: Version, or empty for the one that the server's version policy prefers.
            preprocess: In place of the spec that the server publishes.
            labels: In place of the labels that the server knows; by class index.
        """
        return Model(self._client.model(name, version, preprocess=preprocess, labels=labels))

    def ready(self) -> bool:
        """Whether every model of the server is ready.

        Raises:
            ClientError: The server cannot be asked.
        """
        return run(self._client.ready())

    def health(self) -> Health:
        """How the server is, and which models are not ready.

        Raises:
            ClientError: The server cannot be asked.
        """
        return run(self._client.health())

    def models(self) -> tuple[ServedModel, ...]:
        """Every model version that the server knows, by name and version.

        Raises:
            ClientError: The server cannot be asked.
        """
        return run(self._client.models())

    def load(self, name: str) -> None:
        """Loads a model, or loads it anew; the server must run with `--model-control-mode=explicit`.

        Raises:
            ServerError: The model cannot be loaded; the message holds the cause.
            ModelNotReady: The server does not load on demand.
            ClientError: The server cannot be asked.
        """
        run(self._client.load(name))

    def unload(self, name: str) -> None:
        """Unloads a model; the server finishes its requests first, and answers before that.

        Raises:
            ModelNotReady: The server does not unload on demand.
            ClientError: The server cannot be asked.
        """
        run(self._client.unload(name))

    @contextmanager
    def shared_memory(self) -> Iterator[SharedMemory]:
        """A context whose models exchange tensors with a server on the same machine through shared memory.

        Raises:
            InvalidInput: There is no shared memory to be had.
        """
        context = self._client.shared_memory()
        shared = run(context.__aenter__())
        try:
            yield SharedMemory(shared)
        finally:
            run(context.__aexit__(None, None, None))

    def close(self) -> None:
        """Closes all connections."""
        run(self._client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class SharedMemory:
    """Models whose tensors travel through shared memory."""

    def __init__(self, shared: AsyncSharedMemory) -> None:
        self._shared = shared

    def model(
        self, name: str, version: str = "", *, preprocess: Preprocess | None = None, labels: Sequence[str] | None = None
    ) -> Model:
        """See `Client.model`."""
        return Model(self._shared.model(name, version, preprocess=preprocess, labels=labels))


class Model:
    """A model on a server. Thread-safe; its metadata, labels and preprocess spec are asked for once and kept."""

    def __init__(self, model: AsyncModel) -> None:
        self._model = model
        self.name = model.name
        self.version = model.version

    @property
    def metadata(self) -> dict[str, Any]:
        """The model's KServe v2 metadata: names, datatypes and shapes (-1 where they may vary).

        Raises:
            ClientError: The server cannot be asked.
        """
        return run(self._model.metadata())

    @property
    def config(self) -> dict[str, Any]:
        """The model's Triton configuration; empty where the server has no such extension.

        Raises:
            ClientError: The server cannot be asked.
        """
        return run(self._model.config())

    @property
    def preprocess(self) -> Preprocess:
        """The preprocess spec: the one given, or the published one.

        Raises:
            InvalidInput: The model publishes none.
            ProtocolError: What it publishes is not a spec.
        """
        return run(self._model.preprocess())

    def statistics(self) -> dict[str, Any]:
        """What the server counted for this version, or for the preferred one: Triton's statistics extension.

        Raises:
            ClientError: The server cannot be asked.
        """
        return run(self._model.statistics())

    def infer(self, inputs: Mapping[str, AnyArray], outputs: Iterable[str] = ()) -> dict[str, AnyArray]:
        """Runs the model on tensors.

        Args:
            inputs: Arrays by input name, with the batch dimension.
            outputs: Names of the outputs wanted; empty for all.

        Returns:
            Arrays by output name; read-only views of the answer.

        Raises:
            ClientError: The request did not get its answer.
        """
        return run(self._model.infer(inputs, outputs))

    def repeatable(self, inputs: Mapping[str, AnyArray]) -> Callable[[], InferResponse]:
        """The same request as often as one likes, encoded once: for load generators, whose own work must not count.

        Args:
            inputs: As for `infer`.

        Returns:
            Sends the request, without retries. Thread-safe.

        Raises:
            ClientError: The inputs cannot be sent.
        """
        send = run(self._model.repeatable(inputs))
        return lambda: run(send())

    def classify(
        self, image: ImageLike, *, top_k: int = 5, softmax: bool = False, outputs: Sequence[str] = ()
    ) -> Result:
        """Classifies one image.

        Args:
            image: Path, encoded bytes, Pillow image, uint8 pixels `[height, width, 3]`, or an `https://` URL where
                the client may fetch them.
            top_k: How many answers, best first; at most the number of classes.
            softmax: Whether scores become probabilities.
            outputs: Which outputs to rank; empty for all.

        Raises:
            InvalidInput: The image cannot be read, or the model is not an image classifier.
            ClientError: The request did not get its answer.
        """
        return run(self._model.classify(image, top_k=top_k, softmax=softmax, outputs=outputs))

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
        """Classifies images, several at a time, and yields the answers in the order of the images.

        Args:
            images: As for `classify`; read lazily.
            top_k: As for `classify`.
            softmax: As for `classify`.
            outputs: As for `classify`.
            batch_size: Most images in one request; fewer where the model takes no more.
            concurrency: Most requests under way at once; as many threads decode.
            on_error: `"return"` yields the error of an image in its place instead of raising it.
            progress: Called with the number of images answered so far, in the caller's thread.
        """
        batches = run(self._model.batches(images, batch_size, concurrency, outputs))
        tracker = Progressing(on_error, progress)
        waiting: deque[Future[list[Result | ClientError]]] = deque()

        def ask(batch: list[ImageLike]) -> list[Result | ClientError]:
            return run(self._model.classify_batch(batch, top_k=top_k, softmax=softmax, outputs=outputs))

        with ThreadPoolExecutor(concurrency, thread_name_prefix="graphkiln-classify") as pool:
            try:
                for batch in batches:
                    waiting.append(pool.submit(ask, batch))
                    if len(waiting) >= 2 * concurrency:  # the next batch is ready when a thread is
                        yield from map(tracker.passed, waiting.popleft().result())
                while waiting:
                    yield from map(tracker.passed, waiting.popleft().result())
            finally:
                for future in waiting:
                    future.cancel()
