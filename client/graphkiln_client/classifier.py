"""Classification of images by one model: its input, the outputs that are ranked, and the labels of their classes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.graph.preprocess import INPUT
from graphkiln_backend.graph.task import VERBS, Ranking, is_classification
from graphkiln_backend.images.decoding import ImageLike, Prepared
from graphkiln_client.classification import rank_scores, read_ranking, split_samples
from graphkiln_client.encoded_images import to_tensor
from graphkiln_client.image_requests import ImageRequests, batch_of
from graphkiln_client.inference import new_request_id
from graphkiln_client.metadata import ALL_CLASSES, parse_labels
from graphkiln_client.results import Classification, Result
from graphkiln_client.served_version import Labels, ServedVersion
from graphkiln_client.transports.base import PLAIN, InferResponse, RequestedOutput

# How a model classifies images, from what is published about it.

_SAMPLE_RANK = 3  # of an image: two dimensions and the channels


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassificationPlan:
    """How images are classified.

    Attributes:
        served: What is published about the version that will answer.
        input_name: The model's only input.
        input_rank: Its number of dimensions.
        takes_several: Whether one of them counts images.
        outputs: The outputs that are ranked.
        max_batch_size: Most images in one request.
        ranking: The outputs of a graph that ranks its classes itself.
        top_k: Most classes of an image.
        softmax: Whether scores become probabilities.
    """

    served: ServedVersion
    input_name: str
    input_rank: int
    takes_several: bool
    outputs: tuple[str, ...]
    max_batch_size: int
    ranking: Ranking | None
    top_k: int
    softmax: bool

    @property
    def requested(self) -> dict[str, RequestedOutput]:
        """The outputs to request."""
        return dict.fromkeys((*self.outputs, self.ranking.indices) if self.ranking else self.outputs, PLAIN)


def plan_classification(
    served: ServedVersion, outputs: Sequence[str], *, top_k: int, softmax: bool
) -> ClassificationPlan:
    """Plans the classification of images.

    Args:
        served: What is published about the version that will answer.
        outputs: Which outputs to rank; empty for all.
        top_k: Most classes of an image.
        softmax: Whether scores become probabilities.

    Raises:
        InvalidInput: The model is not an image classifier, or does not offer what is requested.
        ProtocolError: What is published cannot be read.
    """
    _check_task(served, outputs)
    row = image_input(served, "classify")
    names = tuple(output["name"] for output in served.metadata["outputs"])
    if unknown := set(outputs) - set(names):
        raise InvalidInput(
            f"'{served.model}' has no output {', '.join(sorted(unknown))}", hint=f"it has {', '.join(names)}"
        )
    ranking = None if outputs else served.ranking
    if ranking and softmax:
        raise InvalidInput(
            f"'{served.model}' returns its best classes only: there is no softmax over some of the scores",
            hint="convert the model with --softmax --top-k",
        )
    return ClassificationPlan(
        served=served,
        input_name=row["name"],
        input_rank=len(row["shape"]),
        takes_several=takes_several(row["shape"]),
        outputs=(ranking.scores,) if ranking else tuple(outputs) or names,
        max_batch_size=max_batch_size(row["shape"], served.config),
        ranking=ranking,
        top_k=top_k,
        softmax=softmax,
    )


def _check_task(served: ServedVersion, outputs: Sequence[str]) -> None:
    """Refuses to rank what is no score of a class: corners of boxes, features; unless an output is named.

    Raises:
        InvalidInput: The version has another task.
    """
    task = served.task
    if outputs or task is None or is_classification(task):
        return
    raise InvalidInput(
        f"'{served.model}' cannot classify: it answers otherwise: its task is {task.kind}",
        hint=f"use {VERBS[task.kind]}; Python's classify(image, outputs=[NAME]) ranks an output all the same",
    )


def image_input(served: ServedVersion, verb: str) -> Mapping[str, Any]:
    """The metadata of a model's only input.

    Args:
        served: What is published about the version that will answer.
        verb: What is asked of it, for the message.

    Raises:
        InvalidInput: It has several, or none.
    """
    inputs = served.metadata["inputs"]
    if len(inputs) != 1:
        raise InvalidInput(
            f"{verb} needs a model with one input, '{served.model}' has {len(inputs)}",
            hint="send tensors with infer()",
        )
    row: Mapping[str, Any] = inputs[0]
    return row


def max_batch_size(shape: Sequence[int], config: Mapping[str, Any]) -> int:
    """Triton's limit; without one, whatever a leading dimension of any size takes."""
    varies = takes_several(shape) and shape[0] == -1
    return int(config.get("max_batch_size", 0)) or (ALL_CLASSES if varies else 1)


def takes_several(shape: Sequence[int]) -> bool:
    """Whether an input for images has a dimension that counts them."""
    return len(shape) > _SAMPLE_RANK


def is_batching(served: ServedVersion) -> bool:
    """Whether the server puts a batch dimension before the shapes of the model's configuration."""
    return int(served.config.get("max_batch_size", 0)) > 0


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
