"""`AsyncModel`: a model on a server, as event loops use it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ProtocolError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.images.decoding import ImageLike, describe
from graphkiln_client.classifying import OnError, Progress, Progressing, cut, ranked, ranked_there, rows
from graphkiln_client.connection import Connection
from graphkiln_client.images import load_sample
from graphkiln_client.metadata import (
    ALL_CLASSES,
    checked_metadata,
    has_labels,
    labels_of,
    published_ranking,
    published_spec,
)
from graphkiln_client.results import Classification, Result
from graphkiln_client.shared_memory import RegionPool
from graphkiln_client.transports.base import PLAIN, InferRequest, InferResponse, Wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """How a model classifies: what goes in, what is ranked and by whom, how many images fit into a request."""

    input_name: str
    rank: int
    outputs: tuple[str, ...]
    largest_batch: int
    ranking: Ranking | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        """The outputs to ask for."""
        return (*self.outputs, self.ranking.indices) if self.ranking else self.outputs


class AsyncModel:
    """A model on a server. Task-safe; its metadata, labels and preprocess spec are asked for once and kept."""

    def __init__(
        self,
        connection: Connection,
        name: str,
        version: str,
        *,
        preprocess: Preprocess | None,
        labels: Sequence[str] | None,
        fetch_urls: bool,
        regions: RegionPool | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self._connection = connection
        self._spec = preprocess
        self._given_labels = labels
        self._labels: dict[str, tuple[str, ...]] = {}
        self._fetch_urls = fetch_urls
        self._regions = regions
        self._metadata: dict[str, Any] | None = None
        self._config: dict[str, Any] | None = None

    async def metadata(self) -> dict[str, Any]:
        """The model's KServe v2 metadata: names, datatypes and shapes (-1 where they may vary).

        Raises:
            ClientError: The server cannot be asked.
        """
        if self._metadata is None:
            self._metadata = checked_metadata(
                await self._connection.call(self._connection.wire.model_metadata(self.name, self.version))
            )
        return self._metadata

    async def config(self) -> dict[str, Any]:
        """The model's Triton configuration; empty where the server has no such extension.

        Raises:
            ClientError: The server cannot be asked.
        """
        if self._config is None:
            known = "model_configuration" in await self._connection.extensions()
            call = self._connection.wire.model_config(self.name, self.version)
            self._config = await self._connection.call(call) if known else {}
        return self._config

    async def preprocess(self) -> Preprocess:
        """The preprocess spec: the one given, or the published one.

        Raises:
            InvalidInput: The model publishes none.
            ProtocolError: What it publishes is not a spec.
        """
        if self._spec is None:
            self._spec = published_spec(self.name, await self.config())
        return self._spec

    async def statistics(self) -> dict[str, Any]:
        """What the server counted for this version, or for the preferred one: Triton's statistics extension.

        Raises:
            ClientError: The server cannot be asked.
        """
        call = self._connection.wire.model_statistics(self.name, self.version)
        found = (await self._connection.call(call)).get("model_stats", [])
        if not isinstance(found, list) or not found:
            raise ProtocolError(f"the server's statistics of '{self.name}' are empty")
        last: dict[str, Any] = found[-1]
        return last

    async def infer(self, inputs: Mapping[str, AnyArray], outputs: Iterable[str] = ()) -> dict[str, AnyArray]:
        """Runs the model on tensors.

        Args:
            inputs: Arrays by input name, with the batch dimension.
            outputs: Names of the outputs wanted; empty for all.

        Returns:
            Arrays by output name; read-only views of the answer.

        Raises:
            ClientError: The request did not get its answer.
        """
        return dict((await self._infer(inputs, dict.fromkeys(outputs, PLAIN), _new_id())).outputs)

    async def repeatable(self, inputs: Mapping[str, AnyArray]) -> Callable[[], Coroutine[Any, Any, InferResponse]]:
        """The same request as often as one likes, encoded once: for load generators, whose own work must not count.

        Args:
            inputs: As for `infer`.

        Returns:
            Sends the request, without retries.

        Raises:
            ClientError: The inputs cannot be sent.
        """
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        request = InferRequest(model=self.name, version=self.version, inputs=arrays)
        if self._regions is None:
            return await self._connection.prepared(request)
        regions = self._regions
        return lambda: self._infer_shared(regions, request)

    async def classify(
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
        (answer,) = await self.classify_batch([image], top_k=top_k, softmax=softmax, outputs=outputs)
        if isinstance(answer, ClientError):
            raise answer
        return answer

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
        """Classifies images, several at a time, and yields the answers in the order of the images.

        Args:
            images: As for `classify`; read lazily.
            top_k: As for `classify`.
            softmax: As for `classify`.
            outputs: As for `classify`.
            batch_size: Most images in one request; fewer where the model takes no more.
            concurrency: Most requests under way at once.
            on_error: `"return"` yields the error of an image in its place instead of raising it.
            progress: Called with the number of images answered so far, in the consumer's own task.
        """
        batches = await self.batches(images, batch_size, concurrency, outputs)
        tracker = Progressing(on_error, progress)
        waiting: deque[asyncio.Task[list[Result | ClientError]]] = deque()
        try:
            for batch in batches:
                asked = self.classify_batch(batch, top_k=top_k, softmax=softmax, outputs=outputs)
                waiting.append(asyncio.ensure_future(asked))
                if len(waiting) >= concurrency:
                    for answer in await waiting.popleft():
                        yield tracker.passed(answer)
            while waiting:
                for answer in await waiting.popleft():
                    yield tracker.passed(answer)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def batches(
        self, images: Iterable[ImageLike], batch_size: int, concurrency: int, outputs: Sequence[str]
    ) -> Iterable[list[ImageLike]]:
        """The images in lists of at most `batch_size`, and of what the model takes at once; read lazily.

        Raises:
            InvalidInput: A number is less than 1, or the model is not an image classifier.
        """
        if batch_size < 1 or concurrency < 1:
            raise InvalidInput(f"batch_size and concurrency must be at least 1, got {batch_size} and {concurrency}")
        await self.preprocess()
        return cut(images, min(batch_size, (await self._task(outputs)).largest_batch))

    async def classify_batch(
        self, images: Sequence[ImageLike], *, top_k: int, softmax: bool, outputs: Sequence[str]
    ) -> list[Result | ClientError]:
        """Classifies images in as few requests as their shapes allow; an image that fails has its error there.

        Raises:
            InvalidInput: The model is not an image classifier, or `top_k` is less than 1.
        """
        if top_k < 1:
            raise InvalidInput(f"top_k must be at least 1, got {top_k}")
        task, spec = await self._task(outputs), await self.preprocess()
        if task.ranking and softmax:
            raise InvalidInput(
                f"'{self.name}' answers its best classes only: there is no softmax over some of the scores",
                hint="convert the model with --softmax --top-k",
            )
        answers: list[Any] = await self._connection.transport.compute(lambda: [self._load(p, spec) for p in images])
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for index, sample in enumerate(answers):
            if not isinstance(sample, ClientError):
                by_shape.setdefault(sample.shape, []).append(index)
        for indices in by_shape.values():
            sources = [describe(images[index]) for index in indices]
            try:
                found: Sequence[Any] = await self._rank(
                    task, sources, [answers[index] for index in indices], top_k, softmax=softmax
                )
            except ClientError as error:
                found = [error] * len(indices)
            for index, answer in zip(indices, found, strict=True):
                answers[index] = answer
        return answers

    def _load(self, image: ImageLike, spec: Preprocess) -> AnyArray | ClientError:
        try:
            return load_sample(image, spec, fetch_timeout_s=self._connection.timeout_s if self._fetch_urls else None)
        except ClientError as error:
            return error

    async def _rank(
        self, task: _Task, sources: Sequence[str], samples: Sequence[AnyArray], k: int, *, softmax: bool
    ) -> list[Result]:
        """Asks for samples of one shape at once, and ranks their scores."""
        batched = task.rank == samples[0].ndim + 1
        tensor = (
            np.stack(samples) if batched and len(samples) > 1 else samples[0][np.newaxis] if batched else samples[0]
        )
        request_id = _new_id()
        begun = time.perf_counter()
        response = await self._infer({task.input_name: tensor}, dict.fromkeys(task.wanted, PLAIN), request_id)
        latency_ms = (time.perf_counter() - begun) * 1e3
        found: list[dict[str, tuple[Classification, ...]]] = [{} for _ in samples]
        for name in task.outputs:
            scores = rows(response, name, len(samples), batched=batched)
            if task.ranking:
                indices = rows(response, task.ranking.indices, len(samples), batched=batched)
                labels = task.ranking.labels if self._given_labels is None else tuple(self._given_labels)
                best = [ranked_there(*row, k, labels) for row in zip(scores, indices, strict=True)]
            else:
                labels = await self._labels_of(name, task.input_name, tensor[:1] if batched else tensor)
                best = [ranked(row, k, labels, softmax=softmax) for row in scores]
            for answers, row_best in zip(found, best, strict=True):
                answers[name] = row_best
        return [
            Result(
                source=source,
                model=response.model,
                version=response.version,
                request_id=request_id,
                latency_ms=latency_ms,
                outputs=answers,
            )
            for source, answers in zip(sources, found, strict=True)
        ]

    async def _labels_of(self, output: str, input_name: str, tensor: AnyArray) -> tuple[str, ...]:
        """The labels of an output by class index, asked for once: of all classes, by the classification extension.

        The extension is not asked for the answers themselves: it writes scores with six decimals, leaves the order of
        ties open, and cannot rank 16-bit floats.
        """
        if self._given_labels is not None:
            return tuple(self._given_labels)
        if output not in self._labels:
            labels: tuple[str, ...] = ()
            if has_labels(await self.config(), output):
                response = await self._infer({input_name: tensor}, {output: Wanted(classes=ALL_CLASSES)}, _new_id())
                (answers,) = rows(response, output, 1, batched=False)
                labels = labels_of(answers)
            self._labels[output] = labels
        return self._labels[output]

    async def _task(self, outputs: Sequence[str]) -> _Task:
        metadata = await self.metadata()
        if len(metadata["inputs"]) != 1:
            raise InvalidInput(
                f"classify needs a model with one input, '{self.name}' has {len(metadata['inputs'])}",
                hint="send tensors with infer()",
            )
        names = tuple(row["name"] for row in metadata["outputs"])
        if unknown := set(outputs) - set(names):
            raise InvalidInput(f"'{self.name}' has no output {', '.join(sorted(unknown))}", hint=f"it has {names}")
        (row,) = metadata["inputs"]
        limit = int((await self.config()).get("max_batch_size", 0))
        varies = bool(row["shape"]) and row["shape"][0] == -1
        largest = limit or (ALL_CLASSES if varies and len(row["shape"]) == _SAMPLE_RANK + 1 else 1)
        ranking = None if outputs else published_ranking(self.name, await self.config())
        return _Task(
            input_name=row["name"],
            rank=len(row["shape"]),
            outputs=(ranking.scores,) if ranking else tuple(outputs) or names,
            largest_batch=largest,
            ranking=ranking,
        )

    async def _infer(
        self, inputs: Mapping[str, AnyArray], outputs: Mapping[str, Wanted], request_id: str
    ) -> InferResponse:
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        request = InferRequest(
            model=self.name, version=self.version, inputs=arrays, outputs=outputs, request_id=request_id
        )
        if self._regions is None:
            return await self._connection.infer(request)
        return await self._infer_shared(self._regions, request)

    async def _infer_shared(self, regions: RegionPool, request: InferRequest) -> InferResponse:
        if not request.outputs:
            names = [row["name"] for row in (await self.metadata())["outputs"]]
            request = dataclasses.replace(request, outputs=dict.fromkeys(names, PLAIN))
        return await regions.infer(request, await self._output_sizes(request))

    async def _output_sizes(self, request: InferRequest) -> dict[str, tuple[int, DType]]:
        """Bytes of the wanted outputs whose shape follows from the metadata and the batch."""
        rows = next((array.shape[0] for array in request.inputs.values() if array.shape), 1)
        sizes: dict[str, tuple[int, DType]] = {}
        for row in (await self.metadata())["outputs"]:
            datatype, (first, *rest) = DType(row["datatype"]), row["shape"] or [1]
            if datatype is DType.BYTES or any(size < 0 for size in rest) or row["name"] not in request.outputs:
                continue
            count = int(np.prod([rows if first < 0 else first, *rest], dtype=np.int64))
            sizes[row["name"]] = (count * datatype.numpy.itemsize, datatype)
        return sizes


_SAMPLE_RANK = 3  # of an image: two dimensions and the channels


def _stacked(samples: Sequence[AnyArray]) -> AnyArray:
    """One tensor; of a single sample a view, because its copy costs as much as its journey."""
    return np.stack(samples) if len(samples) > 1 else samples[0][np.newaxis]


_PROCESS = uuid.uuid4().hex[:16]
_counter = itertools.count(1)


def _new_id() -> str:
    """Unlike every other: of other processes by its first half, of this one by its second."""
    return f"{_PROCESS}{next(_counter):016x}"
