"""Classification of images by one model: its input, the outputs that are ranked, and the labels of their classes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.images.decoding import ImageLike, describe
from graphkiln_client.classification import rank_scores, read_ranking, split_samples
from graphkiln_client.connection import Connection
from graphkiln_client.images import load_sample
from graphkiln_client.inference import Inference, new_request_id
from graphkiln_client.metadata import ALL_CLASSES, has_labels, parse_labels, published_ranking, published_spec
from graphkiln_client.model_info import ModelInfo
from graphkiln_client.results import Classification, Result
from graphkiln_client.transports.base import PLAIN, InferResponse, RequestedOutput

_SAMPLE_RANK = 3  # of an image: two dimensions and the channels


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """How images are classified.

    Attributes:
        input_name: The model's only input.
        input_rank: Its number of dimensions.
        outputs: The outputs that are ranked.
        max_batch_size: Most images in one request.
        ranking: The outputs of a graph that ranks its classes itself.
        top_k: Most classes of an image.
        softmax: Whether scores become probabilities.
    """

    input_name: str
    input_rank: int
    outputs: tuple[str, ...]
    max_batch_size: int
    ranking: Ranking | None
    top_k: int
    softmax: bool

    @property
    def requested(self) -> dict[str, RequestedOutput]:
        """The outputs to request."""
        return dict.fromkeys((*self.outputs, self.ranking.indices) if self.ranking else self.outputs, PLAIN)


class Classifier:
    """Classifies images. Task-safe; labels and the preprocess spec are requested once and kept.

    Args:
        connection: To the server.
        info: The model.
        inference: Sends its requests.
        preprocess: In place of the spec that the server publishes.
        labels: In place of the labels that the server knows; by class index.
        fetch_urls: Whether images may be given as `https://` URLs.
    """

    def __init__(
        self,
        connection: Connection,
        info: ModelInfo,
        inference: Inference,
        *,
        preprocess: Preprocess | None,
        labels: Sequence[str] | None,
        fetch_urls: bool,
    ) -> None:
        self._connection = connection
        self._info = info
        self._inference = inference
        self._spec = preprocess
        self._given_labels = None if labels is None else tuple(labels)
        self._labels: dict[str, tuple[str, ...]] = {}
        self._fetch_timeout_s = connection.timeout_s if fetch_urls else None

    async def preprocess(self) -> Preprocess:
        """The preprocess spec: the given one, or the published one.

        Raises:
            InvalidInput: The model publishes none.
            ProtocolError: What it publishes is not a spec.
        """
        if self._spec is None:
            self._spec = published_spec(self._info.name, await self._info.config())
        return self._spec

    async def max_batch_size(self, outputs: Sequence[str]) -> int:
        """Most images in one request.

        Raises:
            InvalidInput: The model is not an image classifier.
        """
        await self.preprocess()
        return (await self._plan(outputs, top_k=1, softmax=False)).max_batch_size

    async def classify(
        self, images: Sequence[ImageLike], *, top_k: int, softmax: bool, outputs: Sequence[str]
    ) -> list[Result | ClientError]:
        """Classifies images in as few requests as their shapes allow; an image that fails has its error there.

        Raises:
            InvalidInput: The model is not an image classifier, or `top_k` is less than 1.
        """
        plan, spec = await self._plan(outputs, top_k=top_k, softmax=softmax), await self.preprocess()
        samples = await self._connection.transport.compute(lambda: [self._load(image, spec) for image in images])
        results: dict[int, Result | ClientError] = {}
        by_shape: dict[tuple[int, ...], dict[int, AnyArray]] = {}
        for index, sample in enumerate(samples):
            if isinstance(sample, ClientError):
                results[index] = sample
            else:
                by_shape.setdefault(sample.shape, {})[index] = sample
        for group in by_shape.values():
            sources = [describe(images[index]) for index in group]
            try:
                results.update(zip(group, await self._classify_batch(plan, sources, [*group.values()]), strict=True))
            except ClientError as error:
                results.update(dict.fromkeys(group, error))
        return [results[index] for index in range(len(images))]

    def _load(self, image: ImageLike, spec: Preprocess) -> AnyArray | ClientError:
        try:
            return load_sample(image, spec, fetch_timeout_s=self._fetch_timeout_s)
        except ClientError as error:
            return error

    async def _classify_batch(self, plan: _Plan, sources: Sequence[str], samples: Sequence[AnyArray]) -> list[Result]:
        """Classifies samples of one shape in one request."""
        batched = plan.input_rank == samples[0].ndim + 1
        tensor = _batch(samples) if batched else samples[0]
        request_id = new_request_id()
        begun = time.perf_counter()
        response = await self._inference.infer({plan.input_name: tensor}, plan.requested, request_id)
        latency_ms = (time.perf_counter() - begun) * 1e3
        first = {plan.input_name: tensor[:1] if batched else tensor}
        by_output = {
            name: await self._rank(plan, response, name, len(samples), first, batched=batched) for name in plan.outputs
        }
        return [
            Result(
                source=source,
                model=response.model,
                version=response.version,
                request_id=request_id,
                latency_ms=latency_ms,
                outputs={name: ranked[index] for name, ranked in by_output.items()},
            )
            for index, source in enumerate(sources)
        ]

    async def _rank(
        self,
        plan: _Plan,
        response: InferResponse,
        output: str,
        count: int,
        first: Mapping[str, AnyArray],
        *,
        batched: bool,
    ) -> list[tuple[Classification, ...]]:
        """The classes of every sample by one output."""
        scores = split_samples(response, output, count, batched=batched)
        if plan.ranking is None:
            labels = await self._labels_of(output, first)
            return [rank_scores(row, plan.top_k, labels, softmax=plan.softmax) for row in scores]
        indices = split_samples(response, plan.ranking.indices, count, batched=batched)
        labels = plan.ranking.labels if self._given_labels is None else self._given_labels
        return [read_ranking(*row, plan.top_k, labels) for row in zip(scores, indices, strict=True)]

    async def _labels_of(self, output: str, first: Mapping[str, AnyArray]) -> tuple[str, ...]:
        """The labels of an output by class index, requested once: all classes, by the classification extension.

        The extension is not used for the scores themselves: it writes them with six decimals, leaves the order of ties
        open, and cannot rank 16-bit floats.

        Args:
            output: Name of the output.
            first: A request's inputs with one sample, which the extension needs to be sent.
        """
        if self._given_labels is not None:
            return self._given_labels
        if output not in self._labels:
            labels: tuple[str, ...] = ()
            if has_labels(await self._info.config(), output):
                requested = {output: RequestedOutput(class_count=ALL_CLASSES)}
                response = await self._inference.infer(first, requested, new_request_id())
                (classes,) = split_samples(response, output, 1, batched=False)
                labels = parse_labels(classes)
            self._labels[output] = labels
        return self._labels[output]

    async def _plan(self, outputs: Sequence[str], *, top_k: int, softmax: bool) -> _Plan:
        if top_k < 1:
            raise InvalidInput(f"top_k must be at least 1, got {top_k}")
        metadata, config = await self._info.metadata(), await self._info.config()
        row = self._image_input(metadata)
        names = tuple(output["name"] for output in metadata["outputs"])
        if unknown := set(outputs) - set(names):
            raise InvalidInput(
                f"'{self._info.name}' has no output {', '.join(sorted(unknown))}", hint=f"it has {', '.join(names)}"
            )
        ranking = None if outputs else published_ranking(self._info.name, config)
        if ranking and softmax:
            raise InvalidInput(
                f"'{self._info.name}' returns its best classes only: there is no softmax over some of the scores",
                hint="convert the model with --softmax --top-k",
            )
        return _Plan(
            input_name=row["name"],
            input_rank=len(row["shape"]),
            outputs=(ranking.scores,) if ranking else tuple(outputs) or names,
            max_batch_size=_max_batch_size(row["shape"], config),
            ranking=ranking,
            top_k=top_k,
            softmax=softmax,
        )

    def _image_input(self, metadata: dict[str, Any]) -> dict[str, Any]:
        inputs = metadata["inputs"]
        if len(inputs) != 1:
            raise InvalidInput(
                f"classify needs a model with one input, '{self._info.name}' has {len(inputs)}",
                hint="send tensors with infer()",
            )
        row: dict[str, Any] = inputs[0]
        return row


def _max_batch_size(shape: Sequence[int], config: Mapping[str, Any]) -> int:
    """Triton's limit; without one, whatever a leading dimension of any size takes."""
    varies = len(shape) == _SAMPLE_RANK + 1 and shape[0] == -1
    return int(config.get("max_batch_size", 0)) or (ALL_CLASSES if varies else 1)


def _batch(samples: Sequence[AnyArray]) -> AnyArray:
    """One tensor; of a single sample a view, because its copy costs as much as sending it."""
    return np.stack(samples) if len(samples) > 1 else samples[0][np.newaxis]
