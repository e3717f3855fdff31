"""The numeric policy: what passes, what does not, and that the check can tell the two apart."""

from __future__ import annotations

from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.proof import comparison
from graphkiln_backend.proof.comparison import OutputError, compare, prove
from graphkiln_backend.proof.policy import BF16, EXPORT, FP16, INT8, OTHER_ENGINE, Limits

REFERENCE = {"y": np.random.default_rng(1).normal(size=(8, 10)).astype(np.float32), "class": np.arange(8)}


def perturbed(scale: float) -> dict[str, np.ndarray]:
    return {**REFERENCE, "y": (REFERENCE["y"].astype(np.float64) * (1 + scale)).astype(np.float32)}


def test_equal_outputs_pass() -> None:
    verification = prove(REFERENCE, REFERENCE, EXPORT, batch_sizes=(1, 3))
    assert verification.relative_l2 == 0
    assert verification.samples == 8
    assert verification.batch_sizes == (1, 3)
    assert verification.relative_l2_limit == EXPORT.relative_l2
    assert verification.verdict.endswith("PASS")


@pytest.mark.parametrize("limits", [EXPORT, OTHER_ENGINE, FP16, BF16, INT8])
def test_limit_of_each_row(limits: Limits) -> None:
    prove(REFERENCE, perturbed(limits.relative_l2 * 0.5), limits, batch_sizes=(1,))
    with pytest.raises(VerificationError, match="FAIL"):
        prove(REFERENCE, perturbed(limits.relative_l2 * 1.5), limits, batch_sizes=(1,))


def test_one_wrong_element() -> None:
    reference = {"y": np.ones((1000, 1000), np.float32)}
    wrong = {"y": reference["y"].copy()}
    wrong["y"][3, 5] += 0.005
    assert compare(reference, wrong)[0].relative_l2 < EXPORT.relative_l2
    with pytest.raises(VerificationError):
        prove(reference, wrong, EXPORT, batch_sizes=(1,))


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"class": REFERENCE["class"]}, "y: is missing"),
        ({**REFERENCE, "z": np.ones(1)}, "z: is not in the reference"),
        ({**REFERENCE, "y": REFERENCE["y"][:, :9]}, "y: is float32"),
        ({**REFERENCE, "y": REFERENCE["y"].astype(np.float64)}, "y: is float64"),
        ({**REFERENCE, "y": np.full_like(REFERENCE["y"], np.nan)}, "y: has NaN or Inf"),
        ({**REFERENCE, "y": np.full_like(REFERENCE["y"], np.inf)}, "y: has NaN or Inf"),
        ({**REFERENCE, "class": REFERENCE["class"] + 1}, "class: 100.00% of the elements differ"),
        ({**REFERENCE, "y": np.roll(REFERENCE["y"], 1, axis=0)}, "y: relative L2"),
    ],
)
def test_every_kind_of_change(outputs: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(VerificationError) as caught:
        prove(REFERENCE, outputs, INT8, batch_sizes=(1,))
    assert words in str(caught.value)


def test_share_of_differing_decisions() -> None:
    reference = {"class": np.arange(1000)}
    flipped = {"class": np.where(np.arange(1000) < 15, -1, reference["class"])}
    assert compare(reference, flipped)[0].within(INT8)
    assert not compare(reference, flipped)[0].within(BF16)


def test_reference_of_zeros() -> None:
    zeros = {"y": np.zeros((2, 2), np.float32)}
    prove(zeros, zeros, EXPORT, batch_sizes=(1,))
    with pytest.raises(VerificationError):
        prove(zeros, {"y": np.full((2, 2), 1e-30, np.float32)}, EXPORT, batch_sizes=(1,))


def test_negative_control_catches_a_blind_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(reference: dict[str, np.ndarray], _: object) -> tuple[comparison.OutputError, ...]:
        return tuple(comparison.OutputError(name=name, relative_l2=0.0, worst_element=0.0) for name in reference)

    monkeypatch.setattr(comparison, "compare", blind)
    with pytest.raises(VerificationError, match="negative control passed on y"):
        prove(REFERENCE, REFERENCE, EXPORT, batch_sizes=(1,))


class TestFigures:
    """Against the formulas, written out once more."""

    @given(
        scale=st.floats(1e-3, 1e3),
        shape=st.sampled_from([(1,), (7,), (2, 3), (1, 4, 5)]),
        noise=st.floats(1e-4, 1.0),
    )
    def test_relative_l2_and_worst_element(self, scale: float, shape: tuple[int, ...], noise: float) -> None:
        generator = np.random.default_rng(5)
        reference = generator.normal(size=shape) * scale
        judged = reference + generator.normal(size=shape) * scale * noise
        error = compare({"y": reference}, {"y": judged})[0]
        difference = [abs(a - b) for a, b in zip(judged.ravel(), reference.ravel(), strict=True)]
        length = sum(value**2 for value in reference.ravel()) ** 0.5
        rms = length / reference.size**0.5
        assert error.relative_l2 == pytest.approx(sum(d**2 for d in difference) ** 0.5 / length)
        worst = max(d / (abs(r) + rms) for d, r in zip(difference, reference.ravel(), strict=True))
        assert error.worst_element == pytest.approx(worst)

    @pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.FP32, DType.FP64])
    def test_every_float_type_is_measured_in_fp64(self, dtype: DType) -> None:
        reference = np.full(1000, 1.0).astype(dtype.numpy)
        judged = reference.copy()
        judged[0] = judged[0] * 2
        error = compare({"y": reference}, {"y": judged})[0]
        assert error.relative_l2 == pytest.approx(1000**-0.5)
        assert error.worst_element == pytest.approx(0.5)

    @pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e160, 1e300])
    def test_values_whose_squares_overflow(self, scale: float) -> None:
        reference = np.array([1.0, 2.0, -2.0]) * scale
        error = compare({"y": reference}, {"y": np.array([1.0, 2.0, -1.0]) * scale})[0]
        assert error.relative_l2 == pytest.approx(1 / 3, rel=1e-3)
        assert error.worst_element == pytest.approx(1 / (2 + 3**0.5), rel=1e-3)

    @pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.uint8])
    def test_integers_are_counted(self, dtype: type[np.generic]) -> None:
        reference = np.array([0, 1, 1, 0]).astype(dtype)
        judged = np.array([0, 1, 0, 0]).astype(dtype)
        assert compare({"y": reference}, {"y": judged})[0].disagreement == 0.25


