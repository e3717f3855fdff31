"""Detections are compared whatever their order; what changed is refused, what nothing decides is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from task_outputs import DETECTION, detector_outputs

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.proof.detections import can_match, detection_controls, match_detections, why_undecided
from graphkiln_backend.proof.policy import BF16, EXPORT, FP16, INT8, OTHER_ENGINE, Limits

ROWS = [EXPORT, OTHER_ENGINE, FP16, BF16, INT8]
REFERENCE = detector_outputs()


def passes(outputs: dict[str, AnyArray], limits: Limits, reference: dict[str, AnyArray] = REFERENCE) -> bool:
    return match_detections(DETECTION, reference, outputs, limits)[1].within(limits)


def changed(name: str, row: int, value: object) -> dict[str, AnyArray]:
    outputs = {name: array.copy() for name, array in REFERENCE.items()}
    outputs[name][:, row] += np.asarray(value).astype(outputs[name].dtype)
    return outputs


@pytest.mark.parametrize("limits", ROWS)
def test_equal_detections_pass(limits: Limits) -> None:
    aligned, decision = match_detections(DETECTION, REFERENCE, REFERENCE, limits)
    assert decision.within(limits)
    assert (decision.agreeing, decision.total, decision.near_ties) == (12, 12, 0)
    assert all(np.array_equal(aligned[name], REFERENCE[name]) for name in REFERENCE)


def test_another_order_is_brought_back() -> None:
    order = [1, 0, 2, 3, 4, 5]
    shuffled = {name: array[:, order] if array.ndim > 1 else array for name, array in REFERENCE.items()}
    aligned, decision = match_detections(DETECTION, REFERENCE, shuffled, EXPORT)
    assert decision.within(EXPORT)
    assert np.array_equal(aligned["boxes"], REFERENCE["boxes"])


@pytest.mark.parametrize("limits", [EXPORT, OTHER_ENGINE, FP16])
def test_a_box_that_moved_by_a_pixel_is_refused(limits: Limits) -> None:
    assert not passes(changed("boxes", 0, [1, 0, 1, 0]), limits)


@pytest.mark.parametrize("limits", ROWS)
def test_each_control_is_refused(limits: Limits) -> None:
    controls = dict(detection_controls(DETECTION, REFERENCE, limits))
    assert list(controls) == ["a box moved", "a class swapped", "a detection left out", "a mask moved"]
    assert [change for change, outputs in controls.items() if passes(outputs, limits)] == []


POINTED = replace(DETECTION, keypoints="points")


def pointed(elsewhere: int = 0) -> dict[str, AnyArray]:
    """Eight keypoints of each thing; some of the first thing's stand ten pixels away, as high."""
    points = np.tile(np.array([20, 30, 4], np.float32), (3, 6, 8, 1))
    points[:, 0, :elsewhere, 0] += 10
    return {**REFERENCE, "points": points}


@pytest.mark.parametrize("limits", ROWS)
def test_keypoints_that_moved_are_refused(limits: Limits) -> None:
    outputs = dict(detection_controls(POINTED, pointed(), limits))["keypoints moved"]
    assert np.abs(outputs["points"] - pointed()["points"]).max() >= 1
    assert not match_detections(POINTED, pointed(), outputs, limits)[1].within(limits)


def test_a_keypoint_that_nothing_decides_is_counted_and_left_out_of_the_numbers() -> None:
    aligned, decision = match_detections(POINTED, pointed(), pointed(elsewhere=1), EXPORT)
    assert (decision.agreeing, decision.total, decision.near_ties) == (12, 12, 3)
    assert np.array_equal(aligned["points"], pointed()["points"])
    assert match_detections(POINTED, pointed(), pointed(elsewhere=3), EXPORT)[1].agreeing == 9


def test_a_detection_more_is_refused_and_one_near_the_end_of_the_list_is_a_near_tie() -> None:
    def one_more(score: float) -> dict[str, AnyArray]:
        outputs = {name: array.copy() for name, array in REFERENCE.items()}
        outputs["counts"] += np.int32(1)
        outputs["boxes"][:, 4], outputs["scores"][:, 4] = (300, 10, 340, 50), score
        return outputs

    assert not passes(one_more(0.9), EXPORT)
    _, decision = match_detections(DETECTION, REFERENCE, one_more(0.64), EXPORT)
    assert decision.within(EXPORT)
    assert decision.near_ties == 3
    assert "3 near ties" in str(decision)


def test_below_the_threshold_only_fp32_and_fp16_must_agree() -> None:
    faint = {name: array.copy() for name, array in REFERENCE.items()}
    faint["scores"][:, 2] = 0.3
    faint["scores"][:, 3] = 0.1
    moved = {name: array.copy() for name, array in faint.items()}
    moved["boxes"][:, 2] += np.float32(100)
    assert not passes(moved, EXPORT, faint)
    assert not passes(moved, FP16, faint)
    assert passes(moved, BF16, faint)
    assert passes(moved, INT8, faint)


def test_samples_without_a_detection_decide_nothing_and_say_so() -> None:
    empty = {name: np.zeros_like(array) for name, array in REFERENCE.items()}
    _, decision = match_detections(DETECTION, empty, empty, INT8)
    assert decision.within(INT8)
    assert "not judged" in str(decision)
    assert list(detection_controls(DETECTION, empty, EXPORT)) == []
    assert not passes(REFERENCE, INT8, empty)
    assert not passes(REFERENCE, EXPORT, empty)


def test_outputs_that_are_no_detections_are_left_to_the_numbers() -> None:
    assert can_match(DETECTION, REFERENCE, REFERENCE)
    assert not can_match(DETECTION, REFERENCE, {**REFERENCE, "counts": REFERENCE["counts"] + np.int32(9)})
    assert not can_match(DETECTION, REFERENCE, {**REFERENCE, "boxes": REFERENCE["boxes"][:, :2]})
    assert not can_match(DETECTION, REFERENCE, {name: array for name, array in REFERENCE.items() if name != "boxes"})


class TestUndecided:
    def full(self, *scores: float) -> dict[str, AnyArray]:
        """Lists without an empty row; the scores are those of the rows."""
        outputs = detector_outputs(objects=6)
        outputs["scores"][:] = np.float32(scores)
        return outputs

    def test_nothing_on_any_image(self) -> None:
        empty = {name: np.zeros_like(array) for name, array in REFERENCE.items()}
        assert "nothing is detected" in why_undecided(DETECTION, empty, EXPORT)
        one = {**empty, "counts": np.array([0, 1, 0], np.int32)}
        assert why_undecided(DETECTION, one, EXPORT) == ""

    def test_full_lists_of_nearly_equal_scores(self) -> None:
        tied = self.full(*np.linspace(0.01, 0.010001, 6))
        assert "on 3 of 3 samples all of the 6 detections" in why_undecided(DETECTION, tied, EXPORT)
        assert why_undecided(DETECTION, self.full(0.9, 0.5, 0.4, 0.3, 0.2, 0.1), EXPORT) == ""
