"""Answers decoded from the outputs of one sample, in pixels of its image."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from graphkiln_backend.graph import task as tasks
from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.images.answers import Box, read_detections, read_segmentation, read_vector
from graphkiln_backend.images.frame import frame_of

TASK = tasks.Detection(boxes="b", scores="s", classes="c", counts="n")
RICH = tasks.Detection(boxes="b", scores="s", classes="c", counts="n", masks="m", keypoints="k")
LETTERBOX = Preprocess(letterbox=Letterbox(size=(64, 64)))
FRAME = frame_of(LETTERBOX, (20, 40))  # scale 0.625, shifted by 16 rows


def sample(scores: list[float], count: int, **changes: Any) -> dict[str, Any]:
    size = len(scores)
    outputs = {
        "b": np.tile(np.array([8, 24, 16, 32], np.float32), (size, 1)),
        "s": np.array(scores, np.float32),
        "c": np.arange(size, dtype=np.int64),
        "n": np.array(count, np.int32),
        "m": np.ones((size, 28, 28), np.float32),
        "k": np.tile(np.array([[[32, 32, 0.75]]], np.float32), (size, 2, 1)),
    }
    return {**outputs, **changes}


class TestDetections:
    def test_boxes_in_pixels_of_the_image(self) -> None:
        (found,) = read_detections(TASK, sample([0.9], 1), FRAME, ("cat",))
        assert found.box == Box(5, 5, 10, 10)
        assert (found.label, found.index, found.mask, found.keypoints) == ("cat", 0, None, None)
        assert found.score == pytest.approx(0.9)

    def test_padding_and_threshold(self) -> None:
        outputs = sample([0.9, 0.6, 0.4, 0.95], 3)
        assert [each.index for each in read_detections(TASK, outputs, FRAME, ())] == [0, 1]
        assert [each.index for each in read_detections(TASK, outputs, FRAME, (), 0.0)] == [0, 1, 2]
        assert [each.label for each in read_detections(TASK, outputs, FRAME, ("a",))] == ["a", ""]

    def test_best_detection_first(self) -> None:
        assert [each.index for each in read_detections(TASK, sample([0.6, 0.9, 0.9], 3), FRAME, ())] == [1, 2, 0]

    @pytest.mark.parametrize("count", [0, 300])
    def test_number_of_detections(self, count: int) -> None:
        assert len(read_detections(RICH, sample([0.9] * 300, count), FRAME, ())) == count

    def test_masks_and_keypoints(self) -> None:
        (found,) = read_detections(RICH, sample([0.9], 1), FRAME, ("cat",))
        assert found.mask is not None
        assert found.keypoints is not None
        assert found.mask.pixels()[5:10, 5:10].all()
        np.testing.assert_allclose(found.keypoints, [[20, 10, 0.75]] * 2)
        row = json.loads(json.dumps(found.to_dict()))
        assert row["box"] == [5, 5, 10, 10]
        assert sum(row["mask"]["counts"]) == 800
        assert row["keypoints"] == [[20, 10, 0.75]] * 2

    def test_mask_of_a_clipped_box(self) -> None:
        mask = np.zeros((1, 28, 28), np.float32)
        mask[:, :14] = 1  # the upper half of the box: rows 32 to 48 of the input, where the image ends
        outputs = sample([0.9], 1, b=np.array([[8, 32, 16, 64]], np.float32), m=mask)
        (found,) = read_detections(RICH, outputs, FRAME, ())
        assert found.box == Box(5, 10, 10, 20)
        assert found.mask is not None
        assert found.mask.pixels()[11:19, 6:9].all()

    @pytest.mark.parametrize(
        "changes",
        [
            {"n": np.array(3, np.int32)},
            {"n": np.array(-1, np.int32)},
            {"b": np.zeros((2, 5), np.float32)},
            {"c": np.zeros(1, np.int64)},
            {"s": np.zeros((2, 1), np.float32)},
        ],
    )
    def test_outputs_that_are_not_detections(self, changes: Any) -> None:
        with pytest.raises(ProtocolError, match="hold no detections"):
            read_detections(TASK, sample([0.9, 0.8], 2, **changes), FRAME, ())


class TestSegmentation:
    def test_scores_at_another_stride(self) -> None:
        scores = np.zeros((2, 16, 16), np.float32)
        scores[1, :, 8:] = 1  # the right half
        found = read_segmentation(tasks.Segmentation(scores="s"), {"s": scores}, FRAME, ("none", "thing"))
        assert (found.classes.shape, found.classes.dtype) == ((20, 40), np.uint8)
        assert (found.classes[:, :19] == 0).all()
        assert (found.classes[:, 21:] == 1).all()
        assert found.present in ((0, 1), (1, 0))
        row = json.loads(json.dumps(found.to_dict()))
        assert {each["label"] for each in row["segments"]} == {"none", "thing"}
        assert sum(found.share(index) for index in found.present) == pytest.approx(1)

    def test_class_map(self) -> None:
        classes = np.zeros((64, 64), np.int64)
        classes[16:32] = 300
        found = read_segmentation(tasks.Segmentation(classes="c"), {"c": classes}, FRAME, ())
        assert found.classes.dtype == np.int32
        assert (found.classes[:10] == 300).all()
        assert (found.classes[10:] == 0).all()

    def test_pixels_outside_the_crop_are_unseen(self) -> None:
        frame = frame_of(Preprocess(resize=20, crop=(20, 20)), (20, 40))
        found = read_segmentation(tasks.Segmentation(classes="c"), {"c": np.ones((20, 20), np.uint8)}, frame, ())
        assert (found.classes[:, :10] == found.unseen).all()
        assert (found.classes[:, 10:30] == 1).all()
        assert (found.classes[:, 30:] == found.unseen).all()
        assert found.present == (1,)

    @pytest.mark.parametrize("shape", [(4, 4), (0, 4, 4)])
    def test_output_that_is_not_a_segmentation(self, shape: Any) -> None:
        with pytest.raises(ProtocolError, match="not a score of each pixel"):
            read_segmentation(tasks.Segmentation(scores="s"), {"s": np.zeros(shape, np.float32)}, FRAME, ())


class TestVector:
    def test_normalization_by_the_task(self) -> None:
        outputs = {"v": np.array([3, 4], np.float32)}
        np.testing.assert_array_equal(read_vector(tasks.Embedding(vectors="v"), outputs), [3, 4])
        found = read_vector(tasks.Embedding(vectors="v", normalize=True), outputs)
        np.testing.assert_allclose(found, [0.6, 0.8])
        assert found.dtype == np.float32

    @pytest.mark.parametrize("said", [False, True])
    def test_normalization_by_the_caller(self, said: bool) -> None:
        task, outputs = tasks.Embedding(vectors="v", normalize=said), {"v": np.array([3, 4], np.float32)}
        np.testing.assert_allclose(read_vector(task, outputs, True), [0.6, 0.8])
        np.testing.assert_array_equal(read_vector(task, outputs, False), [3, 4])

    def test_zero_vector(self) -> None:
        task = tasks.Embedding(vectors="v", normalize=True)
        assert not read_vector(task, {"v": np.zeros(3, np.float32)}).any()

    def test_output_that_is_not_a_vector(self) -> None:
        with pytest.raises(ProtocolError, match="is not a vector"):
            read_vector(tasks.Embedding(vectors="v"), {"v": np.zeros((2, 2), np.float32)})
