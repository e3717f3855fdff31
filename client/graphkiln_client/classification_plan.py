"""How a model classifies images, from what is published about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.task import VERBS, Ranking, is_classification
from graphkiln_client.metadata import ALL_CLASSES
from graphkiln_client.served_version import ServedVersion
from graphkiln_client.transports.base import PLAIN, RequestedOutput

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
