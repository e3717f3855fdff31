"""How a model classifies images."""

from __future__ import annotations

from typing import Any

import pytest
from task_outputs import DETECTION, EMBEDDING, SEGMENTATION

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.task import Classification, Ranking, Task
from graphkiln_client.classifier import plan_classification
from graphkiln_client.metadata import ALL_CLASSES
from graphkiln_client.served_version import ServedVersion
from graphkiln_client.transports.base import PLAIN


def served(*shape: int, inputs: int = 1, contract: Contract | None = None, **config: Any) -> ServedVersion:
    rows = [{"name": f"x{index}", "shape": list(shape)} for index in range(inputs)]
    metadata = {"inputs": rows, "outputs": [{"name": "y"}, {"name": "z"}]}
    return ServedVersion(model="m", version="1", is_pinned=False, metadata=metadata, config=config, contract=contract)


def test_all_outputs_are_ranked_unless_some_are_named() -> None:
    plan = plan_classification(served(-1, 3, 8, 8), (), top_k=5, softmax=True)
    assert (plan.input_name, plan.input_rank, plan.outputs) == ("x0", 4, ("y", "z"))
    assert plan.requested == {"y": PLAIN, "z": PLAIN}
    assert plan_classification(served(-1, 3, 8, 8), ["z"], top_k=5, softmax=True).outputs == ("z",)


def test_a_ranking_names_the_outputs() -> None:
    ranking = Ranking(scores="y", indices="z")
    one = served(-1, 3, 8, 8, contract=Contract(ranking=ranking))
    plan = plan_classification(one, (), top_k=5, softmax=False)
    assert (plan.outputs, plan.requested) == (("y",), {"y": PLAIN, "z": PLAIN})
    with pytest.raises(InvalidInput, match="no softmax"):
        plan_classification(one, (), top_k=5, softmax=True)
    assert plan_classification(one, ["z"], top_k=5, softmax=True).ranking is None


@pytest.mark.parametrize(
    ("shape", "config", "size"),
    [
        ((-1, 3, 8, 8), {"max_batch_size": 4}, 4),
        ((-1, 3, 8, 8), {}, ALL_CLASSES),
        ((1, 3, 8, 8), {}, 1),
        ((3, 8, 8), {"max_batch_size": 0}, 1),
    ],
)
def test_most_images_in_one_request(shape: tuple[int, ...], config: dict[str, int], size: int) -> None:
    assert plan_classification(served(*shape, **config), (), top_k=1, softmax=False).max_batch_size == size


@pytest.mark.parametrize("inputs", [0, 2])
def test_a_model_of_other_inputs(inputs: int) -> None:
    with pytest.raises(InvalidInput, match=f"'m' has {inputs}"):
        plan_classification(served(1, inputs=inputs), (), top_k=1, softmax=False)


def test_an_output_that_it_has_not() -> None:
    with pytest.raises(InvalidInput, match="'m' has no output w"):
        plan_classification(served(1), ["y", "w"], top_k=1, softmax=False)


@pytest.mark.parametrize(("task", "verb"), [(DETECTION, "detect"), (SEGMENTATION, "segment"), (EMBEDDING, "embed")])
def test_corners_of_boxes_and_features_are_not_ranked(task: Task, verb: str) -> None:
    """The labels of a detector stood beside the coordinates of its boxes."""
    one = served(-1, 3, 8, 8, contract=Contract(task=task))
    with pytest.raises(InvalidInput, match=rf"'m' cannot classify: .* its task is {task.kind} \(use {verb};"):
        plan_classification(one, (), top_k=5, softmax=False)
    assert plan_classification(one, ["z"], top_k=5, softmax=False).outputs == ("z",)


def test_a_classifier_that_says_so() -> None:
    one = served(-1, 3, 8, 8, contract=Contract(task=Classification()))
    assert plan_classification(one, (), top_k=5, softmax=False).outputs == ("y", "z")
