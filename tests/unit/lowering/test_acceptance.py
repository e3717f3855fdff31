"""What a session must show before it may serve: tensors, placement, limits, golden outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphkiln_backend.engines.base import Placement, SessionConfig
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import SignatureError, VerificationError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.lowering.acceptance import (
    check_golden,
    check_placement,
    check_signature,
    limits_of,
)
from graphkiln_backend.proof.policy import BF16, FP16, OTHER_ENGINE
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

    def test_a_part_has_the_outputs_that_it_was_made_for(self, promised: ModelVersion, found: Signature) -> None:
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
    def test_other_tensors_are_refused(
        self, promised: ModelVersion, found: Signature, side: str, change: dict[str, Any]
    ) -> None:
        (spec,) = getattr(found, side)
        other = replace(spec, **change)
        with pytest.raises(SignatureError, match=f"the {side} of the session") as caught:
            check_signature(promised, replace(found, **{side: (other,)}))
        assert (caught.value.expected, caught.value.got) == (str(spec), str(other))


def placed(products: Mapping[Any, int], *elsewhere: str) -> Placement:
    return Placement(nodes={"CPU": 9}, precision=Precision.FP32, products=products, elsewhere=elsewhere)


class TestCheckingPlacement:
    @pytest.mark.parametrize(
        ("requested", "computed"),
        [(precision, precision) for precision in (Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8)],
    )
    def test_what_was_requested_and_ran_is_accepted(self, requested: Precision, computed: Precision) -> None:
        config = replace(CONFIG, precision=requested)
        assert check_placement(config, placed({computed: 1, Precision.FP32: 5}), Precision.FP32) == ()

    @pytest.mark.parametrize("saved", [Precision.FP16, Precision.BF16])
    def test_half_precision_that_is_computed_in_fp32_is_said(self, saved: Precision) -> None:
        (note,) = check_placement(CONFIG, placed({Precision.FP32: 5}), saved)
        assert note.startswith(f"saved in {saved}, computed in fp32 (9 nodes on CPU; products: 5 in fp32)")


class TestLimits:
    @pytest.mark.parametrize(
        ("saved", "requested", "relative_l2"),
        [
            (Precision.FP32, None, OTHER_ENGINE.relative_l2),
            (Precision.FP32, Precision.FP32, OTHER_ENGINE.relative_l2),
            (Precision.FP32, Precision.FP16, FP16.relative_l2),
            (Precision.FP32, Precision.BF16, BF16.relative_l2),
            (Precision.FP16, None, FP16.relative_l2),
            (Precision.FP16, Precision.FP16, FP16.relative_l2),
            (Precision.BF16, None, 0.05),
            (Precision.BF16, Precision.BF16, 0.05),
            (Precision.INT8, None, 0.05),
            (Precision.INT8, Precision.INT8, 0.05),
        ],
    )
    def test_are_tight_where_nothing_is_lowered(
        self, saved: Precision, requested: Precision | None, relative_l2: float
    ) -> None:
        assert limits_of(saved, replace(CONFIG, precision=requested)).relative_l2 == relative_l2


LIMITS = limits_of(Precision.FP32, CONFIG)


class TestReplay:
    @pytest.fixture
    def session(self, add_engine: Any) -> Any:
        engine = add_engine("engine")
        return engine.build(Path("graph"), engine.config)

    def test_samples_run_one_by_one_and_in_the_largest_batch(self, session: Any, golden: GoldenSamples) -> None:
        verification = check_golden(session, golden, LIMITS, 8)
        assert session.batches == [1, 1, 1, 8]
        assert (verification.samples, verification.batch_sizes) == (8, (1, 8))
        assert verification.verdict.startswith("fp32 on engine: error 0 of signal")

    def test_a_first_dimension_that_does_not_vary_is_not_stretched(
        self, add_engine: Any, golden: GoldenSamples
    ) -> None:
        fixed = Signature(
            inputs=(TensorSpec(name="x", dtype=DType.FP32, shape=(3, 3)),),
            outputs=(TensorSpec(name="y", dtype=DType.FP32, shape=(3, 3)),),
        )
        engine = add_engine("fixed", signature=fixed)
        session = engine.build(Path("graph"), engine.config)
        check_golden(session, golden, LIMITS, 8)
        assert session.batches[-1] == 3

    @pytest.mark.parametrize(("factor", "passes"), [(2.0001, True), (2.001, False), (-2.0, False), (np.nan, False)])
    def test_outputs_must_be_those_of_the_saved_graph(
        self, session: Any, golden: GoldenSamples, factor: float, *, passes: bool
    ) -> None:
        session.engine.factor = factor
        if passes:
            check_golden(session, golden, LIMITS, 4)
        else:
            with pytest.raises(VerificationError, match="the outputs changed"):
                check_golden(session, golden, LIMITS, 4)

    @pytest.mark.parametrize("wrong", [1, 8])
    def test_at_every_size(self, session: Any, golden: GoldenSamples, wrong: int) -> None:
        run = session.run

        def sometimes(feeds: Any, outputs: Any = None) -> Any:
            session.engine.factor = 3.0 if len(feeds["x"]) == wrong else 2.0
            return run(feeds, outputs)

        session.run = sometimes
        with pytest.raises(VerificationError):
            check_golden(session, golden, LIMITS, 8)

    def test_a_graph_that_ranks_its_classes_may_swap_equal_ones(self, add_engine: Any) -> None:
        """Two classes of the same score: which one comes first is no difference."""
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


class TestPartsOfABatch:
    """Sessions that compute parts of a batch on their own, and may mix them up."""

    @pytest.fixture
    def golden(self) -> GoldenSamples:
        x = np.arange(9, dtype=np.float32).reshape(3, 3)
        return GoldenSamples(inputs={"x": x}, source_outputs={"y": x * 2}, graph_outputs={"y": x * 2})

    def test_a_session_that_swaps_them_is_noticed_by_samples_in_a_drawn_order_alone(
        self, add_engine: Any, golden: GoldenSamples
    ) -> None:
        engine = add_engine("swaps")
        session = engine.build(Path("graph"), engine.config)
        session.run = lambda feeds: {"y": 2 * np.roll(feeds["x"], 3, axis=0)}
        check_golden(session, golden, LIMITS, 6)
        with pytest.raises(VerificationError, match="the outputs changed"):
            check_golden(session, golden, LIMITS, 6, shuffle=True)
