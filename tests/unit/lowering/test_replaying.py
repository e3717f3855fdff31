"""Golden samples one at a time: which outputs, which samples, and the verdict over all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from graphkiln_backend.engines.base import PLAIN_RUNS
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError, VerificationError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.acceptance import Replay
from graphkiln_backend.lowering.output_subsets import SubsetSession
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.proof.policy import REPLAY

X = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
GOLDEN = GoldenSamples(inputs={"x": X}, source_outputs={}, graph_outputs={"y": X * 2, "z": X + 1})


class Session:
    """Two outputs, one of them wrong by `error`."""

    def __init__(self, error: float = 0.0) -> None:
        def spec(name: str) -> TensorSpec:
            return TensorSpec(name=name, dtype=DType.FP32, shape=("batch", 2))

        self.signature = Signature(inputs=(spec("x"),), outputs=(spec("y"), spec("z")))
        self.error = error

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        assert len(feeds["x"]) == 1
        assert PLAIN_RUNS.get() == (threading.current_thread().name == "replay")
        computed = {"y": feeds["x"] * 2, "z": feeds["x"] + np.float32(1 + self.error)}
        return {name: computed[name] for name in outputs or computed}

    def close(self) -> None:
        pass


def replay(session: object) -> Replay:
    return Replay.of_golden(session, GOLDEN, REPLAY[Precision.FP32])  # type: ignore[arg-type]


def verdict(golden: Replay, outputs: tuple[str, ...]) -> str:
    """In a thread of its own, where what a runtime keeps by thread is left alone."""
    with ThreadPoolExecutor(1, initializer=lambda: setattr(threading.current_thread(), "name", "replay")) as pool:
        computed = [pool.submit(golden.run, sample, outputs).result() for sample in range(len(golden.samples))]
    return golden.judge(computed).verdict


def test_right_outputs_pass_over_all_samples() -> None:
    golden = replay(Session())
    assert golden.output_subsets == (("y", "z"),)
    assert "3 samples" in verdict(golden, ("y", "z"))


def test_wrong_outputs_are_named() -> None:
    golden = replay(Session(error=0.1))
    assert verdict(golden, ("y",))
    with pytest.raises(VerificationError, match="z: relative L2"):
        verdict(golden, ("y", "z"))


class TestBatches:
    """Of sessions that compute parts of a batch on their own."""

    class Halves(Session):
        """Computes two halves of a batch; `swapped`: gives them back in the wrong order."""

        swapped = False

        def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
            x = feeds["x"]
            x = np.roll(x, len(x) // 2, axis=0) if self.swapped else x
            return {name: {"y": x * 2, "z": x + 1}[name] for name in outputs or ("y", "z")}

    def test_a_batch_shows_what_a_sample_alone_does_not(self) -> None:
        session = self.Halves()
        alone = replay(session)
        both = Replay.of_golden(session, GOLDEN, REPLAY[Precision.FP32], together=6)  # type: ignore[arg-type]
        assert [len(feeds["x"]) for feeds in both.samples] == [1, 1, 1, 6]
        assert "batch sizes 1, 6" in verdict(both, ("y", "z"))
        session.swapped = True
        assert verdict(alone, ("y", "z"))
        with pytest.raises(VerificationError, match="the outputs changed"):
            verdict(both, ("z",))


def test_the_graphs_of_requested_parts_are_replayed_too() -> None:
    with SubsetSession(Session(), lambda _: Session(error=0.1)) as session:  # type: ignore[arg-type, return-value]
        session.run({"x": X[:1]}, ("z",))
        session.settle()
        golden = replay(session)
        assert golden.output_subsets == (("y", "z"), ("z",))
        assert verdict(golden, ("y", "z"))
        with pytest.raises(VerificationError):
            verdict(golden, ("z",))


class Recorded:
    """Computes what it is told to, and counts."""

    def __init__(self, compute: Callable[[int, np.ndarray], np.ndarray], dtype: DType = DType.FP32) -> None:
        spec = TensorSpec(name="x", dtype=dtype, shape=("batch", 3))
        self.signature = Signature(inputs=(spec,), outputs=(TensorSpec(name="y", dtype=dtype, shape=("batch", 3)),))
        self._compute = compute
        self.runs = 0

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        assert outputs in {None, ("y",)}
        self.runs += 1
        return {"y": self._compute(self.runs, feeds["x"])}


def record(session: Any) -> Replay | None:
    feeds = SyntheticInputs().feeds(session.signature)
    return Replay.recorded(session, REPLAY[Precision.FP32], feeds)  # type: ignore[arg-type]


class TestRecorded:
    def test_what_is_computed_now_must_be_computed_later(self) -> None:
        session = Recorded(lambda run, x: x * (2 if run < 5 else 2.01))
        recorded = record(session)
        assert recorded is not None
        assert recorded.output_subsets == (("y",),)
        assert recorded.judge([recorded.run(0, ("y",))])
        with pytest.raises(VerificationError):
            recorded.judge([recorded.run(0, ("y",))])

    @pytest.mark.parametrize("last", [2, 3])
    def test_a_graph_that_computes_otherwise_each_time_is_not_replayed(self, last: int) -> None:
        assert record(Recorded(lambda run, x: x * np.float32(1 + 1e-6 * (run == last)))) is None

    def test_a_graph_that_does_not_run_on_noise_is_not_replayed(self) -> None:
        def fail(_: int, __: np.ndarray) -> np.ndarray:
            raise ExecutionError("out of range")

        assert record(Recorded(fail)) is None
