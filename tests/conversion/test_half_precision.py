"""ONNX files in fp16, bf16 and fp64: converted, proven at the limits of their type, and replayed."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from converting import Convert
from half_graphs import NUMPY, write_classifier
from onnx import TensorProto

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import ConversionError, LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.proof.policy import REPLAY
from graphkiln_backend.repository.version import read_version
from graphkiln_converters.verify import verify

F32, F16, BF16, F64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE


@pytest.mark.parametrize(
    ("types", "precision", "limit"),
    [
        ((F16, F16), Precision.FP16, 1e-2),
        ((F16, F32), Precision.FP16, 1e-2),
        ((BF16, BF16), Precision.BF16, 1e-1),
        ((BF16, F32), Precision.BF16, 1e-1),
        ((F32, BF16), Precision.FP32, 2e-2),
        ((F64, F64), Precision.FP32, 1e-5),
    ],
)
def test_files_of_16_and_64_bits(
    run: Convert, tmp_path: Path, types: tuple[int, int], precision: Precision, limit: float
) -> None:
    inside, border = types
    version = read_version(run(str(write_classifier(tmp_path / "m.onnx", inside, border, opset=22))))
    assert version.manifest
    assert version.manifest.conversion
    assert version.golden
    assert version.manifest.conversion.precision is precision
    (verdict,) = version.manifest.verification
    assert verdict.relative_l2_limit <= limit
    assert version.golden.inputs["x"].dtype == NUMPY[border]
    assert version.golden.graph_outputs["y"].dtype == NUMPY[border]
    assert bool(version.manifest.conversion.notes) == (inside in (BF16, F64))
    for engine in ("onnxruntime",) if border == F64 else ("onnxruntime", "openvino"):
        proven = verify(version, engine=engine, precision=None, samples=None, threads=1)
        assert max(verdict.relative_l2 for verdict in proven.verdicts) < REPLAY[precision].relative_l2


def test_openvino_refuses_fp64(run: Convert, tmp_path: Path) -> None:
    version = read_version(run(str(write_classifier(tmp_path / "m.onnx", F64, F64, opset=22))))
    with pytest.raises(LoweringError, match="OpenVINO computes FP64 in FP32"):
        verify(version, engine="openvino", precision=None, samples=None, threads=1)


def test_bf16_samples(run: Convert, tmp_path: Path) -> None:
    """Saved by numpy as bytes of bf16, or in fp32."""
    source = write_classifier(tmp_path / "m.onnx", BF16, BF16)
    images = np.random.default_rng(3).standard_normal((5, 3, 8, 8)).astype(np.float32)
    for number, dtype in enumerate((ml_dtypes.bfloat16, np.float32)):
        np.savez(tmp_path / "samples.npz", INPUT_0=images.astype(dtype))
        version = read_version(run(str(source), name=f"m{number}", samples=str(tmp_path / "samples.npz")))
        assert version.golden
        np.testing.assert_array_equal(version.golden.inputs["x"], images[:4].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_only_fp32_is_lowered(run: Convert, tmp_path: Path, precision: str) -> None:
    source = write_classifier(tmp_path / "m.onnx", F16, F32)
    np.savez(tmp_path / "c.npz", INPUT_0=np.zeros((1, 3, 8, 8), np.float32))
    calibration = {"calibration": str(tmp_path / "c.npz")} if precision == "int8" else {}
    with pytest.raises(ConversionError, match="the source computes in fp16, and only fp32 is lowered"):
        run(str(source), precision=precision, **calibration)


def test_the_precision_of_the_source_can_be_requested(run: Convert, tmp_path: Path) -> None:
    version = run(str(write_classifier(tmp_path / "m.onnx", F16, F16)), precision="fp16")
    with OnnxRuntimeEngine().build_reference(version / "model.onnx") as session:
        assert session.signature.inputs[0].dtype == "FP16"