class TestNonFinite:
    NAN, INF = np.nan, np.inf

    @pytest.mark.parametrize(
        ("expected", "computed"),
        [(INF, -INF), (-INF, INF), (NAN, INF), (INF, NAN), (1.0, NAN), (NAN, 1.0), (-INF, -1e30)],
    )
    def test_nan_and_inf_equal_only_themselves(self, expected: float, computed: float) -> None:
        reference, judged = ({"y": np.array([1.0, value, 2.0])} for value in (expected, computed))
        error = compare(reference, judged)[0]
        assert "has NaN or Inf" in error.fault
        assert not error.within(INT8)


def one_hot(classes: list[int]) -> AnyArray:
    return np.eye(4, dtype=np.float32)[classes] * np.float32(10)


class TestDecisions:
    REFERENCE: ClassVar = {"scores": one_hot([0, 1, 2, 3] * 25)}

    def flipped(self, count: int) -> dict[str, AnyArray]:
        """Scores whose error is inside int8's limit where few samples change their class."""
        scores = self.REFERENCE["scores"].copy()
        scores[:count] = scores[:count, ::-1]
        return {"scores": scores}

    def test_top_1_agreement(self) -> None:
        verification = prove(self.REFERENCE, self.flipped(2), INT8, batch_sizes=(1,), noise=1e-6)
        assert "top-1 agreement 98/100" in verification.verdict
        with pytest.raises(VerificationError, match=r"FAIL: top-1 agreement 97/100"):
            prove(self.REFERENCE, self.flipped(3), INT8, batch_sizes=(1,), noise=1e-6)

    def test_labels_may_excuse_flips(self) -> None:
        judged = self.flipped(4)
        right_now = judged["scores"].argmax(axis=1)
        verification = prove(self.REFERENCE, judged, INT8, batch_sizes=(1,), noise=1e-6, targets=right_now)
        assert "accuracy 100.0% instead of 96.0%" in verification.verdict

    @pytest.mark.parametrize(
        "output",
        [np.ones((100, 1), np.float32), np.ones(100, np.float32), np.ones((100, 2, 2), np.float32), np.arange(100)],
        ids=["one class", "no classes", "an image", "integers"],
    )
    def test_outputs_without_decisions(self, output: AnyArray) -> None:
        reference = {"y": output}
        assert "top-1" not in prove(reference, reference, INT8, batch_sizes=(1,), noise=1e-6).verdict

    @pytest.mark.parametrize(
        "judged", [{"scores": one_hot([0] * 99)}, {"scores": one_hot([0] * 100)[:, :3]}, {}, {"other": one_hot([0])}]
    )
    def test_outputs_of_another_shape(self, judged: dict[str, AnyArray]) -> None:
        with pytest.raises(VerificationError, match="scores: is"):
            prove(self.REFERENCE, judged, INT8, batch_sizes=(1,), noise=1e-6)


