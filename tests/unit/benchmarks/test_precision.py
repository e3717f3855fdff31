"""The comparison of `engine: auto` with set-ups by hand, inputs, and parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import precision_speed
import pytest
from precision_speed import AUTO_BF16, ORT_FP32, OV_BF16, OV_FP32, Rounds

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.signature import Signature, TensorSpec

BY_HAND = (ORT_FP32, OV_FP32, OV_BF16)


@pytest.mark.parametrize(
    ("auto", "verdict"),
    [
        ([19.5, 9.8, 19.5], "within 3% of openvino fp32"),
        ([19.0, 9.5, 19.0], "5% behind openvino fp32"),
    ],
)
def test_auto_is_compared_with_the_best_by_hand_round_by_round(auto: list[float], verdict: str) -> None:
    measured = {
        ORT_FP32: Rounds(rates=[10.0, 5.0, 10.0]),
        OV_FP32: Rounds(rates=[20.0, 10.0, 20.0]),
        OV_BF16: Rounds(rates=[15.0, 8.0, 15.0]),
        AUTO_BF16: Rounds(rates=auto),
    }
    assert precision_speed.judge(AUTO_BF16, BY_HAND, measured, {name: name for name in measured}) == verdict


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures that were measured; there are two of them."""
    found: list[str] = []

    def measure(name: str, *_: object) -> list[dict[str, object]]:
        found.append(name)
        if name == "fails":
            raise KeyboardInterrupt
        return [{"model": name, "number": len(found)}]

    monkeypatch.setattr(precision_speed, "PARTS", tmp_path / "parts")
    monkeypatch.setattr(precision_speed, "ARCHITECTURES", {"one": "", "two": ""})
    monkeypatch.setattr(precision_speed, "_measure_architecture", measure)
    return found


def test_a_part_alone_is_measured_again_and_the_rest_stays(measured: list[str]) -> None:
    precision_speed.benchmark_precision(5, 3.0)
    rows = precision_speed.benchmark_precision(5, 3.0, "one")
    assert measured == ["one", "two", "one"]
    assert [(row["model"], row["number"]) for row in rows] == [("one", 3), ("two", 2)]
    assert json.loads((precision_speed.PARTS / "one.json").read_text())["conditions"]["rounds"] == 5


@pytest.mark.parametrize(
    ("dtype", "shape", "fits"),
    [
        (DType.INT64, ("batch", 128), lambda x: x.min() >= 0 and x.max() < 30_000 and len(np.unique(x)) > 100),
        (DType.FP32, ("batch", 3, 30, 20), lambda x: np.abs(np.diff(x)).mean() < 0.5 * x.std()),  # smooth
    ],
    ids=["tokens", "images"],
)
def test_synthetic_inputs(dtype: DType, shape: tuple[int | str, ...], fits: Callable[[np.ndarray], bool]) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", dtype=dtype, shape=shape),), outputs=())
    (x,) = precision_speed.synthetic_feeds(signature, 4, np.random.default_rng(1)).values()
    assert (x.shape, x.dtype) == ((4, *shape[1:]), dtype.numpy)
    assert fits(x)


def test_an_unknown_part_is_refused(measured: list[str]) -> None:
    with pytest.raises(SystemExit, match="no part three; there are one, two"):
        precision_speed.benchmark_precision(5, 3.0, "three")
    assert measured == []


@pytest.mark.parametrize(
    ("openvino", "verdict"),
    [
        (11.0, "is openvino fp32"),
        (9.9, "within 3% of onnxruntime fp32"),
        (8.0, "20% behind onnxruntime fp32"),
    ],
)
def test_a_set_up_that_computes_like_auto_counts_for_it(openvino: float, verdict: str) -> None:
    measured = {ORT_FP32: Rounds(rates=[10.0]), OV_FP32: Rounds(rates=[openvino]), AUTO_BF16: Rounds(rates=[5.0])}
    made = {ORT_FP32: "one", OV_FP32: "other", AUTO_BF16: "other"}
    assert precision_speed.judge(AUTO_BF16, BY_HAND, measured, made) == verdict
