"""Sequences: states between requests, lost states, correlation ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import ml_dtypes
import numpy as np
import pytest
from fake_session import FakeSession, Feeds, spec
from fake_triton import InferenceRequest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError, SignatureError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.repository.batch_tensors import SequenceState, SequenceTensors
from graphkiln_backend.triton.executor import Executor, Result
from graphkiln_backend.triton.sequences import SequenceExecutor, SequenceLost

START, END = 1, 2
FAILING = 13.0


class Request(InferenceRequest):
    """A request of a sequence, with an initial state as Triton adds it."""

    def __init__(
        self,
        identity: int | str,
        value: float,
        flags: int = 0,
        *,
        outputs: Collection[str] = ("y",),
        given: np.ndarray | None = None,
        dtype: type = np.float32,
    ) -> None:
        state = np.full((1, 1), 1e9) if given is None else given
        super().__init__({"x": np.full((1, 1), value, dtype), "in": state.astype(dtype)}, outputs)
        self._identity, self._flags = identity, flags

    def correlation_id(self) -> int | str:
        return self._identity

    def flags(self) -> int:
        return self._flags


def sums(dtype: DType = DType.FP32) -> FakeSession:
    """Session whose outputs `y` and `out` are the sum of `x` and the state `in`."""

    def compute(feeds: Feeds) -> dict[str, np.ndarray]:
        if (feeds["x"] == FAILING).any():
            raise ExecutionError("thirteen")
        total = feeds["x"] + feeds["in"]
        return {"y": total, "out": total.copy()}

    x, state, y, out = (spec(name, "batch", 1, dtype=dtype) for name in ("x", "in", "y", "out"))
    return FakeSession(Signature(inputs=(x, state), outputs=(y, out)), compute)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def state(dtype: DType = DType.FP32, *, initialized: bool = False) -> SequenceState:
    return SequenceState(input_name="in", output_name="out", dtype=dtype, dims=(1,), initialized=initialized)


def tensors(*, initialized: bool = False, slots: int = 4) -> SequenceTensors:
    return SequenceTensors(states=(state(initialized=initialized),), idle_s=1.0, slots=slots, batched=True)


@pytest.fixture
def session() -> FakeSession:
    return sums()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sequences(session: FakeSession, clock: Clock) -> SequenceExecutor:
    return SequenceExecutor(Executor(session, batching=True), tensors(), clock=clock)


def y(result: Result) -> float:
    assert isinstance(result, dict), result
    assert list(result) == ["y"]
    return float(result["y"].item())


class TestStates:
    def test_states_start_with_zeros_and_are_passed_on(self, sequences: SequenceExecutor) -> None:
        results = [sequences.execute(Request(7, value, START * (value == 1))) for value in (1, 2, 4)]
        assert [y(result) for result in results] == [1, 3, 7]

    def test_states_start_with_configured_values(self, session: FakeSession) -> None:
        served = SequenceExecutor(Executor(session, batching=True), tensors(initialized=True))
        first = Request(7, 1, START, given=np.full((1, 1), 100))
        assert y(served.execute(first)) == 101
        first._tensors[1]._array[:] = -5  # Triton reuses the memory after the response
        assert y(served.execute(Request(7, 1))) == 102

    def test_states_of_sequences_in_one_batch(self, sequences: SequenceExecutor, session: FakeSession) -> None:
        sequences.execute_batch([Request(1, 1, START), Request("1", 10, START), Request(2, 100, START)])
        results = sequences.execute_batch([Request(2, 1), Request(1, 1), Request("1", 1)])
        assert [y(result) for result in results] == [101, 2, 11]
        assert session.rows == [3, 3]

    def test_requests_of_one_sequence_run_in_order(self, sequences: SequenceExecutor, session: FakeSession) -> None:
        batch = [Request(1, 1, START), Request(1, 2), Request(2, 10, START), Request(1, 4)]
        assert [y(result) for result in sequences.execute_batch(batch)] == [1, 3, 10, 7]
        assert session.rows == [2, 1, 1]

    def test_reused_id_starts_a_new_sequence(self, sequences: SequenceExecutor) -> None:
        for flags in (START, START | END, START):
            assert y(sequences.execute(Request(7, 5, flags))) == 5

    def test_state_outputs_can_be_requested(self, sequences: SequenceExecutor) -> None:
        result = sequences.execute(Request(7, 5, START, outputs=["out"]))
        assert isinstance(result, dict)
        assert list(result) == ["out"]
        assert y(sequences.execute(Request(7, 1))) == 6

    def test_bf16_states(self) -> None:
        kept = SequenceTensors(states=(state(DType.BF16),), batched=True)
        served = SequenceExecutor(Executor(sums(DType.BF16), batching=True), kept)
        bf16 = ml_dtypes.bfloat16
        assert y(served.execute(Request(7, 1.5, START, dtype=bf16))) == 1.5
        assert y(served.execute(Request(7, 1.5, dtype=bf16))) == 3.0

    def test_string_states_start_empty(self) -> None:
        session = sums(DType.BYTES)
        session.compute = lambda feeds: dict.fromkeys(("y", "out"), feeds["in"])
        kept = SequenceTensors(states=(state(DType.BYTES),), batched=True)
        result = SequenceExecutor(Executor(session, batching=True), kept).execute(
            Request(7, 0, START, given=np.array([[0]]), dtype=np.object_)
        )
        assert isinstance(result, dict)
        assert result["y"].tolist() == [[b""]]


class TestLostStates:
    """Computing from zeros instead would be a silent wrong output."""

    def test_lost_after_a_restart_of_the_instance(self, sequences: SequenceExecutor) -> None:
        result = sequences.execute(Request(7, 1))
        assert isinstance(result, SequenceLost)
        assert "restart the sequence" in str(result)

    def test_lost_after_the_last_request(self, sequences: SequenceExecutor) -> None:
        assert y(sequences.execute(Request(7, 1, START))) == 1
        assert y(sequences.execute(Request(7, 1, END))) == 2
        assert isinstance(sequences.execute(Request(7, 1)), SequenceLost)
        assert not len(sequences._states)

    def test_lost_after_a_failed_first_request(self, sequences: SequenceExecutor) -> None:
        sequences.execute(Request(7, 1, START))
        assert isinstance(sequences.execute(Request(7, FAILING, START)), ExecutionError)
        assert isinstance(sequences.execute(Request(7, 1)), SequenceLost)

    def test_lost_states_affect_one_request(self, sequences: SequenceExecutor) -> None:
        lost, good = sequences.execute_batch([Request(7, 1), Request(8, 1, START)])
        assert isinstance(lost, SequenceLost)
        assert y(good) == 1


def test_failed_request_changes_no_state(sequences: SequenceExecutor) -> None:
    sequences.execute_batch([Request(7, 1, START), Request(8, 10, START)])
    failed, good = sequences.execute_batch([Request(7, FAILING), Request(8, 1)])
    assert isinstance(failed, ExecutionError)
    assert y(good) == 11
    assert y(sequences.execute(Request(7, 1))) == 2


def test_failed_last_request_ends_the_sequence(sequences: SequenceExecutor) -> None:
    sequences.execute(Request(7, 1, START))
    sequences.execute(Request(7, FAILING, END))
    assert isinstance(sequences.execute(Request(7, 1)), SequenceLost)


class TestMemory:
    def test_idle_sequences_are_freed(self, sequences: SequenceExecutor, clock: Clock) -> None:
        sequences.execute(Request(1, 1, START))
        clock.now_s += 40
        sequences.execute(Request(2, 1, START))
        clock.now_s += 40
        sequences.execute(Request(3, 1, START | END))
        assert len(sequences._states) == 1
        assert isinstance(sequences.execute(Request(1, 1)), SequenceLost)
        assert y(sequences.execute(Request(2, 1))) == 2

    def test_number_of_sequences_is_bounded(self, sequences: SequenceExecutor) -> None:
        for identity in range(1, 100):
            sequences.execute(Request(identity, 1, START))
        assert len(sequences._states) == 8
        assert y(sequences.execute(Request(99, 1))) == 2
        assert isinstance(sequences.execute(Request(1, 1)), SequenceLost)


class TestWhatTritonMakes:
    def test_empty_slots_are_not_computed(self, sequences: SequenceExecutor, session: FakeSession) -> None:
        fill = Request(0, FAILING, outputs=())
        results = sequences.execute_batch([fill, Request(1, 1, START), fill])
        assert y(results[1]) == 1
        assert (results[0], results[2]) == ({}, {})
        assert session.rows == [1]

    def test_warm_up_leaves_no_states(self, sequences: SequenceExecutor) -> None:
        warm = Request(0, 1)
        del warm._tensors[1]  # Triton adds no states to it
        assert [y(result) for result in sequences.execute_batch([warm, warm])] == [1, 1]
        assert not len(sequences._states)

    def test_missing_initial_state_is_an_error(self, session: FakeSession) -> None:
        served = SequenceExecutor(Executor(session, batching=True), tensors(initialized=True))
        request = Request(7, 1, START)
        del request._tensors[1]
        assert isinstance(served.execute(request), ExecutionError)


class TestIds:
    def ask(self, dtype: DType, identity: int | str, *, batched: bool = True) -> Result:
        class Identity:
            signature = Signature(
                inputs=(TensorSpec(name="id", dtype=dtype, shape=("b", 1) if batched else (1,)),),
                outputs=(TensorSpec(name="y", dtype=dtype, shape=("b", 1) if batched else (1,)),),
            )

            def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
                return dict.fromkeys(outputs, feeds["id"])

        request = Request(identity, 0, START)
        request._tensors = []
        if dtype is not DType.BYTES and isinstance(identity, int):
            shape = (1, 1) if batched else (1,)
            request._tensors = InferenceRequest({"id": np.full(shape, identity).astype(dtype.numpy)})._tensors
        kept = SequenceTensors(controls={"id": dtype}, id_input="id", batched=batched)
        return SequenceExecutor(Executor(Identity(), batching=batched), kept).execute(request)

    @pytest.mark.parametrize("batched", [False, True])
    @pytest.mark.parametrize(("identity", "text"), [("abc", b"abc"), (7, b"7"), ("\u00e4", "\u00e4".encode())])
    def test_string_id_is_provided_here(self, identity: int | str, text: bytes, batched: bool) -> None:
        result = self.ask(DType.BYTES, identity, batched=batched)
        assert isinstance(result, dict), result
        assert result["y"].tolist() == ([[text]] if batched else [text])

    @pytest.mark.parametrize("dtype", [DType.UINT64, DType.INT64, DType.UINT32, DType.INT32])
    def test_integer_id_is_provided_by_triton(self, dtype: DType) -> None:
        result = self.ask(dtype, 7)
        assert isinstance(result, dict)
        assert result["y"].tolist() == [[7]]

    @pytest.mark.parametrize(
        ("dtype", "identity"), [(DType.UINT64, "7"), (DType.INT32, 1 << 31), (DType.INT64, (1 << 64) - 1)]
    )
    def test_id_that_does_not_fit_is_refused(self, dtype: DType, identity: int | str) -> None:
        result = self.ask(dtype, identity)
        assert isinstance(result, SignatureError)
        assert f"expected {dtype}" in str(result)
