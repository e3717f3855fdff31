"""`prove` judges what users read: each change is refused by the whole proof, and the proof by its own controls."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from task_outputs import DETECTION, EMBEDDING, SEGMENTATION, detector_outputs, embedding_outputs, segmenter_outputs

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.task import Segmentation, Task
from graphkiln_backend.proof import tasks
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import BF16, EXPORT, FP16, INT8, OTHER_ENGINE, Limits
from graphkiln_backend.proof.tasks import Judgment, check_controls

CASES: Mapping[str, tuple[Task, dict[str, AnyArray]]] = {
    "detection": (DETECTION, detector_outputs()),
    "segmentation": (SEGMENTATION, segmenter_outputs()),
    "class map": (Segmentation(classes="maps"), {"maps": segmenter_outputs()["maps"].argmax(axis=1)}),
    "embedding": (EMBEDDING, embedding_outputs()),
}
ROWS = [EXPORT, OTHER_ENGINE, FP16, BF16, INT8]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("limits", ROWS)
def test_equal_outputs_pass_and_the_verdict_says_what_was_judged(case: str, limits: Limits) -> None:
    task, outputs = CASES[case]
    verdict = prove(outputs, outputs, limits, batch_sizes=(1,), reading=task).verdict
    assert ("matched" in verdict) + ("same class" in verdict) + ("cosine" in verdict) == 1
    assert verdict.endswith("PASS")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("limits", ROWS)
def test_the_whole_proof_refuses_each_control(case: str, limits: Limits) -> None:
    task, outputs = CASES[case]
    changes = list(tasks._controls(task, outputs, limits))
    assert changes
    for _, changed in changes:
        with pytest.raises(VerificationError, match="the outputs changed"):
            prove(outputs, changed, limits, batch_sizes=(1,), reading=task)


@pytest.mark.parametrize("case", CASES)
def test_a_proof_that_sees_nothing_is_refused_by_its_controls(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task, outputs = CASES[case]
    monkeypatch.setattr(tasks, "judge", lambda *_arguments, **_options: Judgment(outputs=outputs))
    with pytest.raises(VerificationError, match="cannot tell a changed copy"):
        check_controls(task, outputs, EXPORT)


def test_a_missing_output_is_left_to_the_numbers() -> None:
    task, outputs = CASES["detection"]
    fewer = {name: array for name, array in outputs.items() if name != "counts"}
    with pytest.raises(VerificationError, match="counts: is missing"):
        prove(outputs, fewer, EXPORT, batch_sizes=(1,), reading=task)


def test_scores_of_boxes_are_no_scores_of_classes() -> None:
    task, outputs = CASES["detection"]
    assert "top-1" not in prove(outputs, outputs, INT8, batch_sizes=(1,), reading=task, noise=0.0).verdict
