"""Ragged batches: requests of different lengths, and the inputs that describe them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fake_session import FakeSession, Feeds, spec
from fake_triton import InferenceRequest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError, SignatureError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.repository.batch_tensors import BatchInput, BatchInputKind, BatchOutput, BatchTensors
from graphkiln_backend.triton.executor import Result
from graphkiln_backend.triton.ragged import RaggedExecutor, form_batch, split_outputs


def array(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def describe(kind: BatchInputKind, dtype: DType = DType.INT32) -> BatchInput:
    return BatchInput(kind=kind, targets=("n",), dtype=dtype, source="x")


COUNT = describe(BatchInputKind.ELEMENT_COUNT, DType.FP32)
TENSORS = BatchTensors(ragged={"x": 2}, inputs=(COUNT,), outputs={"y": BatchOutput(source="x", shape=(-1, -1))})


SIGNATURE = Signature(
    inputs=(spec("x", "total"), spec("n", "rows"), spec("bias", "rows", 2)),
    outputs=(spec("y", "total"), spec("count", "rows", 1)),
)


def compute(feeds: Feeds) -> dict[str, np.ndarray]:
    """Compute `y = 2 x` and the number of elements of each request; fail for 13."""
    if (feeds["x"] == 13).any():
        raise ExecutionError("thirteen")
    return {"y": feeds["x"] * 2, "count": feeds["n"][:, None]}


def request(length: int, *outputs: str, guarded: bool = False, feeds: Feeds | None = None) -> InferenceRequest:
    x = array(1, length)
    x, bias = (x[:, None], array(1, 1, 2)) if guarded else (x, array(1, 2))
    return InferenceRequest({"x": x, "bias": bias, **(feeds or {})}, outputs or ("y", "count"))


def executor(session: FakeSession, *, guarded: bool = False) -> RaggedExecutor:
    return RaggedExecutor(session, TENSORS, input_ranks={"x": 2 + guarded, "bias": 2 + guarded})


def check(result: Result, length: int) -> None:
    assert isinstance(result, dict), result
    np.testing.assert_array_equal(result["y"], array(1, length) * 2)
    np.testing.assert_array_equal(result["count"], [[length]])


@pytest.mark.parametrize("guarded", [False, True])
class TestExecutor:
    def test_single_request(self, guarded: bool) -> None:
        session = FakeSession(SIGNATURE, compute)
        check(executor(session, guarded=guarded).execute(request(3, guarded=guarded)), 3)
        assert session.feeds[0]["x"].shape == (3,)

    def test_requests_of_different_lengths_share_a_run(self, guarded: bool) -> None:
        session = FakeSession(SIGNATURE, compute)
        served = executor(session, guarded=guarded)
        lengths = (3, 5, 0, 1)
        results = served.execute_batch([request(length, guarded=guarded) for length in lengths])
        for result, length in zip(results, lengths, strict=True):
            check(result, length)
        assert len(session.feeds) == 1
        assert list(served.batch_sizes) == [4]

    def test_failed_request_does_not_affect_others(self, guarded: bool) -> None:
        results = executor(FakeSession(SIGNATURE, compute), guarded=guarded).execute_batch(
            [request(3, guarded=guarded), request(14, guarded=guarded), request(2, guarded=guarded)]
        )
        check(results[0], 3)
        assert isinstance(results[1], ExecutionError)
        check(results[2], 2)


def test_graph_that_cannot_batch_is_logged(logged: list[str]) -> None:
    def alone(feeds: Feeds) -> dict[str, np.ndarray]:
        if len(feeds["n"]) > 1:
            raise ExecutionError("one at a time")
        return compute(feeds)

    for result, length in zip(
        executor(FakeSession(SIGNATURE, alone)).execute_batch([request(3), request(5)]), (3, 5), strict=True
    ):
        check(result, length)
    assert logged == ["a batch of 2 requests failed, but each of them succeeded alone: one at a time"]


def test_only_requested_outputs_are_computed() -> None:
    results = executor(FakeSession(SIGNATURE, compute)).execute_batch([request(3, "y"), request(2, "count")])
    assert [list(result) for result in results if isinstance(result, dict)] == [["y"], ["count"]]


@pytest.mark.parametrize(
    "feeds",
    [{"x": array(1, 3).astype(np.int32)}, {"x": array(3)}, {"x": array(2, 3)}, {"bias": array(1, 3)}],
    ids=["dtype", "rank", "rows", "other input"],
)
def test_invalid_request_is_refused_alone(feeds: Feeds) -> None:
    good, bad = executor(FakeSession(SIGNATURE, compute)).execute_batch([request(3), request(3, feeds=feeds)])
    check(good, 3)
    assert isinstance(bad, SignatureError)


def test_batch_input_of_wrong_type_is_refused() -> None:
    session = FakeSession(Signature(inputs=SIGNATURE.inputs[:2], outputs=SIGNATURE.outputs), compute)
    tensors = BatchTensors(ragged={"x": 2}, inputs=(describe(BatchInputKind.ELEMENT_COUNT),), outputs={})
    result = RaggedExecutor(session, tensors, input_ranks={"x": 2}).execute(InferenceRequest({"x": array(1, 2)}))
    assert isinstance(result, SignatureError)
    assert "wrong dtype of input 'n'" in str(result)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (BatchInputKind.ELEMENT_COUNT, [6, 4]),
        (BatchInputKind.ACCUMULATED_ELEMENT_COUNT, [6, 10]),
        (BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, [0, 6, 10]),
        (BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE, [0, 0, 0, 0, 0, 0]),
        (BatchInputKind.ITEM_SHAPE, [[3, 1], [3, 1], [2, 2]]),
        (BatchInputKind.ITEM_SHAPE_FLATTEN, [3, 1, 3, 1, 2, 2]),
    ],
)
@pytest.mark.parametrize("dtype", [DType.INT32, DType.FP32])
def test_kinds_of_batch_input(kind: BatchInputKind, expected: list[object], dtype: DType) -> None:
    """The requests of Triton's documentation: two rows of [3, 1], and one row of [2, 2]."""
    tensors = BatchTensors(ragged={"x": 3}, inputs=(describe(kind, dtype),))
    batch = form_batch([{"x": array(2, 3, 1)}, {"x": array(1, 2, 2)}], tensors)
    assert batch["n"].dtype == dtype.numpy
    np.testing.assert_array_equal(batch["n"], expected)
    np.testing.assert_array_equal(batch["x"], [0, 1, 2, 3, 4, 5, 0, 1, 2, 3])


