"""Verification with synthetic requests: the session must compute what the saved graph computes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_session import FakeSession, spec

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError, LoweringError, VerificationError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.trial import (
    SyntheticInputs,
    check_repeats,
    find_mixed_rows,
    synthetic_inputs,
    try_as_saved,
    try_beside,
)
from graphkiln_backend.proof.policy import OTHER_ENGINE

GRAPH = Path("graph")
Compute = Callable[[np.ndarray], np.ndarray]


def refuse(x: np.ndarray) -> np.ndarray:
    raise ExecutionError(f"out of range: {x.ravel()[0]}")


def fail(because: object) -> np.ndarray:
    raise ExecutionError(f"failed: {because}")


def only_ones(x: np.ndarray) -> np.ndarray:
    return x if x.all() and x.max() == 1 else refuse(x)


def refuse_to_load(_: Path) -> Any:
    raise LoweringError("not for ONNX Runtime", attempts=())


def session_of(compute: Compute, dtype: DType = DType.INT64, batch: int | str = "batch") -> FakeSession:
    signature = Signature(inputs=(spec("x", batch, 3, dtype=dtype),), outputs=(spec("y", "n", dtype=dtype),))
    return FakeSession(signature, lambda feeds: {"y": compute(feeds["x"])})


class TestAsSaved:
    def test_simplest_accepted_request_is_used(self) -> None:
        assert try_as_saved(session_of(lambda x: x), GRAPH, refuse_to_load).synthetic == SyntheticInputs()
        assert try_as_saved(session_of(only_ones), GRAPH, refuse_to_load).synthetic == SyntheticInputs(fill=1)

    def test_request_refused_by_the_saved_graph_is_not_a_fault(self) -> None:
        reference = session_of(refuse)
        trial = try_as_saved(session_of(refuse), GRAPH, lambda _: reference)
        assert trial.synthetic is None
        assert trial.note == "every synthetic request fails, the first with: out of range: 0"
        assert reference.closed == 1

    def test_session_must_accept_what_the_saved_graph_accepts(self) -> None:
        with pytest.raises(LoweringError, match="fails where the saved graph does not; out of range: 1"):
            try_as_saved(session_of(refuse), GRAPH, lambda _: session_of(only_ones))

    @pytest.mark.parametrize(
        ("batch", "dtype", "because"),
        [
            pytest.param("batch", DType.INT64, lambda _: "no", id="another size may pass"),
            pytest.param(1, DType.BYTES, lambda _: "no", id="another text may pass"),
            pytest.param(1, DType.INT64, lambda x: x[0, 0], id="another value may pass"),
        ],
    )
    def test_errors_that_depend_on_the_request_are_notes(self, batch: int | str, dtype: DType, because: Any) -> None:
        session = session_of(lambda x: fail(because(x)), dtype, batch)
        assert "every synthetic request fails" in try_as_saved(session, GRAPH, refuse_to_load).note

    def test_same_error_for_all_requests_is_refused(self) -> None:
        with pytest.raises(
            LoweringError, match="every synthetic request fails with the same error; failed: not supported"
        ):
            try_as_saved(session_of(lambda _: fail("not supported"), batch=1), GRAPH, refuse_to_load)


class TestBeside:
    def try_session(self, session: Compute, reference: Compute, dtype: DType = DType.FP32) -> Any:
        return try_beside(session_of(session, dtype), GRAPH, lambda _: session_of(reference, dtype), OTHER_ENGINE)

    def test_same_outputs_pass(self) -> None:
        assert self.try_session(lambda x: x, lambda x: x).synthetic == SyntheticInputs()

    def test_different_outputs_are_refused(self) -> None:
        with pytest.raises(VerificationError, match="not those of the saved graph"):
            self.try_session(lambda x: x * np.float32(1.01), lambda x: x)

    def test_random_graph_is_not_compared(self) -> None:
        random = np.random.default_rng(1)
        assert self.try_session(lambda x: x, lambda x: random.normal(size=x.shape).astype(np.float32)).synthetic

    def test_session_gets_only_requests_that_the_saved_graph_accepts(self) -> None:
        seen: list[int] = []
        trial = self.try_session(lambda x: (seen.append(int(x.min())), x)[1], only_ones, DType.INT64)
        assert (trial.synthetic, seen) == (SyntheticInputs(fill=1), [1])

    def test_no_accepted_request_is_refused(self) -> None:
        with pytest.raises(VerificationError, match=r"cannot verify the outputs .*convert it with valid samples"):
            self.try_session(refuse, refuse)

    def test_failing_session_is_refused(self) -> None:
        with pytest.raises(LoweringError, match="fails where the saved graph does not"):
            self.try_session(refuse, lambda x: x)

    def test_missing_reference_is_refused(self) -> None:
        with pytest.raises(VerificationError, match=r"ONNX Runtime cannot load it .*self_test: off"):
            try_beside(session_of(lambda x: x), GRAPH, refuse_to_load, OTHER_ENGINE)


class TestRepeats:
    def test_response_that_changes_is_refused(self) -> None:
        runs = count()
        with pytest.raises(LoweringError, match="different response"):
            check_repeats(session_of(lambda x: x + next(runs)), SyntheticInputs(), OTHER_ENGINE)


class TestRows:
    def test_independent_rows(self) -> None:
        session = session_of(lambda x: x * 2, DType.FP32)
        assert find_mixed_rows(session, SyntheticInputs(), OTHER_ENGINE) == ""
        assert len(session.feeds) == 5

    def find(self, compute: Compute) -> str:
        return find_mixed_rows(session_of(compute, DType.FP32), SyntheticInputs(), OTHER_ENGINE)

    def test_row_that_depends_on_others(self) -> None:
        assert "a row depends on the others: y: relative L2" in self.find(lambda x: x - x.mean(axis=0))

    def test_small_row_beside_a_large_one(self) -> None:
        def quantize(x: np.ndarray) -> np.ndarray:
            step = np.abs(x).max() / np.float32(1e4)
            return np.round(x / step) * step

        assert "a row depends" in self.find(quantize)

    def test_equal_rows_if_only_zeros_are_accepted(self) -> None:
        session = session_of(lambda x: x.cumsum(axis=0) + 1 if not x.any() else refuse(x))
        assert find_mixed_rows(session, SyntheticInputs(), OTHER_ENGINE) == ""
        session = session_of(lambda x: x + len(x) if not x.any() else refuse(x))
        assert "a row depends on the others" in find_mixed_rows(session, SyntheticInputs(), OTHER_ENGINE)

    def test_graph_without_accepted_request(self) -> None:
        assert "no valid request is known" in find_mixed_rows(session_of(refuse), None, OTHER_ENGINE)

    def test_output_length_that_depends_on_values(self) -> None:
        assert self.find(lambda x: x[x > 0.5]).startswith("output 'y' has the shape [")


class TestSyntheticInputs:
    @pytest.mark.parametrize(
        ("shape", "expected"),
        [
            (("batch", 3), (5, 3)),
            ((2, 3), (2, 3)),
            (("batch", "length", 8), (5, 1, 8)),
            ((1, "length"), (1, 1)),
            ((), ()),
            (("n",), (5,)),
            (("batch", 0), (5, 0)),
        ],
    )
    def test_shapes_of_synthetic_requests(self, shape: tuple[int | str, ...], expected: tuple[int, ...]) -> None:
        signature = Signature(inputs=(TensorSpec(name="x", dtype=DType.FP32, shape=shape),), outputs=())
        assert SyntheticInputs().feeds(signature, 5)["x"].shape == expected
        assert SyntheticInputs().batch(signature, 5)["x"].shape == expected

    @pytest.mark.parametrize("fill", [0, 1, 2, 3, 4])
    @pytest.mark.parametrize("dtype", list(DType))
    def test_types_of_synthetic_requests(self, dtype: DType, fill: int) -> None:
        signature = Signature(inputs=(TensorSpec(name="x", dtype=dtype, shape=("batch", 2)),), outputs=())
        feeds = SyntheticInputs(fill=fill).feeds(signature, 3)
        signature.check(feeds)
        assert dtype.is_float or bool(feeds["x"].any()) == bool(fill)


def signature_of(*shape: int | str, dtype: DType = DType.FP32) -> Signature:
    return Signature(inputs=(TensorSpec(name="x", dtype=dtype, shape=shape),), outputs=())


class TestRecipes:
    def test_fixed_sizes_have_four_fills(self) -> None:
        assert list(synthetic_inputs(signature_of("batch", 3))) == [
            SyntheticInputs(),
            SyntheticInputs(fill=1),
            SyntheticInputs(fill=2),
            SyntheticInputs(fill=3),
        ]

    def test_dynamic_sizes_are_varied(self) -> None:
        sizes = {
            way.feeds(signature_of("batch", 3, "h", "w"))["x"].shape
            for way in synthetic_inputs(signature_of("batch", 3, "h", "w"))
        }
        assert sizes == {(1, 3, size, size) for size in (1, 8, 64, 224)}

    def test_size_of_a_request_is_bounded(self) -> None:
        assert {way.size for way in synthetic_inputs(signature_of("batch", "c", "d", "h", "w"))} == {1, 8}

    def test_integer_fills(self) -> None:
        filled = [
            way.feeds(signature_of(3, dtype=DType.INT64))["x"].tolist() for way in synthetic_inputs(signature_of(3))
        ]
        assert filled == [[0, 0, 0], [1, 1, 1], [0, 1, 2], [2, 3, 4]]

    @pytest.mark.parametrize("dtype", [DType.INT8, DType.UINT8, DType.INT16, DType.UINT16])
    def test_short_integers_have_their_ends(self, dtype: DType) -> None:
        *_, last = synthetic_inputs(signature_of(3, dtype=dtype))
        ends = np.iinfo(dtype.numpy)
        assert last.feeds(signature_of(3, dtype=dtype))["x"].tolist() == [ends.max, ends.min, 1]

    def test_counting_fill_of_floats_and_texts(self) -> None:
        assert SyntheticInputs(fill=3).feeds(signature_of(2))["x"].tolist() == [2.0, 3.0]
        assert SyntheticInputs(fill=3).feeds(signature_of(1, dtype=DType.BYTES))["x"].tolist() == ["2"]
