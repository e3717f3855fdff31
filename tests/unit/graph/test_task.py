"""Tasks: written and read, checked against the outputs of a graph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphkiln_backend.graph.decoding import decode, encode, encode_json
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.signature import ANY_RANK, Dim, Signature, TensorSpec
from graphkiln_backend.graph.task import (
    Classification,
    Detection,
    Embedding,
    Segmentation,
    Task,
    check_task,
    is_classification,
    output_names,
    read_task,
    rename_outputs,
)

DETECTION = Detection(boxes="b", scores="s", classes="c", counts="n", masks="m", keypoints="k", score_threshold=0.25)
TASKS: list[Task] = [
    Classification(),
    DETECTION,
    Detection(boxes="b", scores="s", classes="c", counts="n", mask_frame="image"),
    Segmentation(scores="s"),
    Segmentation(classes="c"),
    Embedding(vectors="v", normalize=True),
]
N = "batch"


@pytest.fixture
def digits_manifest(digits: Path) -> Manifest:
    return Manifest.read(digits / "1" / "manifest.json")


def graph(**outputs: tuple[DType, tuple[Dim, ...]]) -> Signature:
    specs = tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in outputs.items())
    return Signature(inputs=(TensorSpec(name="x", dtype=DType.FP32, shape=(N, 3, 8, 8)),), outputs=specs)


def detector(**changes: tuple[DType, tuple[Dim, ...]]) -> Signature:
    outputs: dict[str, tuple[DType, tuple[Dim, ...]]] = {
        "b": (DType.FP32, (N, 5, 4)),
        "s": (DType.FP32, (N, 5)),
        "c": (DType.INT64, (N, 5)),
        "n": (DType.INT32, (N,)),
        "m": (DType.FP32, (N, 5, 28, 28)),
        "k": (DType.FP32, (N, 5, 17, 3)),
    }
    return graph(**{**outputs, **changes})


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_is_read_as_it_was_published(task: Task) -> None:
    assert read_task(encode_json(task)) == task


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the task is not JSON"),
        ("[]", "'task' must be an object"),
        ("{}", "'task.kind' must be one of 'classification', 'detection', 'segmentation', 'embedding', got None"),
        ('{"kind": "detector"}', "'task.kind' must be one of"),
        ('{"kind": ["detection"]}', "'task.kind' must be one of"),
        ('{"kind": "embedding"}', "missing key 'task.vectors'"),
        ('{"kind": "embedding", "vectors": "v", "normalise": true}', "(did you mean 'normalize'?)"),
        ('{"kind": "segmentation"}', "either its scores or its classes"),
        ('{"kind": "segmentation", "scores": "s", "classes": "c"}', "either its scores or its classes"),
        (
            '{"kind":"detection","boxes":"b","scores":"s","classes":"c","counts":"n","score_threshold":2}',
            "from 0 to 1, got 2",
        ),
        ('{"kind":"detection","boxes":"b","scores":"s","classes":"c","counts":"n","mask_frame":"x"}', "'box'"),
    ],
)
def test_a_bad_key_is_named(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        read_task(text)
    assert message in str(caught.value)


def test_a_manifest_without_a_task_is_written_as_before(digits_manifest: Manifest) -> None:
    assert "task" not in encode(digits_manifest)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_a_manifest_keeps_it(digits_manifest: Manifest, task: Task) -> None:
    document = {**encode(digits_manifest), "task": encode(task)}
    assert decode(Manifest, json.loads(json.dumps(document))).task == task


def test_what_is_classified() -> None:
    assert is_classification(None)
    assert [is_classification(task) for task in TASKS] == [True, False, False, False, False, False]


def test_the_outputs_by_name() -> None:
    assert [output_names(task) for task in TASKS] == [
        (),
        ("b", "s", "c", "n", "m", "k"),
        ("b", "s", "c", "n"),
        ("s",),
        ("c",),
        ("v",),
    ]


def test_outputs_that_were_renamed() -> None:
    renamed = rename_outputs(DETECTION, {"b": "boxes", "k": "points", "x": "y"})
    assert output_names(renamed) == ("boxes", "s", "c", "n", "m", "points")
    assert renamed.score_threshold == 0.25


class TestCheck:
    @pytest.mark.parametrize(
        ("task", "signature"),
        [
            (None, graph(y=(DType.FP32, (N, 2)))),
            (DETECTION, detector()),
            (DETECTION, detector(b=(DType.FP16, (ANY_RANK,)), c=(DType.INT32, (N, "d")))),
            (Segmentation(scores="s"), graph(s=(DType.FP32, (N, 2, 4, 4)))),
            (Segmentation(scores="s"), graph(s=(DType.FP32, (ANY_RANK,)))),
            (Segmentation(classes="s"), graph(s=(DType.UINT8, (N, 8, 8)))),
            (Embedding(vectors="v"), graph(v=(DType.FP32, (N, 512)))),
        ],
        ids=str,
    )
    def test_what_fits(self, task: Task | None, signature: Signature) -> None:
        check_task(task, ("a", "b"), signature, "here")

    @pytest.mark.parametrize(
        ("task", "signature", "message"),
        [
            (None, graph(y=(DType.FP32, (N, 3))), "here has 2 labels, but output 'y' has 3 classes"),
            (DETECTION, graph(b=(DType.FP32, (N, 5, 4))), "'task.scores' names the output 's', which"),
            (DETECTION, detector(b=(DType.FP32, (N, 5, 5))), "'task.boxes' must name FP32 or FP16 or BF16 of 3"),
            (DETECTION, detector(b=(DType.FP32, (5, 4))), "'task.boxes' must name"),
            (DETECTION, detector(c=(DType.FP32, (N, 5))), "'task.classes' must name INT64 or INT32 of 2 dimensions"),
            (DETECTION, detector(k=(DType.FP32, (N, 5, 17, 2))), "3 in the last"),
            (Segmentation(scores="s"), graph(s=(DType.FP32, (N, 3, 4, 4))), "here has 2 labels, but output 's' has 3"),
            (Segmentation(classes="s"), graph(s=(DType.FP32, (N, 4, 4))), "INT64 or INT32 or UINT8"),
            (Embedding(vectors="v"), graph(v=(DType.FP32, (N, 4, 4))), "of 2 dimensions, got v FP32[batch,4,4]"),
        ],
        ids=str,
    )
    def test_what_does_not(self, task: Task | None, signature: Signature, message: str) -> None:
        with pytest.raises(ManifestError) as caught:
            check_task(task, ("a", "b"), signature, "here")
        assert message in str(caught.value)