class TestSharingOut:
    REQUESTS: Sequence[Feeds] = ({"x": array(2, 3)}, {"x": array(1, 1)})

    def test_output_is_split_by_the_shape_of_the_input(self) -> None:
        first, second = split_outputs({"y": array(7)}, self.REQUESTS, TENSORS)
        np.testing.assert_array_equal(first["y"], [[0, 1, 2], [3, 4, 5]])
        np.testing.assert_array_equal(second["y"], [[6]])

    def test_fixed_sizes_of_batch_outputs(self) -> None:
        tensors = BatchTensors(outputs={"y": BatchOutput(source="x", shape=(-1, 4))})
        parts = split_outputs({"y": array(3, 4)}, self.REQUESTS, tensors)
        assert [part["y"].shape for part in parts] == [(2, 4), (1, 4)]

    def test_surplus_rows_are_dropped(self) -> None:
        parts = split_outputs({"count": array(4, 1)}, self.REQUESTS, TENSORS)
        assert [part["count"].tolist() for part in parts] == [[[0], [1]], [[2]]]

    @pytest.mark.parametrize(
        "outputs", [{"y": array(6)}, {"y": array(8)}, {"count": array(2, 1)}, {"count": np.float32(1)}]
    )
    def test_wrong_number_of_elements_is_refused(self, outputs: Feeds) -> None:
        with pytest.raises(ExecutionError, match="write a batch_output for it"):
            split_outputs(outputs, self.REQUESTS, TENSORS)

    def test_output_with_more_dimensions_than_its_input_is_refused(self) -> None:
        tensors = BatchTensors(outputs={"y": BatchOutput(source="x", shape=(-1, -1, -1))})
        with pytest.raises(ExecutionError, match="more dimensions"):
            split_outputs({"y": array(7)}, self.REQUESTS, tensors)
