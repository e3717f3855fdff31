"""Image requests of the page for each task."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from shown_server import PIXELS, Shown, config, encoded
from task_outputs import (
    DETECTION,
    EMBEDDING,
    SEGMENTATION,
    decode_rle,
    detector_outputs,
    embedding_outputs,
    segmenter_outputs,
)

from graphkiln.page import answers
from graphkiln.page.answers import answer_image, timed
from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.task import Ranking, Task
from graphkiln_client.transports.base import InferRequest, InferResponse


def ask(shown: Shown, content: bytes, top_k: int = 2) -> dict[str, Any]:
    return asyncio.run(answer_image(shown.server(), "m", "1", content, top_k=top_k))


def scoring(shown: Shown, *scores: float) -> None:
    """Set the model's scores."""
    outputs = {"Y": np.array([scores], np.float32)}
    shown.transport.responses["infer"] = InferResponse(model="m", version="1", outputs=outputs)


def answering(shown: Shown, task: Task, outputs: dict[str, AnyArray]) -> None:
    """Set the model's task and outputs."""
    first = {name: array[:1] for name, array in outputs.items()}

    def infer(request: InferRequest, timeout_s: float) -> InferResponse:
        del request, timeout_s
        return InferResponse(model="m", version="1", outputs=first)

    shown.transport.responses |= {"model_config": config(task), "infer": infer}


def test_classification_with_times(shown: Shown) -> None:
    answer = ask(shown, encoded(brightness=200))
    assert [row["label"] for row in answer["classifications"]] == ["<img src=x onerror=alert(1)>", "dark"]
    np.testing.assert_allclose([row["score"] for row in answer["classifications"]], [200 / 255, 55 / 255], rtol=1e-6)
    assert answer["are_shares"]
    times = answer["times"]
    assert (times["queue_ms"], times["compute_ms"], times["requests"]) == (2, 5, 1)
    assert 0 < times["decode_ms"] < times["total_ms"]
    assert len(shown.transport.inferred()) == 1


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("logits", [(3.0, 2.0), (0.9, -4.0)], ids=str)
def test_logits_are_requested_as_probabilities(shown: Shown, logits: tuple[float, float], top_k: int) -> None:
    """Also if the shown scores are between 0 and 1."""
    shown.answer_in_turn(3, 4, 4, 5)
    scoring(shown, *logits)
    answer = ask(shown, encoded(), top_k)
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose([row["score"] for row in answer["classifications"]], expected[:top_k], rtol=1e-5)
    assert answer["are_shares"]
    assert answer["times"]["requests"] == 1, "of the second request alone"


def test_ranked_logits_are_not_normalized(shown: Shown) -> None:
    ranking = Ranking(scores="Y", indices="I", labels=("a", "b", "c"))
    text = Contracts.of({"1": Contract(preprocess=PIXELS, ranking=ranking)}).to_json()
    shown.transport.responses["model_config"] = {
        "max_batch_size": 4, "parameters": {"contracts": {"string_value": text}},
    }  # fmt: skip
    outputs = {"Y": np.array([[7, 5]], np.float32), "I": np.array([[2, 0]])}
    shown.transport.responses["infer"] = InferResponse(model="m", version="1", outputs=outputs)
    answer = ask(shown, encoded())
    assert [(row["label"], row["score"]) for row in answer["classifications"]] == [("c", 7), ("a", 5)]
    assert not answer["are_shares"]


def test_non_finite_scores(shown: Shown) -> None:
    scoring(shown, float("inf"), 0)
    answer = ask(shown, encoded())
    assert [row["score"] for row in answer["classifications"]] == [None, 0]
    assert not answer["are_shares"]


def test_detections_with_masks_in_pixels_of_the_image(shown: Shown) -> None:
    answering(shown, DETECTION, detector_outputs())
    answer = ask(shown, encoded(250, 60))
    assert (answer["kind"], answer["width"], answer["height"]) == ("detection", 250, 60)
    first = answer["detections"][0]
    assert first["box"] == [3, 10, 43, 50]
    assert decode_rle(first["mask"]).shape == (60, 250)


def test_segments(shown: Shown) -> None:
    answering(shown, SEGMENTATION, segmenter_outputs())
    answer = ask(shown, encoded(32, 32))
    assert [row["index"] for row in answer["segments"]] == [0, 1, 2]
    assert decode_rle(answer["segments"][1]["mask"]).sum() == 144


def test_embedding(shown: Shown) -> None:
    outputs = embedding_outputs()
    answering(shown, EMBEDDING, outputs)
    answer = ask(shown, encoded())
    assert answer["features"] == 16
    np.testing.assert_allclose(answer["vector"], outputs["vectors"][0], rtol=1e-6)
    assert answer["norm"] == pytest.approx(np.linalg.norm(outputs["vectors"][0]))


@pytest.mark.parametrize("content", [b"", b"%PDF-1.4", encoded()[:40]])
def test_invalid_images(shown: Shown, content: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"image|decoded"):
        ask(shown, content)
    assert not shown.transport.sent("infer")


def test_model_without_images(shown: Shown) -> None:
    shown.transport.responses["model_config"] = config(takes_images=False)
    with pytest.raises(InvalidInput, match="takes no images"):
        ask(shown, encoded())


@pytest.mark.parametrize("top_k", [0, 1001])
def test_invalid_top_k(shown: Shown, top_k: int) -> None:
    with pytest.raises(InvalidInput, match="top_k"):
        ask(shown, encoded(), top_k)


def times_of(shown: Shown, *counts: int) -> dict[str, Any]:
    shown.answer_in_turn(*counts)

    async def ask() -> str:
        return "it"

    answer, times = asyncio.run(timed(shown.server().model("m", "1"), ask))
    assert answer == "it"
    assert times.pop("total_ms") >= 0
    return times


@pytest.mark.parametrize(("counts", "requests"), [((7, 8), 1), ((7, 7, 7, 8), 1), ((7, 10), 3)])
def test_times_are_means_of_counted_requests(shown: Shown, counts: tuple[int, ...], requests: int) -> None:
    assert times_of(shown, *counts) == {"queue_ms": 2, "compute_ms": 5, "requests": requests}


def test_server_without_statistics(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_READINGS", 2)
    assert times_of(shown, 7) == {}
