"""Grouping, joining and splitting requests: what goes in comes out, row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.triton.executor import Concatenator, group_by_shape, split_batch

shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=12)


def request(number: int, rows: int, width: int) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, width), number, np.float32), "n": np.full((rows,), number, np.int64)}


@given(shapes)
def test_every_request_gets_its_own_rows_back(sizes: list[tuple[int, int]]) -> None:
    requests = [request(number, *size) for number, size in enumerate(sizes)]
    concatenator = Concatenator()
    results: dict[int, dict[str, np.ndarray]] = {}
    for group in group_by_shape(requests):
        members = [requests[i] for i in group]
        joined = concatenator.concatenate(members)
        rows = [len(member["x"]) for member in members]
        outputs = {name: array * 2 for name, array in joined.items()}
        results.update(zip(group, split_batch(outputs, rows), strict=True))
    assert sorted(results) == list(range(len(requests)))
    for number, sent in enumerate(requests):
        for name in sent:
            np.testing.assert_array_equal(results[number][name], sent[name] * 2)
            assert results[number][name].dtype == sent[name].dtype


@given(shapes)
def test_groups_hold_equal_shapes_and_keep_the_order(sizes: list[tuple[int, int]]) -> None:
    groups = group_by_shape([request(0, *size) for size in sizes])
    for group in groups:
        assert len({sizes[i][1] for i in group}) == 1
        assert group == sorted(group)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)


def test_a_single_request_is_not_copied() -> None:
    single = request(1, 2, 3)
    assert Concatenator().concatenate([single]) is single


def test_the_buffer_is_used_again() -> None:
    concatenator = Concatenator()
    large = concatenator.concatenate([request(1, 3, 4), request(2, 3, 4)])["x"]
    small = concatenator.concatenate([request(3, 1, 4), request(4, 1, 4)])["x"]
    assert np.shares_memory(large, small)
    np.testing.assert_array_equal(small, [[3.0] * 4, [4.0] * 4])


def test_strings_are_joined_too() -> None:
    words = [{"w": np.array([b"a"], np.object_)}, {"w": np.array([b"long word", b""], np.object_)}]
    assert Concatenator().concatenate(words)["w"].tolist() == [b"a", b"long word", b""]


@pytest.mark.parametrize("shape", [(1, 4), (4, 4), (3,), ()])
def test_an_output_without_the_batchs_rows_is_never_cut(shape: tuple[int, ...]) -> None:
    if shape == (3,):
        assert len(split_batch({"y": np.zeros(shape)}, [1, 2])) == 2
        return
    with pytest.raises(ExecutionError, match="for a batch of 3 rows"):
        split_batch({"y": np.zeros(shape)}, [1, 2])
