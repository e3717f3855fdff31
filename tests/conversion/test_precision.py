"""fp16, bf16 and int8 on the trained digits model: accuracy, coverage, nodes that stay fp32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from converting import MODULES, Convert
from graphs import graph
from lowered import lower_version
from onnx import TensorProto
from sklearn.datasets import load_digits

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.openvino import OpenVinoEngine
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.precision import LowerPrecision
from graphkiln_backend.passes.rounding import emulate

ONNX_RUNTIME = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")
OPENVINO = SessionConfig(engine="openvino", device=CPU, threads=1, spin=False, reason="test")


@pytest.fixture(scope="module")
def data() -> Mapping[str, np.ndarray]:
    """Inputs of the model (8x8 pixels as blocks of 32x32, in -1..1), and labels."""
    digits = load_digits()
    pixels = np.kron(digits.images / 16, np.ones((1, 4, 4))) * 2 - 1
    return {"pixels": pixels[:, np.newaxis].astype(np.float32), "labels": digits.target}


@pytest.fixture
def files(data: Mapping[str, np.ndarray], tmp_path: Path) -> dict[str, str]:
    """Disjoint samples for calibration and for the proof."""
    for name, rows in (("calibration", slice(0, 256)), ("samples", slice(256, 512))):
        np.savez(tmp_path / f"{name}.npz", INPUT_0=data["pixels"][rows])
    return {name: str(tmp_path / f"{name}.npz") for name in ("calibration", "samples")}


def accuracy(version: Path, step: SessionConfig, data: Mapping[str, np.ndarray]) -> float:
    engine = OpenVinoEngine() if step.engine == "openvino" else OnnxRuntimeEngine()
    with engine.build(version / "model.onnx", step) as session:
        scores = session.run({"INPUT_0": data["pixels"][512:]})["OUTPUT_0"]
    return float(np.mean(scores.argmax(axis=1) == data["labels"][512:]))


@pytest.mark.parametrize(
    ("precision", "amp"), [("fp16", "O1"), ("fp16", "O2"), ("fp16", "O3"), ("bf16", "O2"), ("int8", "O2")]
)
def test_the_trained_model_keeps_its_accuracy(  # noqa: PLR0917 - fixtures and parameters
    run: Convert,
    digits: Path,
    files: dict[str, str],
    data: Mapping[str, np.ndarray],
    cache: ArtifactCache,
    precision: str,
    amp: str,
) -> None:
    calibrated = {**files, "int8_by": "onnxruntime"}
    options = calibrated if precision == "int8" else {"samples": files["samples"]}
    version = run(str(digits / "1" / "model.onnx"), precision=precision, amp=amp, **options)
    manifest = Manifest.read(version / "manifest.json")
    assert manifest.conversion is not None
    assert [verification.step for verification in manifest.verification] == ["export", precision]
    if precision == "int8":
        assert manifest.conversion.notes[0] == "5/5 products in int8"
        assert "rate of int8 to that of fp32" in manifest.conversion.notes[1]
    graph = onnx.load(version / "model.onnx").graph
    if precision == "fp16":
        assert {tensor.data_type for tensor in graph.initializer if len(tensor.dims) == 4} == {TensorProto.FLOAT16}
    assert "top-1 agreement" in manifest.verification[1].verdict
    step = OPENVINO if precision == "bf16" else ONNX_RUNTIME
    before = accuracy(digits / "1", ONNX_RUNTIME, data)
    after = accuracy(version, step, data)
    assert before - after < 0.005, (before, after)
    lowered = lower_version(version, step, cache)  # the server's own replay
    lowered.session.close()
    assert lowered.self_test is not None


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "FP16"), ("bf16", "BF16")])
def test_lowered_inputs_and_outputs(  # noqa: PLR0917 - fixtures and parameters
    run: Convert, digits: Path, files: dict[str, str], cache: ArtifactCache, precision: str, dtype: str
) -> None:
    source, samples = str(digits / "1" / "model.onnx"), files["samples"]
    version = run(source, precision=precision, lower_edges=True, samples=samples)
    signature = Manifest.read(version / "manifest.json").signature
    assert [spec.dtype.value for spec in (*signature.inputs, *signature.outputs)] == [dtype, dtype]
    step = OPENVINO if precision == "bf16" else ONNX_RUNTIME
    lowered = lower_version(version, step, cache)
    lowered.session.close()
    assert lowered.self_test is not None


class TestOverflow:
    SOURCE = f"python:{MODULES}:overflowing"

    def test_the_search_finds_the_fewest_nodes(self, run: Convert) -> None:
        version = run(self.SOURCE, precision=Precision.FP16, amp="O3", search_keep=True)
        manifest = Manifest.read(version / "manifest.json")
        assert manifest.conversion is not None
        kept = manifest.conversion.notes[0].removeprefix("kept in fp32 by search: ").split(", ")
        assert len(kept) == 2, "the layer that overflows, and its reader"
        assert manifest.conversion.passes[-1].note == "1/3 products in fp16"


@pytest.mark.parametrize("target", [Precision.FP16, Precision.BF16])
def test_branches_and_large_constants_stay_fp32(tmp_path: Path, target: Precision) -> None:
    """A branch reads a product of lower precision from outside."""
    model = graph(
        """(float[batch,4] x) => (float[batch,4] y) {
            p = MatMul(x, w)
            b = If(flag) <
                then_branch = then () => (float[batch,4] t) { t = Neg(p) },
                else_branch = other () => (float[batch,4] e) { e = Abs(p) }
            >
            y = Add(b, huge)
        }""",
        w=np.eye(4, dtype=np.float32), flag=np.bool_(1), huge=np.full((4,), 1e6, np.float32),
    )  # fmt: skip
    (report,) = run_passes(model, [LowerPrecision(target, "O3")]).reports
    assert report.note == f"1/1 products in {target}"
    emulate(model, target)
    onnx_ir.save(model, tmp_path / "m.onnx")
    x = np.array([[1, 2, 3, 4]], np.float32)
    with OnnxRuntimeEngine().build_reference(tmp_path / "m.onnx") as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], 1e6 - x, rtol=1e-2 if target == "bf16" else 1e-6)
