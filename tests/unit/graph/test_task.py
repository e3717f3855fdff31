"""Tasks, labels and rankings: parsed, checked against a graph, and ranked."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from graphkiln_backend.graph.decoding import decode, encode, encode_json
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import InvalidInput, ManifestError
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.signature import ANY_RANK, Dim, Signature, TensorSpec
from graphkiln_backend.graph.task import (
    Classification,
    Detection,
    Embedding,
    Ranking,
    Segmentation,
    Task,
    check_count,
    check_task,
    count_classes,
    is_classification,
    labels_text,
    output_names,
    read_labels,
    read_task,
    rename_outputs,
    softmax,
    top_k,
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
def test_tasks_round_trip(task: Task) -> None:
    assert read_task(encode_json(task)) == task


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the task is not JSON"),
        ("[]", "'task' must be an object"),
        ("{}", "'task.kind' must be one of 'classification', 'detection', 'segmentation', 'embedding', got None"),
        ('{"kind": "detector"}', "'task.kind' must be one of"),
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
def test_invalid_tasks(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        read_task(text)
    assert message in str(caught.value)


def test_manifest_without_task_is_written_as_before(digits_manifest: Manifest) -> None:
    assert "task" not in encode(digits_manifest)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_task_in_a_manifest(digits_manifest: Manifest, task: Task) -> None:
    document = {**encode(digits_manifest), "task": encode(task)}
    assert decode(Manifest, json.loads(json.dumps(document))).task == task


def test_is_classification() -> None:
    assert is_classification(None)
    assert [is_classification(task) for task in TASKS] == [True, False, False, False, False, False]


def test_output_names() -> None:
    assert [output_names(task) for task in TASKS] == [
        (),
        ("b", "s", "c", "n", "m", "k"),
        ("b", "s", "c", "n"),
        ("s",),
        ("c",),
        ("v",),
    ]


def test_rename_outputs() -> None:
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
    def test_graphs_that_fit(self, task: Task | None, signature: Signature) -> None:
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
    def test_graphs_that_do_not_fit(self, task: Task | None, signature: Signature, message: str) -> None:
        with pytest.raises(ManifestError) as caught:
            check_task(task, ("a", "b"), signature, "here")
        assert message in str(caught.value)


# Labels files.


def signature(*shape: Dim) -> Signature:
    return Signature(inputs=(), outputs=(TensorSpec(name="y", dtype=DType.FP32, shape=shape),))


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        (b"", ()),
        (b"a", ("a",)),
        (b"a\nb\n", ("a", "b")),
        (b"a\r\nb\r\n", ("a", "b")),
        (b"a\n\nb\n", ("a", "", "b")),
        (b"a\n\n", ("a", "")),
        (b"\xef\xbb\xbfa\n", ("a",)),
        ("a\x0cb\u2028c\n".encode(), ("a\x0cb\u2028c",)),  # str.splitlines would make three of it
    ],
)
def test_read_labels(tmp_path: Path, content: bytes, labels: tuple[str, ...]) -> None:
    (tmp_path / "labels.txt").write_bytes(content)
    assert read_labels(tmp_path / "labels.txt") == labels


@pytest.mark.parametrize("labels", [(), ("a",), ("a", ""), ("", ""), ("größe", "a b", "a:b")])
def test_labels_round_trip(tmp_path: Path, labels: tuple[str, ...]) -> None:
    (tmp_path / "labels.txt").write_text(labels_text(labels))
    assert read_labels(tmp_path / "labels.txt") == labels


@pytest.mark.parametrize("label", ["a\nb", "a\r", "\x00", "a\u2028b", "\x1b[1m"])
def test_labels_with_control_characters(label: str) -> None:
    with pytest.raises(ManifestError, match="label of class 1 holds a control character"):
        labels_text(["a", label])


def test_unreadable_labels(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        read_labels(tmp_path / "labels.txt")
    for content, fault in (
        ("café".encode("latin-1"), "not UTF-8"),
        ("café".encode("utf-16"), "not UTF-8"),
        ("cat\ndog".encode("utf-16-le"), r"line 1 is 'c\\x00"),
        (b"cat\rdog\r", r"line 1 is 'cat\\rdog"),
    ):
        (tmp_path / "labels.txt").write_bytes(content)
        with pytest.raises(ManifestError, match=fault) as caught:
            read_labels(tmp_path / "labels.txt")
        assert "UTF-8" in caught.value.hint
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ManifestError, match="it is a pipe"):
        read_labels(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("shape", "classes"),
    [(("batch", 3), 3), ((1, 3), 3), (("batch",), None), (("batch", "n"), None), (("batch", 3, 8, 8), None)],
)
def test_count_classes(shape: tuple[Dim, ...], classes: int | None) -> None:
    assert count_classes(signature(*shape)) == classes


def test_check_count() -> None:
    check_count(("a", "b"), signature("batch", 2), "f")
    check_count((), signature("batch", 2), "f")
    check_count(("a", "b", "c"), signature("batch", "n"), "f")
    assert count_classes(Signature(inputs=(), outputs=())) is None
    for labels in (("a",), ("a", "b", "c")):
        with pytest.raises(ManifestError, match=f"f has {len(labels)} labels, but output 'y' has 2 classes"):
            check_count(labels, signature("batch", 2), "f")


# The ranking that a graph publishes.

RANKING = Ranking(scores="s", indices="i", labels=("a", "b", "c", "d"))


def test_ranking_round_trip() -> None:
    assert Ranking.from_json(RANKING.to_json()) == RANKING


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the ranking is not JSON"),
        ('{"scores": "s"}', "missing key 'ranking.indices'"),
        ('{"scores": "s", "indices": "i", "labels": [1]}', "'ranking.labels[0]' must be a value of type str"),
        ('{"scores": "s", "indices": "i", "label": []}', "unknown key 'ranking.label' (did you mean 'labels'?)"),
    ],
)
def test_invalid_rankings(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Ranking.from_json(text)
    assert message in str(caught.value)


# The order of classes: scores, ties, NaN and infinities, of every type and rank.

DTYPES = [np.bool_, np.uint8, np.uint64, np.int8, np.int64, np.float16, np.float32, np.float64]


def reference(row: Any, k: int) -> list[int]:
    """By Python's own sort: NaN last, then higher first, then lower index."""

    def key(index: int) -> tuple[bool, Any, int]:
        value = row[index].item()
        is_nan = isinstance(value, float) and math.isnan(value)
        return is_nan, 0 if is_nan else -value, index

    return sorted(range(len(row)), key=key)[:k]


