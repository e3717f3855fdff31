"""Pixels of the same class: counted, with near ties named, and a map that moved refused."""

from __future__ import annotations

import numpy as np
import pytest
from task_outputs import SEGMENTATION, segmenter_outputs

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.task import Segmentation
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import BF16, EXPORT, FP16, INT8, OTHER_ENGINE, Limits
from graphkiln_backend.proof.tasks import class_map, decide_pixels, output_of, pixel_controls

MAPS = segmenter_outputs()
TASKS = {"scores": (SEGMENTATION, MAPS), "classes": (Segmentation(classes="maps"), {"maps": MAPS["maps"].argmax(1)})}


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("limits", [EXPORT, OTHER_ENGINE, FP16, BF16, INT8])
def test_equal_maps_pass_and_each_control_is_refused(kind: str, limits: Limits) -> None:
    task, outputs = TASKS[kind]
    assert output_of(task) == "maps"
    assert decide_pixels(task, outputs, outputs, limits, noise=0).within(limits)
    controls = dict(pixel_controls(task, outputs, limits))
    assert len(controls) == 2
    passed = [
        change
        for change, changed in controls.items()
        if decide_pixels(task, outputs, changed, limits, noise=0).within(limits)
    ]
    assert passed == []


def test_a_pixel_that_less_than_the_noise_decides_is_a_near_tie() -> None:
    close = {"maps": MAPS["maps"].copy()}
    close["maps"][:, 1, 0, :] = 1.0 - 1e-6
    turned = {"maps": MAPS["maps"].copy()}
    turned["maps"][:, 1, 0, :] = 1.0 + 1e-6
    decision = decide_pixels(SEGMENTATION, close, turned, FP16, noise=1e-5)
    assert (decision.near_ties, decision.agreeing) == (64, decision.total)
    assert decide_pixels(SEGMENTATION, close, turned, FP16, noise=1e-8).agreeing == decision.total - 64


def with_a_pixel(*scores: float) -> dict[str, AnyArray]:
    """The maps, with one pixel of the background that has other scores."""
    maps = MAPS["maps"].copy()
    maps[0, :, 0, 0] = scores
    return {"maps": maps}


NEARLY = with_a_pixel(1.0, 1.0 - 1e-6, -1.0)


def test_in_fp32_what_differs_by_as_little_as_the_numbers_do_is_a_near_tie() -> None:
    """MaskFormer with random weights: the numbers agree within 1.2e-6, and two pixels differ that less decides."""
    turned = with_a_pixel(1.0 - 2e-6, 1.0, -1.0)
    verdict = prove(NEARLY, turned, EXPORT, batch_sizes=(1,), reading=SEGMENTATION).verdict
    assert "2048/2048 (>= 99.8% at 95%), 1 near ties, which a difference of 1e-06 decides" in verdict


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (with_a_pixel(1.0, 0.999, -1.0), with_a_pixel(0.999, 1.0, -1.0)),  # by more than numbers may differ
        (with_a_pixel(1.0, 0.999, -1.0), with_a_pixel(0.0, 5.0, -1.0)),  # a large difference excuses nothing
        (NEARLY, with_a_pixel(0.0, 0.0, 5.0)),  # a class that was never near, where two others are
        (NEARLY, with_a_pixel(1.0, np.inf, -1.0)),
    ],
)
def test_a_fault_of_one_pixel_is_no_near_tie(expected: dict[str, AnyArray], found: dict[str, AnyArray]) -> None:
    decision = decide_pixels(SEGMENTATION, expected, found, EXPORT, noise=0)
    assert (decision.near_ties, decision.within(EXPORT)) == (0, False)


def test_a_fault_where_classes_are_nearly_tied_is_told_by_the_numbers() -> None:
    with pytest.raises(VerificationError, match="worst element"):
        prove(NEARLY, with_a_pixel(0.0, 5.0, -1.0), EXPORT, batch_sizes=(1,), reading=SEGMENTATION)


def test_a_map_of_one_class_decides_nothing_in_coarse_rows() -> None:
    plain = {"maps": np.zeros((1, 2, 8, 8), np.float32)}
    plain["maps"][:, 0] = 1
    assert class_map(SEGMENTATION, plain).shape == (1, 8, 8)
    assert "not judged" in str(decide_pixels(SEGMENTATION, plain, plain, INT8, noise=0))
    assert list(pixel_controls(SEGMENTATION, plain, INT8)) == []