class TestWithin:
    @pytest.mark.parametrize(
        ("error", "limits", "passes"),
        [
            (OutputError(name="y", relative_l2=1e-2, worst_element=5e-2), FP16, True),
            (OutputError(name="y", relative_l2=1.01e-2, worst_element=0), FP16, False),
            (OutputError(name="y", relative_l2=0, worst_element=5.1e-2), FP16, False),
            (OutputError(name="y", relative_l2=0, worst_element=1e9), INT8, True),
            (OutputError(name="y", relative_l2=0, worst_element=0, disagreement=0.005), FP16, True),
            (OutputError(name="y", relative_l2=0, worst_element=0, disagreement=0.006), FP16, False),
            (OutputError(name="y", relative_l2=0, worst_element=0, fault="is missing"), INT8, False),
            (OutputError(name="y", relative_l2=np.nan, worst_element=0), INT8, False),
        ],
    )
    def test_limits_of_all_figures(self, error: OutputError, limits: Limits, passes: bool) -> None:
        assert error.within(limits) is passes


class TestNegativeControl:
    def test_outputs_that_cannot_be_perturbed(self) -> None:
        """Zeros times anything are zeros, and integers stay integers."""
        reference = {"zeros": np.zeros(4, np.float32), "classes": np.arange(4)}
        assert prove(reference, reference, EXPORT, batch_sizes=(1,)).verdict.endswith("PASS")

    def test_reference_of_nan(self) -> None:
        reference = {"x": np.ones(2, np.float32), "y": np.full(2, np.nan, np.float32)}
        with pytest.raises(VerificationError, match="the samples prove nothing: y is NaN for each of them"):
            prove(reference, reference, EXPORT, batch_sizes=(1,))


class TestHalfPrecision:
    @pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.FP32, DType.FP64])
    def test_extreme_values_of_a_type(self, dtype: DType) -> None:
        """Scaled, the smallest would be rounded back and the largest become infinite."""
        info = ml_dtypes.finfo(dtype.numpy)
        for number in (info.smallest_subnormal, info.max, -info.max):
            reference = {"y": np.full(5, number, dtype.numpy)}
            prove(reference, reference, FP16, batch_sizes=(1,))

    @pytest.mark.parametrize(("dtype", "rounding"), [(DType.FP16, 2**-11), (DType.BF16, 2**-8)])
    def test_rounding_steps_of_a_type(self, dtype: DType, rounding: float) -> None:
        exact = REFERENCE["y"].astype(np.float64)
        reference = {"y": exact.astype(dtype.numpy)}
        prove(reference, {"y": (exact * (1 + rounding)).astype(dtype.numpy)}, EXPORT, batch_sizes=(1,))
        with pytest.raises(VerificationError):
            prove(reference, {"y": (exact * (1 + 10 * rounding)).astype(dtype.numpy)}, EXPORT, batch_sizes=(1,))


class TestWithoutNumbers:
    """Outputs that are classes, truths or text."""

    ARRAYS = (
        np.array([[0, 2], [1, 5]]),
        np.array([[0, 2], [1, 255]], np.uint8),
        np.array([True, False]),
        np.array(["a", "b"], np.object_),
        np.array([b"a", b"b"], np.object_),
    )

    @pytest.mark.parametrize("array", ARRAYS, ids=["int64", "uint8", "bool", "text", "bytes"])
    def test_blind_comparison_is_caught(self, array: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
        prove({"y": array}, {"y": array}, EXPORT, batch_sizes=(1,))
        monkeypatch.setattr(OutputError, "within", lambda *_: True)
        with pytest.raises(VerificationError, match="negative control passed on y"):
            prove({"y": array}, {"y": array}, EXPORT, batch_sizes=(1,))

    def test_equal_outputs_of_all_samples_are_noted(self) -> None:
        same = np.array([3, 3, 3])
        verdict = prove({"y": same}, {"y": same}, EXPORT, batch_sizes=(1,)).verdict
        assert "all with the same outputs" in verdict
        other = np.array([3, 3, 4])
        assert "the same outputs" not in prove({"y": other}, {"y": other}, EXPORT, batch_sizes=(1,)).verdict
