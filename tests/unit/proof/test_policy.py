"""The rows of the policy, and how they relate."""

from __future__ import annotations

import math

import pytest

from graphkiln_backend.graph.precision import SAVED, Precision
from graphkiln_backend.proof.policy import (
    BF16,
    BY_PRECISION,
    EXPORT,
    FP16,
    REPLAY,
    Limits,
    beside_reference,
    export_limits,
    fp64_can_decide,
    gradient_limits,
    limits_beside_fp64,
)

ROWS = [*BY_PRECISION.values(), *REPLAY.values()]


def test_each_precision_has_both_rows() -> None:
    assert set(BY_PRECISION) == set(REPLAY) == set(SAVED)


def test_when_fp64_can_decide() -> None:
    """Both within what `limits_beside_fp64` allows at most: the export by the whole row, its source by half of it."""
    most = REPLAY[Precision.FP32].relative_l2
    assert limits_beside_fp64(EXPORT, most / 2)
    assert fp64_can_decide(1.5 * most)
    assert not fp64_can_decide(3 * most)


@pytest.mark.parametrize(
    ("precision", "significant_bits"), [(Precision.FP32, 24), (Precision.FP16, 11), (Precision.BF16, 8)]
)
def test_rows_suit_the_rounding_of_the_type(precision: Precision, significant_bits: int) -> None:
    """One rounding is off by half a unit in the last place; a deep graph makes that some ten times as much."""
    rounding = 2.0**-significant_bits
    assert 3 * rounding < BY_PRECISION[precision].relative_l2 < 300 * rounding


def test_replay_rows_are_at_most_as_loose() -> None:
    for precision in (Precision.FP16, Precision.BF16, Precision.INT8):
        assert REPLAY[precision].relative_l2 <= BY_PRECISION[precision].relative_l2


def test_rows_beside_a_reference() -> None:
    """Another engine at fp32 rounds in another order; a lower precision has the same row whoever lowered the graph."""
    assert beside_reference(Precision.FP32).relative_l2 == REPLAY[Precision.FP32].relative_l2
    for precision in SAVED:
        row = beside_reference(precision)
        assert row.name == f"adopted {precision}"
        assert row.relative_l2 >= BY_PRECISION[precision].relative_l2
    assert beside_reference(Precision.INT8).metric_drop == BY_PRECISION[Precision.INT8].metric_drop


@pytest.mark.parametrize("limits", ROWS)
def test_negative_control_is_outside_every_row(limits: Limits) -> None:
    """It is perturbed by three times the limit, which must still be an error that one can tell from 100%."""
    assert 0 < 3 * limits.relative_l2 < 1


class TestGradients:
    @pytest.mark.parametrize("limits", [EXPORT, FP16, BF16])
    def test_gradients_have_five_times_the_limit(self, limits: Limits) -> None:
        row = gradient_limits(limits, 0.0)
        assert row.name == f"{limits.name} gradient"
        assert row.relative_l2 == pytest.approx(5 * limits.relative_l2)
        assert row.worst_element == pytest.approx(5 * (limits.worst_element or math.nan))
        assert row.top1_agreement == limits.top1_agreement

    def test_noise_of_gradients(self) -> None:
        row = gradient_limits(EXPORT, 1e-3)
        assert row.relative_l2 == pytest.approx(5e-3)
        assert row.worst_element is None
        assert "the noise of fp32 changes by 1.0e-03" in row.name


class TestBesideFp64:
    def test_limit_beside_fp64(self) -> None:
        row = limits_beside_fp64(EXPORT, 1e-5)
        assert row
        assert row.relative_l2 == pytest.approx(2e-5)
        assert row.worst_element == EXPORT.worst_element
        assert "1.0e-05 off" in row.name

    @pytest.mark.parametrize("noise", [0.0, 4e-6, 6e-5, math.inf, math.nan])
    def test_no_limit_beside_fp64(self, noise: float) -> None:
        assert limits_beside_fp64(EXPORT, noise) is None


class TestSourcesInHalfPrecision:
    @pytest.mark.parametrize(("precision", "rounding"), [(Precision.FP16, 2**-11), (Precision.BF16, 2**-8)])
    def test_limit_grows_with_the_depth(self, precision: Precision, rounding: float) -> None:
        limits = [export_limits(precision, depth) for depth in (0, 1, 4)]
        assert [row.relative_l2 for row in limits] == [4 * rounding, 4 * rounding, 8 * rounding]
        assert limits[0].name == f"export {precision}"

    @pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
    def test_limit_is_bounded_by_the_row(self, precision: Precision) -> None:
        deep, row = export_limits(precision, 10_000), BY_PRECISION[precision]
        assert (deep.relative_l2, deep.worst_element) == (row.relative_l2, row.worst_element)
