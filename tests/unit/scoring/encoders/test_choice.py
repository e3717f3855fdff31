"""The encoder follows from what is requested and what the model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.graph.task import Detection, Embedding, Ranking, Segmentation, Task
from graphkiln_backend.scoring.encoders import (
    AllScores,
    ClassMaps,
    Detections,
    Encoder,
    Ranked,
    Tensors,
    TopK,
    Vectors,
    choose_encoder,
)
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.request import ScoreRequest


def signature(**shapes: tuple[int | str, ...]) -> Signature:
    outputs = [TensorSpec(name=name, dtype=DType.FP32, shape=shape) for name, shape in shapes.items()]
    return Signature(inputs=(), outputs=tuple(outputs))


def request(**wanted: Any) -> ScoreRequest:
    return ScoreRequest(source="in", model=Path("m"), destination="out", **wanted)


GRAPH = signature(scores=("batch", 3), vector=("batch", 8), map=("batch", 2, 4, 4))
RANKING = Contract(ranking=Ranking(scores="scores", indices="vector"))


def test_the_best_classes_of_the_first_output() -> None:
    encoder = choose_encoder(GRAPH, Contract(), request())
    assert isinstance(encoder, TopK)
    assert encoder.outputs == ("scores",)


def test_labels_name_the_output() -> None:
    encoder = choose_encoder(GRAPH, Contract(labels=("a",) * 8, output="vector"), request())
    assert encoder.outputs == ("vector",)
    assert "labels" in encoder.schema.names


def test_vectors_are_not_ranked() -> None:
    encoder = choose_encoder(GRAPH, Contract(task=Embedding(vectors="vector")), request())
    assert isinstance(encoder, Vectors)
    assert encoder.outputs == ("vector",)


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        (Detection(boxes="b", scores="scores", classes="c", counts="n"), Detections),
        (Segmentation(scores="map"), ClassMaps),
        (Embedding(vectors="vector", normalize=True), Vectors),
    ],
)
def test_every_task_has_columns_of_its_own(task: Task, kind: type[Encoder]) -> None:
    contract = Contract(task=task, preprocess=Preprocess())
    assert isinstance(choose_encoder(GRAPH, contract, request()), kind)
    assert isinstance(choose_encoder(GRAPH, contract, request(outputs=("map",))), Tensors)


@pytest.mark.parametrize("wanted", [{"softmax": True}, {"scores": True}, {"top_k": 3}])
def test_a_task_without_scores_of_classes(wanted: dict[str, Any]) -> None:
    with pytest.raises(ScoringError, match=r"a segmentation, which has no scores of classes \(leave out --scores"):
        choose_encoder(GRAPH, Contract(task=Segmentation(scores="map"), preprocess=Preprocess()), request(**wanted))


def test_places_need_the_preprocessing() -> None:
    with pytest.raises(ScoringError, match="without its preprocessing"):
        choose_encoder(GRAPH, Contract(task=Segmentation(scores="map")), request())


def test_all_scores() -> None:
    assert isinstance(choose_encoder(GRAPH, Contract(), request(scores=True)), AllScores)
    one = choose_encoder(signature(y=("batch",)), Contract(), request(scores=True))
    assert [len(row) for row in one.encode({"y": np.zeros(2, np.float32)})[0].to_pylist()] == [1, 1]


def test_raw_outputs_once_each() -> None:
    encoder = choose_encoder(GRAPH, Contract(), request(outputs=("map", "scores", "map")))
    assert isinstance(encoder, Tensors)
    assert encoder.outputs == ("map", "scores")


def test_a_ranking_of_the_graph() -> None:
    assert isinstance(choose_encoder(GRAPH, RANKING, request()), Ranked)


@pytest.mark.parametrize("wanted", [{"softmax": True}, {"scores": True}])
def test_a_ranking_of_the_graph_has_no_other_scores(wanted: dict[str, bool]) -> None:
    with pytest.raises(ScoringError, match="best classes only"):
        choose_encoder(GRAPH, RANKING, request(**wanted))


def test_a_ranking_of_the_graph_has_no_more_classes_than_it_has() -> None:
    assert isinstance(choose_encoder(GRAPH, RANKING, request(top_k=2)), Ranked)
    with pytest.raises(ScoringError, match=r"returns its best 3 classes only, not 10 \(--top-k 3"):
        choose_encoder(GRAPH, RANKING, request(top_k=10))


def test_outputs_as_they_are_are_no_probabilities() -> None:
    with pytest.raises(ScoringError, match=r"without --softmax \(--scores --softmax"):
        choose_encoder(GRAPH, Contract(), request(outputs=("scores",), softmax=True))


def test_an_unknown_output() -> None:
    with pytest.raises(ScoringError, match="no output 'vectr'") as raised:
        choose_encoder(GRAPH, Contract(), request(outputs=("vectr",)))
    assert "vector" in raised.value.hint


def test_positions_are_not_ranked() -> None:
    with pytest.raises(ScoringError, match="no scores of classes") as raised:
        choose_encoder(signature(map=("batch", 2, 4, 4)), Contract(), request())
    assert "--output" in raised.value.hint


def test_all_scores_need_a_number_of_classes() -> None:
    with pytest.raises(ScoringError, match="how many classes"):
        choose_encoder(signature(y=("batch", "classes")), Contract(), request(scores=True))


def test_no_class_at_all() -> None:
    with pytest.raises(ScoringError, match="at least 1"):
        choose_encoder(GRAPH, Contract(), request(top_k=0))
