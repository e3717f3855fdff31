"""Golden samples one at a time: which outputs, which samples, and the verdict over all of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from graphkiln_backend.engines.base import PLAIN_RUNS
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.output_subsets import SubsetSession
from graphkiln_backend.lowering.replaying import GoldenReplay
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


def replay(session: object) -> GoldenReplay:
    return GoldenReplay(session=session, golden=GOLDEN, limits=REPLAY[Precision.FP32])  # type: ignore[arg-type]


def verdict(golden: GoldenReplay, outputs: tuple[str, ...]) -> str:
    """In a thread of its own, where what a runtime keeps by thread is left alone."""
    with ThreadPoolExecutor(1, initializer=lambda: setattr(threading.current_thread(), "name", "replay")) as pool:
        computed = [pool.submit(golden.run, sample, outputs).result() for sample in range(golden.samples)]
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


def test_the_graphs_of_requested_parts_are_replayed_too() -> None:
    with SubsetSession(Session(), lambda _: Session(error=0.1)) as session:  # type: ignore[arg-type, return-value]
        session.run({"x": X[:1]}, ("z",))
        session.settle()
        golden = replay(session)
        assert golden.output_subsets == (("y", "z"), ("z",))
        assert verdict(golden, ("y", "z"))
        with pytest.raises(VerificationError):
            verdict(golden, ("z",))


def test_a_part_that_the_whole_graph_serves_is_replayed_once() -> None:
    with SubsetSession(Session(), lambda _: None) as session:  # type: ignore[arg-type]
        session.run({"x": X[:1]}, ("z",))
        session.settle()
        assert replay(session).output_subsets == (("y", "z"),)
