"""`Client` and `Model`: what users call."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import numpy as np

from graphkiln.client.image import Picture, describe, load_sample
from graphkiln.client.results import Classification, Result, ServedModel
from graphkiln.client.transports.base import InferRequest, InferResponse, Transport
from graphkiln.graph.dtypes import AnyArray
from graphkiln.graph.errors import ClientError, InvalidInput, ManifestError, ProtocolError
from graphkiln.graph.preprocess import PARAMETER, Preprocess

DEFAULT_URL = "http://localhost:8000"


class Client:
    """A connection to one server. Thread-safe; keeps its connections until closed.

    Args:
        url: `http://host:port` or `grpc://host:port`.
        timeout_s: Seconds that one call may take.

    Raises:
        InvalidInput: The URL has another scheme.
    """

    def __init__(self, url: str = DEFAULT_URL, *, timeout_s: float = 30.0) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._transport = _transport(url)

    def model(self, name: str, version: str = "") -> Model:
        """A model of the server; nothing is asked before the first use.

        Args:
            name: Model name.
            version: Version, or empty for the one that the server's version policy prefers.
        """
        return Model(self._transport, name, version, self.timeout_s)

    def ready(self) -> bool:
        """Whether every model of the server is ready.

        Raises:
            ClientError: The server cannot be asked.
        """
        return self._transport.ready(self.timeout_s)

    def models(self) -> tuple[ServedModel, ...]:
        """Every model version that the server knows, by name and version.

        Raises:
            ClientError: The server cannot be asked.
        """
        rows = [ServedModel.parse(row) for row in self._transport.repository_index(self.timeout_s)]
        return tuple(sorted(rows, key=lambda row: (row.name, row.version)))

    def load(self, name: str) -> None:
        """Loads a model, or loads it anew; the server must run with `--model-control-mode=explicit`.

        Raises:
            ServerError: The model cannot be loaded; the message holds the cause.
            ModelNotReady: The server does not load on demand.
            ClientError: The server cannot be asked.
        """
        self._transport.load(name, self.timeout_s)

    def unload(self, name: str) -> None:
        """Unloads a model; the server finishes its requests first, and answers before that.

        Raises:
            ModelNotReady: The server does not unload on demand.
            ClientError: The server cannot be asked.
        """
        self._transport.unload(name, self.timeout_s)

    def close(self) -> None:
        """Closes all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Model:
    """A model on a server. Thread-safe; its metadata is asked for once and kept."""

    def __init__(self, transport: Transport, name: str, version: str, timeout_s: float) -> None:
        self.name = name
        self.version = version
        self._transport = transport
        self._timeout_s = timeout_s

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The model's KServe v2 metadata: names, datatypes and shapes (-1 where they may vary)."""
        return self._transport.model_metadata(self.name, self.version, self._timeout_s)

    @cached_property
    def preprocess(self) -> Preprocess:
        """The published preprocess spec.

        Raises:
            InvalidInput: The model publishes none.
            ProtocolError: What it publishes is not a spec.
        """
        config = self._transport.model_config(self.name, self.version, self._timeout_s)
        parameter = config.get("parameters", {}).get(PARAMETER)
        if parameter is None:
            raise InvalidInput(
                f"model '{self.name}' does not say how pictures become its input",
                hint=f'add parameters {{ key: "{PARAMETER}" }} to its config.pbtxt, or send tensors with infer()',
            )
        try:
            return Preprocess.from_json(parameter.get("string_value", ""))
        except ManifestError as error:
            raise ProtocolError(f"model '{self.name}' publishes a broken preprocess spec: {error}") from error

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
        return dict(self._infer(inputs, dict.fromkeys(outputs, 0), _new_id()).outputs)

    def statistics(self) -> dict[str, Any]:
        """What the server counted for this version, or for the preferred one: Triton's statistics extension.

        Raises:
            ClientError: The server cannot be asked.
        """
        found: list[dict[str, Any]] = self._transport.model_statistics(self.name, self.version, self._timeout_s).get(
            "model_stats", []
        )
        if not found:
            raise ProtocolError(f"the server's statistics of '{self.name}' are empty")
        return found[-1]

    def classify(self, picture: Picture, *, top_k: int = 5) -> Result:
        """Classifies one picture.

        Args:
            picture: Path, encoded bytes, Pillow image, or uint8 pixels `[height, width, 3]`.
            top_k: How many answers, best first; at most the number of classes.

        Raises:
            InvalidInput: The picture cannot be read, or the model is not a picture classifier.
            ClientError: The request did not get its answer.
        """
        if top_k < 1:
            raise InvalidInput(f"top_k must be at least 1, got {top_k}")
        input_name, output_name, rank = self._classifier
        sample = load_sample(picture, self.preprocess)
        tensor = sample[np.newaxis] if sample.ndim + 1 == rank else sample
        request_id = _new_id()
        begun = time.perf_counter()
        response = self._infer({input_name: tensor}, {output_name: top_k}, request_id)
        latency_ms = (time.perf_counter() - begun) * 1e3
        return Result(
            source=describe(picture),
            model=response.model,
            version=response.version,
            request_id=request_id,
            latency_ms=latency_ms,
            classifications=_classifications(response, output_name),
        )

    def classify_many(
        self,
        pictures: Iterable[Picture],
        *,
        top_k: int = 5,
        concurrency: int = 8,
        on_error: Literal["raise", "return"] = "raise",
    ) -> Iterator[Result | ClientError]:
        """Classifies pictures, several at a time, and yields the answers in the order of the pictures.

        Args:
            pictures: As for `classify`; read lazily.
            top_k: As for `classify`.
            concurrency: Most requests under way at once.
            on_error: `"return"` yields the error of a picture in its place instead of raising it.
        """
        _ = self._classifier, self.preprocess  # asked for once, before the workers would each ask
        waiting: list[Future[Result]] = []
        with ThreadPoolExecutor(concurrency, thread_name_prefix="graphkiln-classify") as pool:
            try:
                for picture in pictures:
                    waiting.append(pool.submit(self.classify, picture, top_k=top_k))
                    if len(waiting) >= 2 * concurrency:
                        yield _outcome(waiting.pop(0), on_error)
                while waiting:
                    yield _outcome(waiting.pop(0), on_error)
            finally:
                for future in waiting:
                    future.cancel()

    @cached_property
    def _classifier(self) -> tuple[str, str, int]:
        """Name of the picture input, name of the score output, rank of the input."""
        inputs, outputs = self.metadata.get("inputs", []), self.metadata.get("outputs", [])
        if len(inputs) != 1 or len(outputs) != 1:
            raise InvalidInput(
                f"classify needs a model with one input and one output, '{self.name}' has "
                f"{len(inputs)} and {len(outputs)}",
                hint="send tensors with infer()",
            )
        return inputs[0]["name"], outputs[0]["name"], len(inputs[0]["shape"])

    def _infer(self, inputs: Mapping[str, AnyArray], outputs: Mapping[str, int], request_id: str) -> InferResponse:
        request = InferRequest(
            model=self.name, version=self.version, inputs=inputs, outputs=outputs, request_id=request_id
        )
        return self._transport.infer(request, self._timeout_s)


def _transport(url: str) -> Transport:
    """Transports are imported when used: each brings a heavy library."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme in ("http", "https"):
        from graphkiln.client.transports.http import HttpTransport

        return HttpTransport(parts.geturl())
    if parts.scheme == "grpc" and parts.netloc:
        from graphkiln.client.transports.grpc import GrpcTransport

        return GrpcTransport(parts.netloc)
    raise InvalidInput(f"cannot speak to '{url}'", hint="use http://HOST:PORT or grpc://HOST:PORT")


def _classifications(response: InferResponse, output: str) -> tuple[Classification, ...]:
    if output not in response.outputs:
        raise ProtocolError(f"the answer lacks output '{output}'")
    texts = response.outputs[output].ravel()
    return tuple(Classification.parse(bytes(text).decode("utf-8", "replace")) for text in texts)


def _outcome(future: Future[Result], on_error: str) -> Result | ClientError:
    try:
        return future.result()
    except ClientError as error:
        if on_error == "raise":
            raise
        return error


def _new_id() -> str:
    return uuid.uuid4().hex
