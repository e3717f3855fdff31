"""Batches, answers and errors of a session that a test can look into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pyarrow as pa
import pytest
from scored_images import SIDE, SPEC, FakeSession, gray, grays, row

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.scoring import scorer as module
from graphkiln_backend.scoring.encoders import Encoder, Size, raw_outputs
from graphkiln_backend.scoring.errors import InputChanged
from graphkiln_backend.scoring.reading import Reader
from graphkiln_backend.scoring.scorer import Computation, ImageInput, Scorer, StageTimes
from graphkiln_backend.scoring.units import Row


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
    computation = Computation(
        session=session,
        image_input=image_input,
        encoder=encoder or raw_outputs([spec for spec in specs if spec.name in outputs]),
        batch_size=batch_size,
        model="means",
        version=7,
        check=check,
    )
    with Scorer(computation, Reader(preprocess, 2)) as opened:
        yield opened


def means(rows: Sequence[Row], opened: Scorer) -> list[object]:
    found = opened.answer(rows).table.column("mean").to_pylist()
    return [one and one[0] for one in found]


def test_answers_rows_in_their_order() -> None:
    session = FakeSession()
    with scorer(session) as opened:
        table = opened.answer(grays(range(10))).table
    assert table.column("id").to_pylist() == [str(number) for number in range(10)]
    assert table.column("mean").to_pylist() == [[number] for number in range(10)]
    assert table.column("error").null_count == 10
    assert session.batches == [4, 4, 2]
    assert set(table.column("model").to_pylist()) == {"means"}
    assert set(table.column("version").to_pylist()) == {7}


def test_only_what_is_written_is_requested() -> None:
    session = FakeSession()
    with scorer(session, outputs=("square",)) as opened:
        assert opened.answer(grays([3])).table.column("square").to_pylist() == [[9]]
    assert session.requested == [("square",)]


def test_bad_rows_take_no_place_in_a_batch() -> None:
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


def test_without_a_batch_dimension_rows_are_computed_one_by_one() -> None:
    session = FakeSession(batched=False)
    with scorer(session, batch_size=1) as opened:
        assert means(grays([1, 2, 3]), opened) == [1, 2, 3]
    assert session.batches == [1, 1, 1]


def test_no_rows_are_a_table_of_the_same_columns() -> None:
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
def test_the_size_of_each_image_stays_with_its_row(fails_on: int) -> None:
    rows = [row("1", gray(1, (9, 5))), row("bad", b"no image"), row("2", gray(2, (7, 4))), row("3", gray(3, (8, 6)))]
    with scorer(FakeSession(fails_on), encoder=Encoder(SIZES, ("mean",), encode_sizes)) as opened:
        table = opened.answer(rows).table
    second = (None, None) if fails_on == 2 else (2, [4, 7])
    assert table.column("mean").to_pylist() == [1, None, second[0], 3]
    assert table.column("size").to_pylist() == [[5, 9], None, second[1], [6, 8]]


class TestFailures:
    def test_a_row_that_fails_takes_no_other_with_it(self) -> None:
        with scorer(FakeSession(fails_on=2)) as opened:
            table = opened.answer(grays(range(4))).table
        assert table.column("mean").to_pylist() == [[0], [1], None, [3]]
        assert table.column("error").to_pylist() == [None, None, "cannot compute 2", None]

    def test_a_row_that_fails_alone_is_to_blame_where_the_session_is_right(self) -> None:
        with scorer(FakeSession(fails_on=2), batch_size=1) as opened:
            assert opened.answer(grays([2])).table.column("error").to_pylist() == ["cannot compute 2"]

    def test_a_session_that_computes_something_else_is_to_blame_itself(self) -> None:
        with (
            scorer(FakeSession(fails_on=2), check=wrong) as opened,
            pytest.raises(ExecutionError, match="something else"),
        ):
            opened.answer(grays([1, 2]))

    def test_a_unit_whose_input_changed_leaves_the_next_one_alone(self) -> None:
        with scorer(FakeSession()) as opened:
            with pytest.raises(InputChanged):
                opened.answer([*grays(range(30)), row("new", InputChanged("changed"))])
            assert means(grays([1]), opened) == [1]
            assert opened._reader.memory.held_bytes == 0


class TestBatches:
    def test_samples_of_other_shapes_are_computed_apart(self) -> None:
        session = FakeSession()
        any_size = Preprocess(color="L", layout="HWC", dtype=DType.UINT8)
        wide = (2 * SIDE, SIDE)
        rows = [*grays([1, 2]), row("3", gray(3, wide)), row("4", gray(4, wide)), *grays([5])]
        with scorer(session, preprocess=any_size) as opened:
            assert means(rows, opened) == [1, 2, 3, 4, 5]
        assert session.batches == [2, 2, 1]

    def test_large_samples_are_computed_in_smaller_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_BATCH_BYTES", 2 * SIDE * SIDE)
        session = FakeSession()
        with scorer(session) as opened:
            assert means(grays(range(5)), opened) == [0, 1, 2, 3, 4]
        assert session.batches == [2, 2, 1]


def test_two_units_at_a_time_share_the_session() -> None:
    session = FakeSession()
    both = threading.Barrier(2, timeout=20)

    def rows(start: int) -> Iterator[Row]:
        both.wait()
        yield from grays(range(start, start + 50))

    with scorer(session) as opened, ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(opened.answer, rows(start)) for start in (0, 100))
        for future, start in ((first, 0), (second, 100)):
            assert future.result().table.column("mean").to_pylist() == [[one] for one in range(start, start + 50)]


def test_says_what_each_stage_took() -> None:
    with scorer(FakeSession()) as opened:
        times = opened.answer(grays(range(50))).times
    taken = (times.read_s, times.decode_s, times.wait_s, times.compute_s, times.encode_s)
    assert all(seconds > 0 for seconds in taken)
    assert times.commit_s == 0
    assert (times + StageTimes(commit_s=2)).commit_s == 2
    assert (times + times).decode_s == 2 * times.decode_s
