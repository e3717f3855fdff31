"""Executing requests: validation, batching, retries, requested outputs, cancellation, contracts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fake_session import FakeSession, Feeds, spec
from fake_triton import InferenceRequest, TritonError
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.contract import ContractChanged
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError, GraphkilnError, SignatureError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.triton import executor as module
from graphkiln_backend.triton.executor import (
    Cancelled,
    Concatenator,
    Executor,
    InstanceFault,
    OutOfMemory,
    Refusal,
    Result,
    check_contract,
    split_batch,
)
from graphkiln_backend.triton.responses import to_response

SIGNATURE = Signature(
    inputs=(spec("x", "batch", "width"),), outputs=(spec("y", "batch", "width"), spec("sum", "batch"))
)


def double(feeds: Feeds) -> dict[str, np.ndarray]:
    return {"y": feeds["x"] * 2, "sum": feeds["x"].sum(axis=1)}


def fake_session(
    signature: Signature = SIGNATURE, compute: Callable[[Feeds], dict[str, np.ndarray]] = double
) -> FakeSession:
    return FakeSession(signature, compute)


def rows(*numbers: float, width: int = 2) -> np.ndarray:
    """One row of equal numbers for each number."""
    return np.repeat(np.array(numbers, np.float32)[:, None], width, axis=1)


def request(*numbers: float, width: int = 2, outputs: Sequence[str] = ("y",), cancelled: bool = False):
    return InferenceRequest({"x": rows(*numbers, width=width)}, outputs, cancelled=cancelled)


def check_outputs(result: Result, **expected: np.ndarray) -> None:
    assert isinstance(result, dict), result
    assert list(result) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(result[name], array)


class TestSingleRequest:
    def test_outputs_are_computed(self) -> None:
        check_outputs(Executor(fake_session(), batching=True).execute(request(1, 2)), y=rows(2, 4))

    def test_only_requested_outputs_are_computed_in_order(self) -> None:
        session = fake_session()
        executor = Executor(session, batching=True)
        check_outputs(executor.execute(request(1, outputs=["sum"])), sum=np.array([2.0]))
        check_outputs(executor.execute(request(1, outputs={"sum", "y"})), y=rows(2), sum=np.array([2.0]))
        assert session.outputs == [("sum",), ("y", "sum")]

    @pytest.mark.parametrize(
        ("feeds", "message"),
        [
            ({"x": np.zeros((1, 2), np.float64)}, r"wrong dtype of input 'x': .*got FP64\[1,2\]"),
            ({"x": np.zeros((1, 2, 3), np.float32)}, r"wrong rank of input 'x': .*got FP32\[1,2,3\]"),
            ({"x": np.zeros(2, np.float32)}, r"wrong rank of input 'x'"),
            ({}, r"missing input 'x': .*got no input"),
            ({"x": rows(1), "z": rows(1)}, "unknown input 'z'"),
        ],
        ids=["dtype", "rank", "no batch", "missing", "unknown"],
    )
    def test_invalid_request_is_refused_and_not_run(self, feeds: Feeds, message: str) -> None:
        session = fake_session()
        result = Executor(session, batching=True).execute(InferenceRequest(feeds))
        assert isinstance(result, SignatureError)
        with pytest.raises(SignatureError, match=message):
            raise result
        assert not session.shapes

    def test_engine_error_is_the_result(self) -> None:
        error = ExecutionError("out of memory")

        def fail(_: Feeds) -> dict[str, np.ndarray]:
            raise error

        assert Executor(fake_session(compute=fail), batching=True).execute(request(1)) is error

    def test_unexpected_error_is_the_result_and_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        result = Executor(fake_session(compute=lambda _: {}), batching=True).execute(request(1))
        assert isinstance(result, ExecutionError)
        assert "unexpected KeyError: 'y'" in str(result)
        (record,) = caplog.records
        assert record.exc_info is not None

    def test_out_of_memory_is_the_result(self) -> None:
        def fail(_: Feeds) -> dict[str, np.ndarray]:
            raise MemoryError("Unable to allocate 9 EiB")

        result = Executor(fake_session(compute=fail), batching=True).execute(request(1))
        assert isinstance(result, OutOfMemory)
        assert "9 EiB" in str(result)

    def test_without_batching_the_first_dimension_is_validated(self) -> None:
        signature = Signature(inputs=(spec("x", 2, 2),), outputs=(spec("y", 2, 2),))
        executor = Executor(fake_session(signature), batching=False)
        check_outputs(executor.execute(request(1, 2)), y=rows(2, 4))
        assert isinstance(executor.execute(request(1, 2, 3)), SignatureError)
        assert not executor.batch_sizes


class TestInputs:
    def test_scalar_input(self) -> None:
        signature = Signature(inputs=(spec("x", 2), spec("scale")), outputs=(spec("y", 2),))
        session = fake_session(signature, lambda feeds: {"y": feeds["x"] * feeds["scale"].reshape(())[()]})
        seen: list[tuple[int, ...]] = []
        compute = session.compute
        session.compute = lambda feeds: (seen.append(feeds["scale"].shape), compute(feeds))[1]
        feeds = {"x": np.array([1, 2], np.float32), "scale": np.array([3], np.float32)}
        check_outputs(Executor(session, batching=False).execute(InferenceRequest(feeds)), y=np.array([3.0, 6.0]))
        assert seen == [()]

    def test_optional_input_may_be_omitted(self) -> None:
        signature = Signature(
            inputs=(spec("x", "batch", 2),),
            outputs=(spec("y", "batch", 2),),
            optional_inputs=(spec("bias", 2), spec("scale")),
        )

        def compute(feeds: Feeds) -> dict[str, np.ndarray]:
            return {"y": feeds["x"] * feeds.get("scale", 1) + feeds.get("bias", 0)}

        executor = Executor(fake_session(signature, compute), batching=False)
        check_outputs(executor.execute(request(1)), y=rows(1))
        feeds = {"x": rows(1), "bias": np.array([5, 6], np.float32), "scale": np.array([10], np.float32)}
        check_outputs(executor.execute(InferenceRequest(feeds)), y=np.array([[15, 16]]))

    def test_optional_input_is_validated(self) -> None:
        signature = Signature(
            inputs=(spec("x", "batch", 2),), outputs=(spec("y", "batch", 2),), optional_inputs=(spec("bias", 2),)
        )
        executor = Executor(fake_session(signature), batching=False)
        result = executor.execute(InferenceRequest({"x": rows(1), "bias": np.zeros(3, np.float32)}))
        assert isinstance(result, SignatureError)
        assert "input 'bias'" in str(result)

    def test_symbolic_dimensions_agree_across_inputs(self) -> None:
        signature = Signature(
            inputs=(spec("x", "batch", "width"), spec("mask", "batch", "width")), outputs=(spec("y", "batch", "width"),)
        )
        executor = Executor(fake_session(signature), batching=True)
        feeds = {"x": rows(1, width=3), "mask": rows(1, width=3)}
        check_outputs(executor.execute(InferenceRequest(feeds)), y=rows(2, width=3))
        result = executor.execute(InferenceRequest({**feeds, "mask": rows(1, width=4)}))
        assert isinstance(result, SignatureError)
        assert "'width' is 3 elsewhere" in str(result)

    def test_bf16_input(self) -> None:
        signature = Signature(
            inputs=(spec("x", "batch", 2, dtype=DType.BF16),), outputs=(spec("y", "batch", 2, dtype=DType.BF16),)
        )
        array = rows(1, 2).astype(DType.BF16.numpy)
        result = Executor(fake_session(signature), batching=True).execute(InferenceRequest({"x": array}))
        check_outputs(result, y=array * 2)
        assert result["y"].dtype == DType.BF16.numpy

    def test_scalar_input_with_more_elements_is_refused(self) -> None:
        signature = Signature(inputs=(spec("scale"),), outputs=(spec("y"),))
        result = Executor(fake_session(signature), batching=False).execute(
            InferenceRequest({"scale": np.zeros(2, np.float32)})
        )
        assert isinstance(result, SignatureError)

    def test_inputs_with_different_rows_are_refused(self) -> None:
        """In a batch with a request of opposite row counts, each would get rows of the other."""
        signature = Signature(inputs=(spec("x", "a", 2), spec("z", "b", 2)), outputs=(spec("y", "a", 2),))
        session = fake_session(signature, lambda feeds: {"y": feeds["x"] + feeds["z"]})
        executor = Executor(session, batching=True)
        first, second = executor.execute_batch(
            [InferenceRequest({"x": rows(1, 2), "z": rows(3)}), InferenceRequest({"x": rows(4), "z": rows(5, 6)})]
        )
        assert isinstance(first, SignatureError)
        assert isinstance(second, SignatureError)
        assert not session.shapes


class TestGuard:
    """The dimension of 1 after the batch that `guard_batch` adds to inputs."""

    @pytest.fixture
    def executor(self) -> Executor:
        return Executor(fake_session(), batching=True, input_ranks={"x": 3})

    def test_guard_dimension_is_removed(self, executor: Executor) -> None:
        check_outputs(executor.execute(InferenceRequest({"x": rows(1, 2)[:, None]})), y=rows(2, 4))

    @pytest.mark.parametrize("shape", [(2,), (1, 2), (1, 1), (1, 0), (0,), (1, 1, 2, 1)])
    def test_request_without_batch_is_refused_alone(self, executor: Executor, shape: tuple[int, ...]) -> None:
        requests = [
            InferenceRequest({"x": array}) for array in (rows(1)[:, None], np.ones(shape, np.float32), rows(3)[:, None])
        ]
        first, bad, last = executor.execute_batch(requests)
        check_outputs(first, y=rows(2))
        assert isinstance(bad, SignatureError)
        check_outputs(last, y=rows(6))

    def test_equal_ranks_have_no_guard_dimension(self) -> None:
        executor = Executor(fake_session(), batching=True, input_ranks={"x": 2})
        check_outputs(executor.execute(request(1)), y=rows(2))


class TestValidShapes:
    @pytest.fixture
    def checks(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of every validation."""
        seen: list[dict[str, tuple[int, ...]]] = []
        check = Signature.check

        def record(signature: Signature, feeds: Feeds) -> None:
            seen.append({name: array.shape for name, array in feeds.items()})
            check(signature, feeds)

        monkeypatch.setattr(Signature, "check", record)
        return seen

    def test_known_shape_of_another_type_is_validated(self, checks: list[object]) -> None:
        executor = Executor(fake_session(), batching=True)
        executor.execute(request(1))
        assert isinstance(executor.execute(InferenceRequest({"x": np.zeros((1, 2), np.int32)})), SignatureError)
        assert len(checks) == 2

    def test_known_shapes_of_other_inputs_are_validated(self, checks: list[object]) -> None:
        signature = Signature(
            inputs=(spec("x", "batch", 2),), outputs=(spec("y", "batch", 2),), optional_inputs=(spec("z", "batch", 2),)
        )
        executor = Executor(fake_session(signature), batching=True)
        executor.execute(request(1))
        assert isinstance(executor.execute(InferenceRequest({"z": rows(1)})), SignatureError)
        assert len(checks) == 2

    def test_known_shapes_are_bounded(self, checks: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_MAX_VALID_SHAPES", 3)
        executor = Executor(fake_session(), batching=True)
        for width in range(1, 6):
            executor.execute(request(1, width=width))
        del checks[:]
        for width in range(1, 6):
            check_outputs(executor.execute(request(1, width=width)), y=rows(2, width=width))
        assert checks == [{"x": (1, 4)}, {"x": (1, 5)}]


def shared_memory(array: np.ndarray) -> np.ndarray:
    """A read-only array at an address that does not suit its type."""
    memory = np.zeros(array.nbytes + array.itemsize, np.uint8)
    start = 1 - memory.ctypes.data % array.itemsize
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[:] = array
    view.flags.writeable = False
    return view


class TestSharedMemory:
    """Runtimes need not support read-only and unaligned arrays."""

    @pytest.mark.parametrize("batching", [True, False])
    def test_unaligned_and_read_only_arrays_are_copied(self, batching: bool) -> None:
        def compute(feeds: Feeds) -> dict[str, np.ndarray]:
            assert feeds["x"].flags.carray
            return double(feeds)

        executor = Executor(fake_session(compute=compute), batching=batching)
        requests = [InferenceRequest({"x": shared_memory(rows(number))}) for number in (1, 2)]
        check_outputs(executor.execute(requests[0]), y=rows(2))
        for result, expected in zip(executor.execute_batch(requests), (2, 4), strict=True):
            check_outputs(result, y=rows(expected))

    def test_aligned_array_is_not_copied(self) -> None:
        found: list[np.ndarray] = []

        def compute(feeds: Feeds) -> dict[str, np.ndarray]:
            found.append(feeds["x"])
            return double(feeds)

        sent = rows(1)
        Executor(fake_session(compute=compute), batching=True).execute(InferenceRequest({"x": sent}))
        assert found[0] is sent


class TestCancellation:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Seconds that each run takes: the last of the list."""
        seconds, now = [0.0], [0.0]

        def monotonic() -> float:
            now[0] += seconds[-1]
            return now[0]

        monkeypatch.setattr(module.time, "monotonic", monotonic)
        return seconds

    def test_cancelled_request_is_not_computed_if_runs_are_slow(self, clock: list[float]) -> None:
        clock.append(0.1)
        session = fake_session()
        executor = Executor(session, batching=True)
        executor.execute(request(1))
        result = executor.execute(request(2, cancelled=True))
        assert isinstance(result, Cancelled)
        assert result.triton_code == "CANCELLED"
        assert len(session.shapes) == 1

    def test_cancellation_is_not_checked_if_runs_are_fast(self, clock: list[float]) -> None:
        clock.append(5e-3)
        executor = Executor(fake_session(), batching=True)
        for _ in range(3):
            late = request(2, cancelled=True)
            check_outputs(executor.execute(late), y=rows(4))
            assert late.cancellation_checks == 0

    def test_last_run_decides_about_checking(self, clock: list[float]) -> None:
        executor = Executor(fake_session(), batching=True)
        clock.append(0.1)
        executor.execute(request(1))
        clock.append(1e-4)
        assert isinstance(executor.execute(request(1, cancelled=True)), Cancelled)
        executor.execute(request(1))
        check_outputs(executor.execute(request(1, cancelled=True)), y=rows(2))

    def test_other_requests_of_the_batch_are_computed(self, clock: list[float]) -> None:
        clock.append(0.1)
        session = fake_session()
        executor = Executor(session, batching=True)
        executor.execute(request(1))
        first, second, third = executor.execute_batch([request(1), request(2, cancelled=True), request(3)])
        check_outputs(first, y=rows(2))
        assert isinstance(second, Cancelled)
        check_outputs(third, y=rows(6))
        assert session.shapes[1:] == [(2, 2)]


class TestBatch:
    def test_requests_are_grouped_by_shape_and_keep_their_order(self) -> None:
        session = fake_session()
        requests = [request(1), request(2, width=3), request(3), request(4, width=3), request(5, width=1)]
        results = Executor(session, batching=True).execute_batch(requests)
        for number, (result, width) in enumerate(zip(results, (2, 3, 2, 3, 1), strict=True), start=1):
            check_outputs(result, y=rows(2 * number, width=width))
        assert session.shapes == [(2, 2), (2, 3), (1, 1)]

    def test_each_request_gets_its_requested_outputs(self) -> None:
        session = fake_session()
        requests = [request(1, outputs=["sum"]), request(2, outputs=["y"]), request(3, outputs=["sum", "y"])]
        first, second, third = Executor(session, batching=True).execute_batch(requests)
        check_outputs(first, sum=np.array([2.0]))
        check_outputs(second, y=rows(4))
        check_outputs(third, y=rows(6), sum=np.array([6.0]))
        assert session.outputs == [("y", "sum")]

    def test_failed_batch_is_computed_request_by_request(self) -> None:
        def refuse_thirteen(feeds: Feeds) -> dict[str, np.ndarray]:
            if 13 in feeds["x"]:
                raise ExecutionError("13 is not a number")
            return double(feeds)

        session = fake_session(compute=refuse_thirteen)
        first, second, third = Executor(session, batching=True).execute_batch([request(1), request(13), request(3)])
        check_outputs(first, y=rows(2))
        assert isinstance(second, ExecutionError)
        check_outputs(third, y=rows(6))
        assert session.shapes == [(3, 2), (1, 2), (1, 2), (1, 2)]

    def test_graph_that_cannot_batch_is_logged_once(self, logged: list[str]) -> None:
        def fail_on_two(feeds: Feeds) -> dict[str, np.ndarray]:
            if len(feeds["x"]) > 1:
                raise ExecutionError("a batch of 1 is built into the graph")
            return double(feeds)

        executor = Executor(fake_session(compute=fail_on_two), batching=True)
        for _ in range(2):
            for result in executor.execute_batch([request(1), request(1)]):
                check_outputs(result, y=rows(2))
        (line,) = logged
        assert "a batch of 1 is built into the graph" in line

    def test_output_without_batch_is_computed_request_by_request(self) -> None:
        session = fake_session(compute=lambda feeds: {"y": feeds["x"], "sum": feeds["x"].sum(axis=1)[:1]})
        requests = [request(1, outputs=["sum"]), request(2, outputs=["sum"])]
        first, second = Executor(session, batching=True).execute_batch(requests)
        check_outputs(first, sum=np.array([2.0]))
        check_outputs(second, sum=np.array([4.0]))
        assert session.shapes == [(2, 2), (1, 2), (1, 2)]

    def test_without_batching_requests_run_alone(self) -> None:
        session = fake_session()
        results = Executor(session, batching=False).execute_batch([request(1), request(2)])
        for result, expected in zip(results, (rows(2), rows(4)), strict=True):
            check_outputs(result, y=expected)
        assert session.shapes == [(1, 2), (1, 2)]


class TestBatchSizes:
    def test_batch_sizes_of_all_runs(self) -> None:
        executor = Executor(fake_session(), batching=True)
        executor.execute(request(1, 2, 3))
        executor.execute_batch([request(1), request(2, 3), request(4, width=5)])
        assert list(executor.batch_sizes) == [3, 3, 1]


HOSTILE_SHAPES = [(), (0,), (2,), (1, 1), (0, 1, 2), (1, 1, 3), (1, 2, 2), (1, 1, 2, 1), (9, 1, 2), (1, 1, 0)]


class TestHostileNeighbors:
    """No request affects another: valid ones get exactly their own rows."""

    @staticmethod
    def compute(feeds: Feeds) -> dict[str, np.ndarray]:
        """Double the input; raise errors of an engine, an allocator or a bug for certain inputs."""
        array = feeds["x"]
        if array.shape[1] > 2:
            raise ValueError("too wide for this graph")
        if (array == 666).any():
            raise ExecutionError("an index out of range")
        if (array == 667).any():
            raise MemoryError
        return {"y": array * 2, "sum": array.sum(axis=1)}

    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("good"), st.lists(st.integers(-99, 99), min_size=1, max_size=3)),
                st.tuples(st.just("value"), st.sampled_from([666, 667])),
                st.tuples(st.just("nan"), st.sampled_from([np.nan, np.inf])),
                st.tuples(st.just("shape"), st.sampled_from(HOSTILE_SHAPES)),
                st.tuples(st.just("dtype"), st.sampled_from([np.float64, np.int8, np.bool_, np.object_])),
                st.tuples(st.just("name"), st.sampled_from(["", "y", "z" * 1000])),
                st.tuples(st.just("empty"), st.none()),
                st.tuples(st.just("unreadable"), st.none()),
                st.tuples(st.just("cancelled"), st.none()),
            ),
            max_size=8,
        )
    )
    def test_valid_requests_get_their_own_rows(self, drawn: list[tuple[str, Any]]) -> None:
        executor = Executor(fake_session(SIGNATURE, self.compute), batching=True, input_ranks={"x": 3})
        executor._run_s = 1.0  # slow enough to check for cancellation
        results = executor.execute_batch([self.make(kind, value) for kind, value in drawn])
        assert len(results) == len(drawn)
        for (kind, value), result in zip(drawn, results, strict=True):
            if kind == "good":
                check_outputs(result, y=rows(*value) * 2)
            elif kind == "nan":
                check_outputs(result, y=np.full((1, 2), value, np.float32))
            elif kind == "shape" and value in {(9, 1, 2), (0, 1, 2), (1, 1, 0)}:
                assert isinstance(result, GraphkilnError) or len(result["y"]) == value[0]
            elif kind == "cancelled":
                assert isinstance(result, Cancelled) or executor._run_s < 1.0
            else:
                assert isinstance(result, GraphkilnError), (kind, value)

    @staticmethod
    def make(kind: str, value: Any) -> InferenceRequest:
        x = rows(*value if kind == "good" else [value if kind in {"value", "nan"} else 1])[:, None]
        feeds = {"x": x}
        if kind == "shape":
            feeds = {"x": np.ones(value, np.float32)}
        elif kind == "dtype":
            feeds = {"x": x.astype(value)}
        elif kind == "name":
            feeds = {"x": x, value: x}
        elif kind == "empty":
            feeds = {}
        made = InferenceRequest(feeds, cancelled=kind == "cancelled")
        if kind == "unreadable":
            made._tensors = [object()]  # type: ignore[list-item]
        return made


class TestContract:
    def executor(self, contract: str) -> Executor:
        return Executor(fake_session(), batching=True, contract=contract)

    def test_request_for_another_contract_is_refused_alone(self) -> None:
        requests = [InferenceRequest({"x": rows(1)}, parameters=f'{{"contract":"{name}"}}') for name in ("a", "b", "a")]
        results = self.executor("a").execute_batch(requests)
        assert [isinstance(result, ContractChanged) for result in results] == [False, True, False]
        assert isinstance(self.executor("b").execute(requests[0]), ContractChanged)

    def test_version_without_contract_accepts_all_requests(self) -> None:
        asked = InferenceRequest({"x": rows(1)}, parameters='{"contract":"b"}')
        assert isinstance(self.executor("").execute(asked), dict)


def test_graph_that_mixes_rows_runs_requests_alone() -> None:
    session = fake_session()
    results = Executor(session, batching=True, separate=True).execute_batch([request(1), request(2)])
    assert session.shapes == [(1, 2), (1, 2)]
    check_outputs(results[1], y=rows(4))


# Grouping, concatenating and splitting requests.


def rows_of(number: int, rows: int, width: int) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, width), number, np.float32), "n": np.full((rows,), number, np.int64)}


def test_single_request_is_not_copied() -> None:
    single = rows_of(1, 2, 3)
    assert Concatenator().concatenate([single]) is single


def test_buffer_is_reused() -> None:
    concatenator = Concatenator()
    large = concatenator.concatenate([rows_of(1, 3, 4), rows_of(2, 3, 4)])["x"]
    small = concatenator.concatenate([rows_of(3, 1, 4), rows_of(4, 1, 4)])["x"]
    assert np.shares_memory(large, small)
    np.testing.assert_array_equal(small, [[3.0] * 4, [4.0] * 4])


def test_strings_are_concatenated() -> None:
    words = [{"w": np.array([b"a"], np.object_)}, {"w": np.array([b"long word", b""], np.object_)}]
    assert Concatenator().concatenate(words)["w"].tolist() == [b"a", b"long word", b""]


@pytest.mark.parametrize("shape", [(1, 4), (4, 4), (3,), ()])
def test_output_with_wrong_rows_is_refused(shape: tuple[int, ...]) -> None:
    if shape == (3,):
        assert len(split_batch({"y": np.zeros(shape)}, [1, 2])) == 2
        return
    with pytest.raises(ExecutionError, match="for a batch of 3 rows"):
        split_batch({"y": np.zeros(shape)}, [1, 2])


# Contracts named by requests.


@pytest.mark.parametrize(
    "parameters", ["", "{}", '{"other":"x"}', '{"contract":"abc"}', '{"x": "\\"contract\\""}', '{"a":"contract"}']
)
def test_matching_contract_is_accepted(parameters: str) -> None:
    check_contract(parameters, "abc")


@pytest.mark.parametrize("value", ["abd", "", 1, True, None])
def test_other_contract_is_refused(value: object) -> None:
    with pytest.raises(ContractChanged):
        check_contract(json.dumps({"contract": value}), "abc")


# Refusal of an instance that computes wrong outputs.


def test_refusal_gives_the_reason() -> None:
    refusal = Refusal("output 'y' differs")
    request = InferenceRequest({"x": np.ones((1, 2), np.float32)})
    for result in (refusal.execute(request), *refusal.execute_batch([request, request])):
        assert isinstance(result, InstanceFault)
        assert "output 'y' differs" in str(result)
        assert to_response(result).error.code == TritonError.UNAVAILABLE
