"""Classification of images by one model: its input, the outputs that are ranked, and the labels of their classes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.graph.preprocess import INPUT
from graphkiln_backend.images.decoding import ImageLike, Prepared
from graphkiln_client.classification import rank_scores, read_ranking, split_samples
from graphkiln_client.classification_plan import ClassificationPlan, is_batching, plan_classification
from graphkiln_client.encoded_images import to_tensor
from graphkiln_client.image_requests import ImageRequests, batch_of
from graphkiln_client.inference import new_request_id
from graphkiln_client.metadata import ALL_CLASSES, parse_labels
from graphkiln_client.results import Classification, Result
from graphkiln_client.served_version import Labels, ServedVersion
from graphkiln_client.transports.base import InferResponse, RequestedOutput


class Classifier:
    """Classifies images. Task-safe; labels are requested once for each version.

    Args:
        requests: What is sent of images, and the versions that answer.
        labels: In place of the labels that the server knows; by class index.
    """

    def __init__(self, requests: ImageRequests, *, labels: Sequence[str] | None) -> None:
        self._requests = requests
        self._given_labels = None if labels is None else tuple(labels)

    async def max_batch_size(self, outputs: Sequence[str]) -> int:
        """Most images in one request.

        Raises:
            InvalidInput: The model is not an image classifier.
        """
        await self._requests.preprocess()
        served = await self._requests.served_version()
        return plan_classification(served, outputs, top_k=1, softmax=False).max_batch_size

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

        async def classify(served: ServedVersion) -> list[Result | ClientError]:
            plan = plan_classification(served, outputs, top_k=top_k, softmax=softmax)
            as_it_is, as_tensor = partial(self._classify_encoded, plan), partial(self._classify_batch, plan)
            return await self._requests.answer_as_asked(images, served, as_it_is, as_tensor)

        return await self._requests.follow(classify)

    async def _classify_batch(
        self, plan: ClassificationPlan, sources: Sequence[str], prepared: Sequence[Prepared]
    ) -> list[Result]:
        """Classifies samples of one shape in one request."""
        samples = [each.sample for each in prepared]
        batched = plan.input_rank == samples[0].ndim + 1
        tensor = batch_of(samples) if batched else samples[0]
        return await self._ask(plan, sources, {plan.input_name: tensor}, batched=batched)

    async def _classify_encoded(
        self, plan: ClassificationPlan, sources: Sequence[str], encoded: Sequence[bytes]
    ) -> list[Result]:
        """Classifies images as they are in one request."""
        tensor = to_tensor(encoded, batched=is_batching(plan.served))
        return await self._ask(plan, sources, {INPUT: tensor}, batched=plan.takes_several)

    async def _ask(
        self, plan: ClassificationPlan, sources: Sequence[str], inputs: Mapping[str, AnyArray], *, batched: bool
    ) -> list[Result]:
        count, encoded = len(sources), _is_encoded(inputs)
        request_id = new_request_id()
        begun = time.perf_counter()
        response = await self._requests.infer(plan.served, inputs, plan.requested, request_id, encoded=encoded)
        latency_ms = (time.perf_counter() - begun) * 1e3
        first = {name: tensor[:1] if batched else tensor for name, tensor in inputs.items()}
        by_output = {
            name: await self._rank(plan, response, name, count, first, batched=batched) for name in plan.outputs
        }
        return [
            Result(
                source=source,
                model=plan.served.model if encoded else response.model,
                version=response.version,
                request_id=request_id,
                latency_ms=latency_ms,
                outputs={name: ranked[index] for name, ranked in by_output.items()},
            )
            for index, source in enumerate(sources)
        ]

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
            response = await self._requests.infer(
                served, first, requested, new_request_id(), encoded=_is_encoded(first)
            )
            (classes,) = split_samples(response, output, 1, batched=False)
            served.labels[output] = labels = parse_labels(classes)
        return labels


def _is_encoded(inputs: Mapping[str, AnyArray]) -> bool:
    """Whether a request holds images as they are: bytes, not numbers."""
    return all(array.dtype == object for array in inputs.values())
