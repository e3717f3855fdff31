"""One request is made before a session serves: what the saved graph computes, the session must compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError, LoweringError, VerificationError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.trial import SyntheticInputs, check_repeats, find_mixed_rows, try_as_saved, try_beside
from graphkiln_backend.proof.policy import OTHER_ENGINE
from graphkiln_backend.system.closing import Closeable

GRAPH = Path("graph")
Compute = Callable[[np.ndarray], np.ndarray]


class Session(Closeable):
    """Computes what it is told to."""

    def __init__(self, compute: Compute, dtype: DType = DType.INT64, batch: int | str = "batch") -> None:
        spec = TensorSpec(name="x", dtype=dtype, shape=(batch, 3))
        self.signature: Any = Signature(inputs=(spec,), outputs=(TensorSpec(name="y", dtype=dtype, shape=("n",)),))
        self._compute = compute
        self.runs = 0

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> dict[str, Any]:
        assert outputs is None
        self.runs += 1
        return {"y": self._compute(feeds["x"])}

    def placement(self, feeds: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.runs = -1


def refuse(x: np.ndarray) -> np.ndarray:
    raise ExecutionError(f"out of range: {x.ravel()[0]}")


def fail(because: object) -> np.ndarray:
    raise ExecutionError(f"failed: {because}")


def only_ones(x: np.ndarray) -> np.ndarray:
    return x if x.all() and x.max() == 1 else refuse(x)


def none(_: Path) -> Any:
    raise LoweringError("not for ONNX Runtime", attempts=())


class TestAsSaved:
    def test_the_plainest_request_that_runs(self) -> None:
        assert try_as_saved(Session(lambda x: x), GRAPH, none).synthetic == SyntheticInputs()
        assert try_as_saved(Session(only_ones), GRAPH, none).synthetic == SyntheticInputs(fill=1)

    def test_what_the_saved_graph_refuses_too_is_no_fault_of_the_session(self) -> None:
        reference = Session(refuse)
        trial = try_as_saved(Session(refuse), GRAPH, lambda _: reference)
        assert trial.synthetic is None
        assert trial.note == "every synthetic request fails, the first with: out of range: 0"
        assert reference.runs == -1  # closed

    def test_what_it_computes_the_session_must_compute(self) -> None:
        with pytest.raises(LoweringError, match="fails where the saved graph does not; out of range: 1"):
            try_as_saved(Session(refuse), GRAPH, lambda _: Session(only_ones))

    @pytest.mark.parametrize(
        ("batch", "dtype", "because"),
        [
            pytest.param("batch", DType.INT64, lambda _: "no", id="another size may do"),
            pytest.param(1, DType.BYTES, lambda _: "no", id="another text may do"),
            pytest.param(1, DType.INT64, lambda x: x[0, 0], id="another value may do"),
        ],
    )
    def test_what_depends_on_the_request(self, batch: int | str, dtype: DType, because: Any) -> None:
        session = Session(lambda x: fail(because(x)), dtype, batch)
        assert "every synthetic request fails" in try_as_saved(session, GRAPH, none).note

    def test_what_the_runtime_never_computes_does_not_serve(self) -> None:
        with pytest.raises(
            LoweringError, match="every synthetic request fails with the same error; failed: not supported"
        ):
            try_as_saved(Session(lambda _: fail("not supported"), batch=1), GRAPH, none)


class TestBeside:
    def ask(self, session: Compute, reference: Compute, dtype: DType = DType.FP32) -> Any:
        return try_beside(Session(session, dtype), GRAPH, lambda _: Session(reference, dtype), OTHER_ENGINE)

    def test_the_same_outputs(self) -> None:
        assert self.ask(lambda x: x, lambda x: x).synthetic == SyntheticInputs()

    def test_other_outputs_are_refused(self) -> None:
        with pytest.raises(VerificationError, match="not those of the saved graph"):
            self.ask(lambda x: x * np.float32(1.01), lambda x: x)

    def test_a_graph_that_computes_otherwise_each_time_tells_nothing(self) -> None:
        random = np.random.default_rng(1)
        assert self.ask(lambda x: x, lambda x: random.normal(size=x.shape).astype(np.float32)).synthetic

    def test_the_session_is_never_handed_what_the_saved_graph_refuses(self) -> None:
        seen: list[int] = []
        trial = self.ask(lambda x: (seen.append(int(x.min())), x)[1], only_ones, DType.INT64)
        assert (trial.synthetic, seen) == (SyntheticInputs(fill=1), [1])

    def test_nothing_that_the_saved_graph_takes(self) -> None:
        with pytest.raises(VerificationError, match=r"cannot verify the outputs .*convert it with valid samples"):
            self.ask(refuse, refuse)

    def test_a_session_that_fails(self) -> None:
        with pytest.raises(LoweringError, match="fails where the saved graph does not"):
            self.ask(refuse, lambda x: x)

    def test_without_a_reference_nothing_is_proven(self) -> None:
        with pytest.raises(VerificationError, match=r"ONNX Runtime cannot load it .*self_test: off"):
            try_beside(Session(lambda x: x), GRAPH, none, OTHER_ENGINE)


class TestRepeats:
    def test_another_response(self) -> None:
        runs = count()
        with pytest.raises(LoweringError, match="different response"):
            check_repeats(Session(lambda x: x + next(runs)), SyntheticInputs(), OTHER_ENGINE)


class TestRows:
    def test_each_row_is_computed_once_alone(self) -> None:
        session = Session(lambda x: x * 2, DType.FP32)
        assert find_mixed_rows(session, SyntheticInputs(), OTHER_ENGINE) == ""
        assert session.runs == 5

    def find(self, compute: Compute) -> str:
        return find_mixed_rows(Session(compute, DType.FP32), SyntheticInputs(), OTHER_ENGINE)

    def test_a_row_that_depends_on_the_others(self) -> None:
        assert "a row depends on the others: y: relative L2" in self.find(lambda x: x - x.mean(axis=0))

    def test_a_small_row_beside_a_large_one(self) -> None:
        """As a large request would round a small one away: over all rows the error is small."""

        def quantize(x: np.ndarray) -> np.ndarray:
            step = np.abs(x).max() / np.float32(1e4)
            return np.round(x / step) * step

        assert "a row depends" in self.find(quantize)

    def test_what_takes_zeros_alone_is_asked_for_equal_rows(self) -> None:
        session = Session(lambda x: x.cumsum(axis=0) + 1 if not x.any() else refuse(x))
        assert find_mixed_rows(session, SyntheticInputs(), OTHER_ENGINE) == ""
        session = Session(lambda x: x + len(x) if not x.any() else refuse(x))
        assert "a row depends on the others" in find_mixed_rows(session, SyntheticInputs(), OTHER_ENGINE)

    def test_nobody_knows_of_a_graph_that_refuses_all_requests(self) -> None:
        assert "no valid request is known" in find_mixed_rows(Session(refuse), None, OTHER_ENGINE)

    def test_as_many_as_the_values_say(self) -> None:
        assert self.find(lambda x: x[x > 0.5]).startswith("output 'y' has the shape [")
