"""Batches, answers and errors with a fake session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scored_images import SIDE, SPEC, FakeSession, gray, grays, row

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.graph.task import Embedding
from graphkiln_backend.scoring import scorer as module
from graphkiln_backend.scoring.encoders import Encoder, Size, all_scores, best_classes, raw_outputs, vectors
from graphkiln_backend.scoring.errors import InputChanged, ScoringError
from graphkiln_backend.scoring.messages import Row
from graphkiln_backend.scoring.reading import Reader
from graphkiln_backend.scoring.scorer import Answers, ImageInput, Scorer, StageTimes


def wrong() -> None:
    raise ExecutionError("the session computes something else")


@contextmanager
def scorer(
    session: FakeSession,
    batch_size: int = 4,
    outputs: Sequence[str] = ("mean",),
    preprocess: Preprocess = SPEC,
    check: Callable[[], None] = lambda: None,
    *,
    encoder: Encoder | None = None,
) -> Iterator[Scorer]:
    image_input = ImageInput.of(session.signature, SPEC, batch_size if session.batched else 0)
    specs = image_input.signature_of_rows(session.signature).outputs
    with Scorer(
        session,
        Reader(preprocess, 2),
        image_input=image_input,
        encoder=encoder or raw_outputs([spec for spec in specs if spec.name in outputs]),
        batch_size=batch_size,
        model=("means", 7),
        check=check,
    ) as opened:
        yield opened


def means(rows: Sequence[Row], opened: Scorer) -> list[object]:
    found = opened.answer(rows).table.column("mean").to_pylist()
    return [one and one[0] for one in found]


def test_rows_are_answered_in_order() -> None:
    session = FakeSession()
    with scorer(session) as opened:
        table = opened.answer(grays(range(10))).table
    assert table.column("id").to_pylist() == [str(number) for number in range(10)]
    assert table.column("mean").to_pylist() == [[number] for number in range(10)]
    assert table.column("error").null_count == 10
    assert session.batches == [4, 4, 2]
    assert set(table.column("model").to_pylist()) == {"means"}
    assert set(table.column("version").to_pylist()) == {7}


def test_only_written_outputs_are_requested() -> None:
    session = FakeSession()
    with scorer(session, outputs=("square",)) as opened:
        assert opened.answer(grays([3])).table.column("square").to_pylist() == [[9]]
    assert session.requested == [("square",)]


def test_rows_with_errors_take_no_place_in_a_batch() -> None:
    session = FakeSession()
    rows = [row("bad", b"no image"), *grays([1, 2]), row("worse", OSError("disk")), *grays([3, 4])]
    with scorer(session) as opened:
        scored = opened.answer(rows)
    assert session.batches == [4]
    assert scored.table.column("mean").to_pylist() == [None, [1], [2], None, [3], [4]]
    assert [bool(error) for error in scored.table.column("error").to_pylist()] == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]


def test_rows_without_a_batch_dimension_are_computed_one_by_one() -> None:
    session = FakeSession(batched=False)
    with scorer(session, batch_size=1) as opened:
        assert means(grays([1, 2, 3]), opened) == [1, 2, 3]
    assert session.batches == [1, 1, 1]


def test_empty_unit_has_the_same_columns() -> None:
    with scorer(FakeSession()) as opened:
        none, some = opened.answer([]).table, opened.answer(grays([1])).table
    assert none.schema == some.schema
    assert len(none) == 0


def encode_sizes(outputs: Mapping[str, AnyArray], sizes: Sequence[Size]) -> list[pa.Array]:
    """Write the size of each image beside its mean."""
    columns = (outputs["mean"][:, 0].tolist(), [list(size) for size in sizes])
    return [pa.array(values, kind) for values, kind in zip(columns, SIZES.types, strict=True)]


SIZES = pa.schema([pa.field("mean", pa.float32()), pa.field("size", pa.list_(pa.int32()))])


@pytest.mark.parametrize("fails_on", [-1, 2])
def test_image_size_stays_with_its_row(fails_on: int) -> None:
    rows = [row("1", gray(1, (9, 5))), row("bad", b"no image"), row("2", gray(2, (7, 4))), row("3", gray(3, (8, 6)))]
    with scorer(FakeSession(fails_on), encoder=Encoder(SIZES, ("mean",), encode_sizes)) as opened:
        table = opened.answer(rows).table
    second = (None, None) if fails_on == 2 else (2, [4, 7])
    assert table.column("mean").to_pylist() == [1, None, second[0], 3]
    assert table.column("size").to_pylist() == [[5, 9], None, second[1], [6, 8]]


class TestFailures:
    def test_failing_row_does_not_affect_others(self) -> None:
        with scorer(FakeSession(fails_on=2)) as opened:
            table = opened.answer(grays(range(4))).table
        assert table.column("mean").to_pylist() == [[0], [1], None, [3]]
        assert table.column("error").to_pylist() == [None, None, "cannot compute 2", None]

    def test_failing_row_with_an_unsound_session_raises(self) -> None:
        with (
            scorer(FakeSession(fails_on=2), check=wrong) as opened,
            pytest.raises(ExecutionError, match="something else"),
        ):
            opened.answer(grays([1, 2]))

    def test_unit_is_scored_after_a_changed_one(self) -> None:
        with scorer(FakeSession()) as opened:
            with pytest.raises(InputChanged):
                opened.answer([*grays(range(30)), row("new", InputChanged("changed"))])
            assert means(grays([1]), opened) == [1]
            assert opened._reader.memory.held_bytes == 0


class TestBatches:
    def test_batches_have_one_shape(self) -> None:
        session = FakeSession()
        any_size = Preprocess(color="L", layout="HWC", dtype=DType.UINT8)
        wide = (2 * SIDE, SIDE)
        rows = [*grays([1, 2]), row("3", gray(3, wide)), row("4", gray(4, wide)), *grays([5])]
        with scorer(session, preprocess=any_size) as opened:
            assert means(rows, opened) == [1, 2, 3, 4, 5]
        assert session.batches == [2, 2, 1]

    def test_batches_are_limited_in_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_BATCH_BYTES", 2 * SIDE * SIDE)
        session = FakeSession()
        with scorer(session) as opened:
            assert means(grays(range(5)), opened) == [0, 1, 2, 3, 4]
        assert session.batches == [2, 2, 1]


def test_two_units_share_the_session() -> None:
    session = FakeSession()
    both = threading.Barrier(2, timeout=20)

    def rows(start: int) -> Iterator[Row]:
        both.wait()
        yield from grays(range(start, start + 50))

    with scorer(session) as opened, ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(opened.answer, rows(start)) for start in (0, 100))
        for future, start in ((first, 0), (second, 100)):
            assert future.result().table.column("mean").to_pylist() == [[one] for one in range(start, start + 50)]


def test_stage_times() -> None:
    with scorer(FakeSession()) as opened:
        times = opened.answer(grays(range(50))).times
    taken = (times.read_s, times.decode_s, times.wait_s, times.compute_s, times.encode_s)
    assert all(seconds > 0 for seconds in taken)
    assert times.commit_s == 0
    assert (times + StageTimes(commit_s=2)).commit_s == 2
    assert (times + times).decode_s == 2 * times.decode_s


SCHEMA = pa.schema([pa.field("score", pa.list_(pa.float32(), 2))])


def scores(*rows: list[float]) -> pa.Array:
    return pa.array(rows, SCHEMA.field("score").type)


def ones(*shape: int) -> np.ndarray:
    return np.ones((1, *shape), np.float32)


SPEC_OF_ANSWERS = TensorSpec(name="y", dtype=DType.FP32, shape=("batch", 2, 3))
ENCODERS = [
    (all_scores(replace(SPEC_OF_ANSWERS, shape=("batch", 3))), ones(3)),
    (raw_outputs([SPEC_OF_ANSWERS]), ones(2, 3)),
    (raw_outputs([replace(SPEC_OF_ANSWERS, shape=("batch", "many"))]), ones(4)),
    (best_classes(replace(SPEC_OF_ANSWERS, shape=("batch", 3)), 2), ones(3)),
    (vectors(Embedding(vectors="y"), replace(SPEC_OF_ANSWERS, shape=("batch", 3))), ones(3)),
]


@pytest.mark.parametrize(("encoder", "output"), ENCODERS, ids=["scores", "fixed", "varying", "top", "vector"])
def test_file_with_errors_is_readable(encoder: Encoder, output: np.ndarray, tmp_path: Path) -> None:
    answers = Answers(encoder.schema, "m", 1)
    answers.add_columns(encoder.encode({"y": output}, []))
    answers.add([row("a", b""), row("b", b"")], [None, "broken"])
    pq.write_table(answers.table(), tmp_path / "rows.parquet")
    read = pq.read_table(tmp_path / "rows.parquet")
    assert read.to_pylist() == answers.table().to_pylist()
    assert read.column(1).null_count == 1


def test_kept_columns_keep_their_types() -> None:
    answers = Answers(pa.schema([]), "digits", 1)
    answers.add([row("a", b"", price=pa.nulls(1, pa.decimal128(5, 2)), tag=pa.array(["x"]))], [None])
    table = answers.table()
    assert table.schema.field("price").type == pa.decimal128(5, 2)
    assert table.select(["id", "price", "tag"]).to_pylist() == [{"id": "a", "price": None, "tag": "x"}]


@pytest.mark.parametrize("name", ["id", "score", "error"])
def test_kept_column_named_like_an_output_is_refused(name: str) -> None:
    answers = Answers(SCHEMA, "digits", 1)
    answers.add_columns([scores([1, 2])])
    answers.add([row("a", b"", **{name: pa.array([1])})], [None])
    with pytest.raises(ScoringError, match=f"column '{name}'"):
        answers.table()


RGB = Preprocess(crop=(8, 6))


def signature(*shape: int | str, dtype: DType = DType.FP32) -> Signature:
    output = TensorSpec(name="y", dtype=DType.FP32, shape=(*shape[:-3], 10))
    return Signature(inputs=(TensorSpec(name="x", dtype=dtype, shape=shape),), outputs=(output,))


class TestRefusals:
    @pytest.mark.parametrize(
        ("graph", "spec"),
        [
            (signature("batch", 3, 8, 6, dtype=DType.UINT8), RGB),
            (signature("batch", 3, 8, 8), RGB),
            (signature("batch", 3, 8, 6), Preprocess(resize=(8, 8))),
            (signature("batch", 8, 6, 3), RGB),
            (signature("batch", 10), RGB),
            (signature(4, 3, 8, 6), RGB),
            (signature("batch", 1, 8, 6), Preprocess()),
        ],
    )
    def test_samples_that_do_not_fit_are_refused(self, graph: Signature, spec: Preprocess) -> None:
        with pytest.raises(ScoringError, match="do not fit"):
            ImageInput.of(graph, spec, 0)

    def test_second_input_is_refused(self) -> None:
        (image,) = signature("batch", 3, 8, 6).inputs
        graph = Signature(inputs=(image, replace(image, name="mask")), outputs=())
        with pytest.raises(ScoringError, match=r"one input.*x, mask"):
            ImageInput.of(graph, RGB, 4)

    def test_output_with_another_number_of_rows_is_refused(self) -> None:
        found = ImageInput.of(signature("batch", 3, 8, 6), RGB, 4)
        with pytest.raises(ExecutionError, match=r"shape \[3, 10\] for 2 images"):
            found.rows({"y": np.zeros((3, 10))}, 2)
