"""Checks before a session serves (signature, placement, limits, golden outputs) and replays while it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_session import FakeSession, spec

from graphkiln_backend.engines.base import PLAIN_RUNS, Placement, SessionConfig
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import SignatureError, VerificationError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Adoption, Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.lowering.acceptance import (
    Replay,
    check_golden,
    check_placement,
    check_signature,
    limits_of,
)
from graphkiln_backend.lowering.output_subsets import SubsetSession
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.proof.policy import BF16, FP16, INT8, OTHER_ENGINE, REPLAY
from graphkiln_backend.repository.version import ModelVersion

CONFIG = SessionConfig(engine="engine", device=CPU, threads=1, spin=False, reason="test")


class TestSignature:
    @pytest.fixture
    def promised(self, digits: Path, tmp_path: Path) -> ModelVersion:
        manifest = Manifest.read(digits / "1" / "manifest.json")
        return ModelVersion(graph_path=tmp_path, manifest=manifest, golden=None)

    @pytest.fixture
    def found(self, promised: ModelVersion) -> Signature:
        assert promised.manifest
        return promised.manifest.signature

    def test_subset_has_only_its_outputs(self, promised: ModelVersion, found: Signature) -> None:
        with pytest.raises(SignatureError, match="outputs"):
            check_signature(promised, found, outputs=())
        check_signature(promised, replace(found, outputs=()), outputs=())

    @pytest.mark.parametrize(
        ("side", "change"),
        [
            ("inputs", {"name": "image"}),
            ("inputs", {"dtype": DType.FP16}),
            ("inputs", {"shape": ("batch", 1, 32)}),
            ("outputs", {"name": "scores"}),
            ("outputs", {"dtype": DType.INT64}),
            ("outputs", {"shape": ()}),
        ],
    )
    def test_different_tensor_is_refused(
        self, promised: ModelVersion, found: Signature, side: str, change: dict[str, Any]
    ) -> None:
        (spec,) = getattr(found, side)
        other = replace(spec, **change)
        with pytest.raises(SignatureError, match=f"the {side} of the session") as caught:
            check_signature(promised, replace(found, **{side: (other,)}))
        assert (caught.value.expected, caught.value.got) == (str(spec), str(other))


def placed(products: Mapping[Any, int], *elsewhere: str) -> Placement:
    return Placement(nodes={"CPU": 9}, precision=Precision.FP32, products=products, elsewhere=elsewhere)


class TestPlacement:
    @pytest.mark.parametrize("saved", [Precision.FP16, Precision.BF16])
    def test_half_precision_computed_in_fp32_is_noted(self, saved: Precision) -> None:
        (note,) = check_placement(CONFIG, placed({Precision.FP32: 5}), saved)
        assert note.startswith(f"saved in {saved}, computed in fp32 (9 nodes on CPU; products: 5 in fp32)")


class TestLimits:
    @pytest.mark.parametrize(
        ("saved", "requested", "relative_l2"),
        [
            (Precision.FP32, None, OTHER_ENGINE.relative_l2),
            (Precision.FP32, Precision.FP16, FP16.relative_l2),
            (Precision.FP32, Precision.BF16, BF16.relative_l2),
            (Precision.FP16, None, FP16.relative_l2),
            (Precision.BF16, None, 0.05),
            (Precision.INT8, Precision.INT8, 0.05),
        ],
    )
    def test_limits_are_tight_unless_the_graph_is_lowered(
        self, saved: Precision, requested: Precision | None, relative_l2: float
    ) -> None:
        assert limits_of(saved, replace(CONFIG, precision=requested)).relative_l2 == relative_l2

    @pytest.mark.parametrize(
        ("recorded", "requested", "relative_l2"),
        [
            (False, None, INT8.relative_l2),
            (True, None, 0.05),
            (False, Precision.BF16, BF16.relative_l2),
        ],
    )
    def test_golden_outputs_of_another_model(
        self, recorded: bool, requested: Precision | None, relative_l2: float
    ) -> None:
        """An adopted int8 graph is as far from its reference as int8 may be, not as two engines are from each other."""
        adoption = Adoption(reference="", precision=Precision.INT8, recorded=recorded)
        config = replace(CONFIG, precision=requested)
        assert limits_of(Precision.INT8, config, adoption).relative_l2 == relative_l2


LIMITS = limits_of(Precision.FP32, CONFIG)


class TestGolden:
    @pytest.fixture
    def session(self, add_engine: Any) -> Any:
        engine = add_engine("engine")
        return engine.build(Path("graph"), engine.config)

    def test_samples_run_alone_and_in_the_largest_batch(self, session: Any, golden: GoldenSamples) -> None:
        verification = check_golden(session, golden, LIMITS, 8)
        assert session.batches == [1, 1, 1, 8]
        assert (verification.samples, verification.batch_sizes) == (8, (1, 8))
        assert verification.verdict.startswith("fp32 on engine: error 0 of signal")

    def test_fixed_first_dimension_is_not_repeated(self, add_engine: Any, golden: GoldenSamples) -> None:
        fixed = Signature(
            inputs=(TensorSpec(name="x", dtype=DType.FP32, shape=(3, 3)),),
            outputs=(TensorSpec(name="y", dtype=DType.FP32, shape=(3, 3)),),
        )
        engine = add_engine("fixed", signature=fixed)
        session = engine.build(Path("graph"), engine.config)
        check_golden(session, golden, LIMITS, 8)
        assert session.batches[-1] == 3

    @pytest.mark.parametrize(("factor", "passes"), [(2.0001, True), (2.001, False), (-2.0, False), (np.nan, False)])
    def test_changed_outputs_are_refused(
        self, session: Any, golden: GoldenSamples, factor: float, *, passes: bool
    ) -> None:
        session.engine.factor = factor
        if passes:
            check_golden(session, golden, LIMITS, 4)
        else:
            with pytest.raises(VerificationError, match="the outputs changed"):
                check_golden(session, golden, LIMITS, 4)

    def test_equal_scores_may_swap_ranks(self, add_engine: Any) -> None:
        ranking = Ranking(scores="s", indices="i")
        scores = np.array([[0.5, 0.25, 0.25], [0.9, 0.1, 0.0]], np.float32)
        indices = np.array([[0, 1, 2], [3, 1, 0]], np.int64)
        other = np.array([[0, 2, 1], [3, 1, 0]], np.int64)
        golden = GoldenSamples(
            inputs={"x": np.arange(6, dtype=np.float32).reshape(2, 3)},
            source_outputs={},
            graph_outputs={"s": scores, "i": indices},
        )
        engine = add_engine("ranks")
        session = engine.build(Path("graph"), engine.config)

        def run(feeds: Any) -> Any:
            rows = (feeds["x"][:, 0] // 3).astype(int)
            return {"s": scores[rows], "i": other[rows]}

        session.run = run
        check_golden(session, golden, LIMITS, 2, ranking)
        with pytest.raises(VerificationError):
            check_golden(session, golden, LIMITS, 2)


class TestShuffledBatch:
    @pytest.fixture
    def golden(self) -> GoldenSamples:
        x = np.arange(9, dtype=np.float32).reshape(3, 3)
        return GoldenSamples(inputs={"x": x}, source_outputs={"y": x * 2}, graph_outputs={"y": x * 2})

    def test_swapped_parts_show_only_in_a_shuffled_batch(self, add_engine: Any, golden: GoldenSamples) -> None:
        engine = add_engine("swaps")
        session = engine.build(Path("graph"), engine.config)
        session.run = lambda feeds: {"y": 2 * np.roll(feeds["x"], 3, axis=0)}
        check_golden(session, golden, LIMITS, 6)
        with pytest.raises(VerificationError, match="the outputs changed"):
            check_golden(session, golden, LIMITS, 6, shuffle=True)


X = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
TWO_OUTPUTS = GoldenSamples(inputs={"x": X}, source_outputs={}, graph_outputs={"y": X * 2, "z": X + 1})


def two_outputs(error: float = 0.0) -> FakeSession:
    """Session with two outputs; `z` is wrong by `error`."""

    def compute(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert len(feeds["x"]) == 1
        assert PLAIN_RUNS.get() == (threading.current_thread().name == "replay")
        return {"y": feeds["x"] * 2, "z": feeds["x"] + np.float32(1 + error)}

    signature = Signature(inputs=(spec("x", "batch", 2),), outputs=(spec("y", "batch", 2), spec("z", "batch", 2)))
    return FakeSession(signature, compute)


def replay_of(session: object) -> Replay:
    return Replay.of_golden(session, TWO_OUTPUTS, REPLAY[Precision.FP32])  # type: ignore[arg-type]


def verdict(golden: Replay, outputs: tuple[str, ...]) -> str:
    """Replay in another thread than the one of requests."""
    with ThreadPoolExecutor(1, initializer=lambda: setattr(threading.current_thread(), "name", "replay")) as pool:
        computed = [pool.submit(golden.run, sample, outputs).result() for sample in range(len(golden.samples))]
    return golden.judge(computed).verdict


def test_replay_passes_over_all_samples() -> None:
    golden = replay_of(two_outputs())
    assert golden.output_subsets == (("y", "z"),)
    assert "3 samples" in verdict(golden, ("y", "z"))


def test_replay_names_the_wrong_output() -> None:
    golden = replay_of(two_outputs(error=0.1))
    assert verdict(golden, ("y",))
    with pytest.raises(VerificationError, match="z: relative L2"):
        verdict(golden, ("y", "z"))


def test_graphs_of_output_subsets_are_replayed() -> None:
    with SubsetSession(two_outputs(), lambda _: two_outputs(error=0.1)) as session:  # type: ignore[arg-type, return-value]
        session.run({"x": X[:1]}, ("z",))
        session.settle()
        golden = replay_of(session)
        assert golden.output_subsets == (("y", "z"), ("z",))
        assert verdict(golden, ("y", "z"))
        with pytest.raises(VerificationError):
            verdict(golden, ("z",))


def counting(compute: Callable[[int, np.ndarray], np.ndarray]) -> FakeSession:
    """Session that computes by the number of the run."""
    signature = Signature(inputs=(spec("x", "batch", 3),), outputs=(spec("y", "batch", 3),))
    session = FakeSession(signature, lambda feeds: {"y": compute(len(session.feeds), feeds["x"])})
    return session


def record(session: Any) -> Replay | None:
    feeds = SyntheticInputs().feeds(session.signature)
    return Replay.recorded(session, REPLAY[Precision.FP32], feeds)  # type: ignore[arg-type]


class TestRecordedReplay:
    def test_changed_outputs_are_refused(self) -> None:
        session = counting(lambda run, x: x * (2 if run < 5 else 2.01))
        recorded = record(session)
        assert recorded is not None
        assert recorded.output_subsets == (("y",),)
        assert recorded.judge([recorded.run(0, ("y",))])
        with pytest.raises(VerificationError):
            recorded.judge([recorded.run(0, ("y",))])

    @pytest.mark.parametrize("last", [2, 3])
    def test_random_graph_is_not_replayed(self, last: int) -> None:
        assert record(counting(lambda run, x: x * np.float32(1 + 1e-6 * (run == last)))) is None
