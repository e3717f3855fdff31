"""Classification of images by one model: its input, the outputs that are ranked, and the labels of their classes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ModelNotReady
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import ImageLike, describe
from graphkiln_client.classification import rank_scores, read_ranking, split_samples
from graphkiln_client.classification_plan import ClassificationPlan, plan_classification
from graphkiln_client.connection import Connection
from graphkiln_client.images import load_sample
from graphkiln_client.inference import Inference, new_request_id
from graphkiln_client.metadata import ALL_CLASSES, parse_labels
from graphkiln_client.model_info import ModelInfo
from graphkiln_client.results import Classification, Result
from graphkiln_client.served_version import (
    Labels,
    ServedVersion,
    StaleVersion,
    is_contract_changed,
    read_served_version,
)
from graphkiln_client.transports.base import InferResponse, RequestedOutput

_MOST_VERSIONS = 5
"""Attempts at a classification that another version answers: more come only from servers that take turns."""
_BETWEEN_VERSIONS_S = 0.05


class Classifier:
    """Classifies images. Task-safe; labels and the preprocess spec are requested once for each version.

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
        self._served: ServedVersion | None = None
        self._answered = ""
        self._fetch_timeout_s = connection.timeout_s if fetch_urls else None

    async def preprocess(self) -> Preprocess:
        """The preprocess spec: the given one, or the published one.

        Raises:
            InvalidInput: The model publishes none.
            ProtocolError: What it publishes is not a spec.
        """
        return self._spec or (await self._served_version()).preprocess

    async def max_batch_size(self, outputs: Sequence[str]) -> int:
        """Most images in one request.

        Raises:
            InvalidInput: The model is not an image classifier.
        """
        await self.preprocess()
        return plan_classification(await self._served_version(), outputs, top_k=1, softmax=False).max_batch_size

    async def classify(
        self, images: Sequence[ImageLike], *, top_k: int, softmax: bool, outputs: Sequence[str]
    ) -> list[Result | ClientError]:
        """Classifies images in as few requests as their shapes allow; an image that fails has its error there.

        Where another version answers than the one that the images were prepared for, they are prepared again.

        Raises:
            InvalidInput: The model is not an image classifier, or `top_k` is less than 1.
            ModelNotReady: Another version answers each time.
        """
        if top_k < 1:
            raise InvalidInput(f"top_k must be at least 1, got {top_k}")
        for attempt in range(_MOST_VERSIONS):
            served = await self._served_version()
            plan = plan_classification(served, outputs, top_k=top_k, softmax=softmax)
            try:
                return await self._classify(images, plan, self._spec or served.preprocess)
            except StaleVersion as stale:
                self._forget(served, stale.answered)
                await self._connection.transport.sleep(attempt * _BETWEEN_VERSIONS_S)
        raise ModelNotReady(
            f"'{self._info.name}' was answered by another version each time, {_MOST_VERSIONS} times in a row",
            hint="name one: model(name, version)",
        )

    async def _served_version(self) -> ServedVersion:
        """What is published about the version that answers; requested once for each."""
        served = self._served
        if served is None:
            self._served = served = await read_served_version(self._info, self._answered)
        return served

    def _forget(self, served: ServedVersion, answered: str) -> None:
        """Has everything requested again, unless another task has seen to it."""
        if self._served is served:
            self._info.forget()
            self._served, self._answered = None, answered

    async def _classify(
        self, images: Sequence[ImageLike], plan: ClassificationPlan, spec: Preprocess
    ) -> list[Result | ClientError]:
        """Classifies images as one version takes them.

        Raises:
            StaleVersion: Another one answers.
        """
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

    async def _classify_batch(
        self, plan: ClassificationPlan, sources: Sequence[str], samples: Sequence[AnyArray]
    ) -> list[Result]:
        """Classifies samples of one shape in one request."""
        batched = plan.input_rank == samples[0].ndim + 1
        tensor = _batch(samples) if batched else samples[0]
        request_id = new_request_id()
        begun = time.perf_counter()
        response = await self._infer(plan.served, {plan.input_name: tensor}, plan.requested, request_id)
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

    async def _infer(
        self,
        served: ServedVersion,
        inputs: Mapping[str, AnyArray],
        outputs: Mapping[str, RequestedOutput],
        request_id: str,
    ) -> InferResponse:
        """A response of the version that the request was made for.

        Raises:
            StaleVersion: Another one answers.
        """
        try:
            response = await self._inference.infer(inputs, outputs, request_id, contract=served.digest)
        except ClientError as error:
            if is_contract_changed(error) or await self._has_changed(served, error):
                raise StaleVersion from error
            raise
        served.check(response.version)
        return response

    async def _has_changed(self, served: ServedVersion, error: ClientError) -> bool:
        """Whether a server that refuses an input publishes something else by now."""
        if not isinstance(error, InvalidInput) or error.status is None:
            return False
        try:
            info = ModelInfo(self._connection, self._info.name, self._info.version)
            return await read_served_version(info, "") != served
        except ClientError:
            return False

    async def _rank(
        self,
        plan: ClassificationPlan,
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
            labels = await self._labels_of(plan.served, output, first)
            return [rank_scores(row, plan.top_k, labels, softmax=plan.softmax) for row in scores]
        indices = split_samples(response, plan.ranking.indices, count, batched=batched)
        labels = plan.ranking.labels if self._given_labels is None else self._given_labels
        return [read_ranking(*row, plan.top_k, labels) for row in zip(scores, indices, strict=True)]

    async def _labels_of(self, served: ServedVersion, output: str, first: Mapping[str, AnyArray]) -> Labels:
        """The labels of an output by class index: as the version says, or by the classification extension, once.

        The extension is not used for the scores themselves: it writes them with six decimals, leaves the order of ties
        open, and cannot rank 16-bit floats.

        Args:
            served: What is published about the version.
            output: Name of the output.
            first: A request's inputs with one sample, which the extension needs to be sent.
        """
        if self._given_labels is not None:
            return self._given_labels
        labels = served.known_labels(output)
        if labels is None:
            requested = {output: RequestedOutput(class_count=ALL_CLASSES)}
            response = await self._infer(served, first, requested, new_request_id())
            (classes,) = split_samples(response, output, 1, batched=False)
            served.labels[output] = labels = parse_labels(classes)
        return labels


def _batch(samples: Sequence[AnyArray]) -> AnyArray:
    """One tensor; of a single sample a view, because its copy costs as much as sending it."""
    return np.stack(samples) if len(samples) > 1 else samples[0][np.newaxis]
