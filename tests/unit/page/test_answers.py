"""What is told of an image, for each kind of task."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from shown_server import Shown, config, encoded
from task_outputs import DETECTION, EMBEDDING, SEGMENTATION, detector_outputs, embedding_outputs, segmenter_outputs

from graphkiln.page.answers import answer_image
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.task import Task
from graphkiln_backend.images.masks import decode_rle
from graphkiln_client.transports.base import InferRequest, InferResponse


def ask(shown: Shown, content: bytes, top_k: int = 2, *, softmax: bool = False) -> dict[str, Any]:
    return asyncio.run(answer_image(shown.server(), "m", "1", content, top_k=top_k, softmax=softmax))


def answering(shown: Shown, task: Task, outputs: dict[str, AnyArray]) -> None:
    """Has the model do a task, with the first sample of some outputs."""
    first = {name: array[:1] for name, array in outputs.items()}

    def infer(request: InferRequest, timeout_s: float) -> InferResponse:
        del request, timeout_s
        return InferResponse(model="m", version="1", outputs=first)

    shown.transport.responses |= {"model_config": config(task), "infer": infer}


def test_classes_with_their_labels_and_the_times(shown: Shown) -> None:
    answer = ask(shown, encoded(brightness=200))
    assert [(row["label"], row["score"]) for row in answer["classifications"]] == [
        ("<img src=x onerror=alert(1)>", 200),
        ("dark", 55),
    ]
    times = answer["times"]
    assert (times["queue_ms"], times["compute_ms"], times["requests"]) == (2, 5, 1)
    assert 0 < times["decode_ms"] < times["total_ms"]


def test_probabilities(shown: Shown) -> None:
    answer = ask(shown, encoded(brightness=128), softmax=True)
    scores = [row["score"] for row in answer["classifications"]]
    expected = np.exp([128.0, 127.0]) / np.exp([128.0, 127.0]).sum()
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


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


def test_a_vector(shown: Shown) -> None:
    outputs = embedding_outputs()
    answering(shown, EMBEDDING, outputs)
    answer = ask(shown, encoded())
    assert answer["features"] == 16
    np.testing.assert_allclose(answer["vector"], outputs["vectors"][0], rtol=1e-6)
    assert answer["norm"] == pytest.approx(np.linalg.norm(outputs["vectors"][0]))


@pytest.mark.parametrize("content", [b"", b"%PDF-1.4", encoded()[:40]])
def test_what_is_no_image(shown: Shown, content: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"image|decoded"):
        ask(shown, content)
    assert not shown.transport.sent("infer")


def test_a_model_that_takes_no_images(shown: Shown) -> None:
    shown.transport.responses["model_config"] = config(takes_images=False)
    with pytest.raises(InvalidInput, match="takes no images"):
        ask(shown, encoded())


@pytest.mark.parametrize("top_k", [0, 1001])
def test_too_many_classes(shown: Shown, top_k: int) -> None:
    with pytest.raises(InvalidInput, match="top_k"):
        ask(shown, encoded(), top_k)