@st.composite
def scores(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(arrays.array_shapes(min_dims=1, max_dims=4, max_side=6))
    elements = arrays.from_dtype(dtype, allow_nan=True, allow_infinity=True)
    few = draw(st.lists(elements, min_size=1, max_size=4))  # so that ties are common
    return draw(arrays.arrays(dtype, shape, elements=st.sampled_from(few), fill=st.nothing()))


@given(values=scores(), k=st.integers(1, 8))
def test_top_k_equals_a_plain_sort(values: Any, k: int) -> None:
    indices, best = top_k(values, k)
    assert best.dtype == values.dtype
    for place in np.ndindex(values.shape[:-1]):
        expected = reference(values[place], k)
        assert indices[place].tolist() == expected
        np.testing.assert_array_equal(best[place], values[place][expected])


@given(values=arrays.arrays(np.float32, st.integers(1, 300), elements=st.integers(-3, 3) | st.just(math.nan)))
def test_top_k_of_many_classes(values: Any) -> None:
    assert top_k(values, 5)[0].tolist() == reference(values, 5)


def test_top_k_of_extreme_integers() -> None:
    assert top_k(np.array([-128, 127, 0], np.int8), 3)[0].tolist() == [1, 2, 0]
    assert top_k(np.array([-(2**63), 2**63 - 1]), 2)[0].tolist() == [1, 0]
    assert top_k(np.array([2**64 - 1, 0, 2**64 - 2], np.uint64), 3)[0].tolist() == [0, 2, 1]


def test_top_k_of_bfloat16() -> None:
    values = np.array([1, math.nan, 3, -math.inf, 3], ml_dtypes.bfloat16)
    assert top_k(values, 5)[0].tolist() == [2, 4, 0, 3, 1]


def test_top_k_above_the_number_of_classes() -> None:
    assert top_k(np.arange(3), 10**9)[0].tolist() == [2, 1, 0]


@pytest.mark.parametrize(("values", "k"), [(np.arange(3), 0), (np.array(1.0), 1), (np.array([b"a"], object), 1)])
def test_values_that_cannot_be_ranked(values: Any, k: int) -> None:
    with pytest.raises(InvalidInput):
        top_k(values, k)


class TestSoftmax:
    @given(arrays.arrays(np.float32, (2, 7), elements=st.floats(-1e4, 1e4, width=32)))
    def test_softmax_is_a_distribution(self, values: Any) -> None:
        probabilities = softmax(values)
        np.testing.assert_allclose(probabilities.sum(-1), 1)
        np.testing.assert_array_equal(np.sort(values.argsort(-1, kind="stable")), np.sort(probabilities.argsort(-1)))

    def test_softmax_of_infinities(self) -> None:
        assert softmax(np.array([0.0, -math.inf])).tolist() == [1, 0]
        for undefined in ([math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 1.0]):
            assert np.isnan(softmax(np.array(undefined))).any()

    def test_softmax_by_the_formula(self) -> None:
        values = np.array([1.0, 2.0, 3.0])
        expected = [math.exp(v) / sum(map(math.exp, values)) for v in values]
        np.testing.assert_allclose(softmax(values), expected)
