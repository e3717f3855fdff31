"""Rankings of outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_client.classification import (
    ResultReporter,
    check_options,
    rank_scores,
    read_ranking,
    split_batches,
    split_samples,
)
from graphkiln_client.results import Result
from graphkiln_client.transports.base import InferResponse


class TestRankScores:
    def test_positions_come_one_after_the_other(self) -> None:
        values = np.array([[[0, 5], [7, 1]]], np.int32)  # [1, 2 positions, 2 classes]
        answers = rank_scores(values, 1, ("cat", "dog"), softmax=False)
        assert [(a.position, a.index, a.label, a.score) for a in answers] == [
            ((0, 0), 1, "dog", 5),
            ((0, 1), 0, "cat", 7),
        ]

    def test_labels_may_be_fewer(self) -> None:
        assert [a.label for a in rank_scores(np.arange(3.0), 3, ("a", "b"), softmax=False)] == ["", "b", "a"]

    def test_softmax_keeps_the_order_of_the_scores(self) -> None:
        values = np.array([1000.0, 1001.0, 0.0, 0.5])
        answers = rank_scores(values, 4, (), softmax=True)
        assert [a.index for a in answers] == [1, 0, 3, 2]
        assert answers[0].score == pytest.approx(1 / (1 + math.exp(-1)))

    def test_a_scalar_is_one_class(self) -> None:
        (answer,) = rank_scores(np.array(2.5), 5, (), softmax=False)
        assert (answer.index, answer.score, answer.position) == (0, 2.5, ())

    def test_no_more_than_asked_for(self) -> None:
        assert [row.index for row in rank_scores(np.array([1.0, 3.0, 2.0]), 2, (), softmax=False)] == [1, 2]

    @pytest.mark.parametrize("scores", [np.array([b"cat"], object), np.array(["cat"])])
    def test_strings_cannot_be_ranked(self, scores: Any) -> None:
        with pytest.raises(InvalidInput, match="cannot be ranked"):
            rank_scores(scores, 1, (), softmax=False)


class TestReadRanking:
    def test_the_graphs_order_is_kept(self) -> None:
        scores, indices = np.array([0.25, 0.5], np.float16), np.array([2, 0], np.int32)
        rows = read_ranking(scores, indices, 5, ("ant", "bee", "cat"))
        assert [(row.index, row.label, row.score) for row in rows] == [(2, "cat", 0.25), (0, "ant", 0.5)]

    def test_no_more_than_requested(self) -> None:
        rows = read_ranking(np.arange(5.0), np.arange(5), 2, ())
        assert [row.index for row in rows] == [0, 1]

    def test_positions(self) -> None:
        rows = read_ranking(np.array([[1.0], [2.0]]), np.array([[7], [8]], np.uint8), 3, ())
        assert [(row.position, row.index) for row in rows] == [((0,), 7), ((1,), 8)]

    @pytest.mark.parametrize(
        "indices",
        [np.array([0, 1, 2]), np.array([0.0, 1.0]), np.array([-1, 0]), np.array([[0, 1]]), np.array([True, False])],
    )
    def test_what_are_no_class_indices(self, indices: Any) -> None:
        with pytest.raises(ProtocolError, match="no class indices"):
            read_ranking(np.array([1.0, 2.0]), indices, 2, ())

    def test_a_scalar_is_no_ranking(self) -> None:
        with pytest.raises(ProtocolError, match="no class indices"):
            read_ranking(np.array(1.0), np.array(1), 1, ())


class TestSplitBatches:
    @pytest.mark.parametrize(
        ("count", "size", "expected"), [(0, 3, []), (2, 3, [2]), (3, 3, [3]), (7, 3, [3, 3, 1]), (3, 1, [1, 1, 1])]
    )
    def test_full_batches_and_the_rest(self, count: int, size: int, expected: list[int]) -> None:
        batches = list(split_batches([bytes([index]) for index in range(count)], size))
        assert [len(batch) for batch in batches] == expected
        assert b"".join(image for batch in batches for image in batch if isinstance(image, bytes)) == bytes(
            range(count)
        )

    def test_no_image_is_read_too_early(self) -> None:
        read: list[int] = []

        def images() -> Iterator[bytes]:
            for index in range(100):
                read.append(index)
                yield b""

        next(iter(split_batches(images(), 4)))
        assert read == [0, 1, 2, 3]


def response(**outputs: Any) -> InferResponse:
    return InferResponse(model="m", version="1", outputs=outputs)


class TestSplitSamples:
    def test_a_row_for_each_sample(self) -> None:
        rows = split_samples(response(Y=np.arange(6).reshape(2, 3)), "Y", 2, batched=True)
        assert [row.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5]]

    def test_without_a_batch_dimension_all_is_one_sample(self) -> None:
        (row,) = split_samples(response(Y=np.arange(6).reshape(2, 3)), "Y", 1, batched=False)
        assert row.shape == (2, 3)

    @pytest.mark.parametrize("array", [np.zeros((3, 2)), np.zeros((0, 2)), np.array(1.0)])
    def test_another_number_of_samples(self, array: Any) -> None:
        with pytest.raises(ProtocolError, match="for 2 images"):
            split_samples(response(Y=array), "Y", 2, batched=True)

    def test_an_output_that_is_missing(self) -> None:
        with pytest.raises(ProtocolError, match="lacks output 'Z'"):
            split_samples(response(Y=np.zeros(1)), "Z", 1, batched=False)


class TestResultReporter:
    RESULT = Result(source="", model="m", version="1", request_id="", latency_ms=0.0, outputs={})

    def test_results_pass_and_are_counted(self) -> None:
        counts: list[int] = []
        reporter = ResultReporter("raise", counts.append)
        assert [reporter.report(self.RESULT) for _ in range(3)] == [self.RESULT] * 3
        assert counts == [1, 2, 3]

    def test_an_error_is_raised_and_not_counted(self) -> None:
        counts: list[int] = []
        reporter = ResultReporter("raise", counts.append)
        with pytest.raises(InvalidInput, match="no image"):
            reporter.report(InvalidInput("no image"))
        assert counts == []

    def test_or_returned_and_counted(self) -> None:
        counts: list[int] = []
        error = InvalidInput("no image")
        assert ResultReporter("return", counts.append).report(error) is error
        assert counts == [1]

    def test_progress_need_not_be_reported(self) -> None:
        assert ResultReporter("return", None).report(self.RESULT) is self.RESULT

    def test_a_way_with_errors_that_does_not_exist_is_refused(self) -> None:
        """Anything but "raise" returned them, "Raise" and "ignore" too."""
        with pytest.raises(InvalidInput, match=r"on_error must be 'raise' or 'return', got 'ignore'"):
            ResultReporter("ignore", None)  # type: ignore[arg-type]


def test_options_that_exist_pass_and_others_are_named() -> None:
    check_options({"batch_size": 1, "on_error": "return"})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'size': there are batch_size, concurrency, on"):
        check_options({"size": 1})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    "one",
    ["street.jpg", b"\xff\xd8", Path("street.jpg"), Image.new("L", (2, 2)), np.zeros((4, 5, 3)), np.zeros((4, 5))],
    ids=lambda each: type(each).__name__,
)
def test_one_image_is_not_taken_for_several(one: Any) -> None:
    """Each letter of a path was a file that is not there, and each row of pixels was an image, which was answered."""
    with pytest.raises(InvalidInput, match=rf"expected several images, got one {type(one).__name__} \(give a list"):
        split_batches(one, 4)


@pytest.mark.parametrize(
    "several", [np.zeros((2, 4, 5, 3), np.uint8), np.zeros((2, 4, 5), np.uint8), {"a.png", "b.png"}]
)
def test_several_are_whatever_can_be_gone_through(several: Any) -> None:
    assert [len(batch) for batch in split_batches(several, 4)] == [2]
