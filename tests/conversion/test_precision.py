"""fp16, bf16 and int8 on the trained digits model: accuracy, coverage, what must stay fp32, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import zoo
from converting import MODULES, Convert
from lowered import lower_version
from onnx import TensorProto, helper
from sklearn.datasets import load_digits

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.openvino import OpenVinoEngine
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import ConversionError, VerificationError
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.precision import LowerPrecision
from graphkiln_backend.passes.rounding import emulate
from graphkiln_backend.proof.decision import decide, lower_bound
from graphkiln_backend.proof.policy import BF16, INT8

ONNX_RUNTIME = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")
OPENVINO = SessionConfig(engine="openvino", device=CPU, threads=1, spin=False, reason="test")


@pytest.fixture(scope="module")
def data() -> Mapping[str, np.ndarray]:
    """The digits as the model takes them: 8x8 pixels as nearest blocks of 32x32, in -1..1; labels."""
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
def test_the_trained_model_keeps_its_answers(  # noqa: PLR0917 - fixtures and parameters
    run: Convert,
    digits: Path,
    files: dict[str, str],
    data: Mapping[str, np.ndarray],
    cache: ArtifactCache,
    precision: str,
    amp: str,
) -> None:
    options = files if precision == "int8" else {"samples": files["samples"]}
    version = run(str(digits / "1" / "model.onnx"), precision=precision, amp=amp, **options)
    manifest = Manifest.read(version / "manifest.json")
    assert [verification.step for verification in manifest.verification] == ["export", precision]
    assert "top-1 agreement" in manifest.verification[1].verdict
    step = OPENVINO if precision == "bf16" else ONNX_RUNTIME
    before = accuracy(digits / "1", ONNX_RUNTIME, data)
    after = accuracy(version, step, data)
    assert before - after < 0.005, (before, after)
    lowered = lower_version(version, step, cache)  # the server's own replay
    lowered.session.close()
    assert lowered.self_test is not None


def test_the_types_are_those_that_were_asked_for(run: Convert, digits: Path, files: dict[str, str]) -> None:
    version = run(str(digits / "1" / "model.onnx"), precision=Precision.FP16, samples=files["samples"])
    graph = onnx.load(version / "model.onnx").graph
    types = {tensor.data_type for tensor in graph.initializer if len(tensor.dims) == 4}
    assert types == {TensorProto.FLOAT16}
    assert graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    assert graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    manifest = Manifest.read(version / "manifest.json")
    assert manifest.conversion is not None
    assert manifest.conversion.passes[-1].note == "5/5 products in fp16"


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "FP16"), ("bf16", "BF16")])
def test_inputs_and_outputs_when_asked(  # noqa: PLR0917 - fixtures and parameters
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


def test_int8_needs_samples_of_its_own(run: Convert, digits: Path, files: dict[str, str]) -> None:
    source = str(digits / "1" / "model.onnx")
    with pytest.raises(ConversionError, match="needs samples to calibrate on"):
        run(source, precision=Precision.INT8)
    with pytest.raises(ConversionError, match="proves nothing"):
        run(source, precision=Precision.INT8, calibration=files["samples"], samples=files["samples"])


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_int8_says_how_much_became_integer(run: Convert, digits: Path, files: dict[str, str], method: str) -> None:
    version = run(str(digits / "1" / "model.onnx"), precision=Precision.INT8, calibration_method=method, **files)
    manifest = Manifest.read(version / "manifest.json")
    assert manifest.conversion is not None
    assert manifest.conversion.notes[0] == "5/5 products in int8"
    assert "rate of int8 to that of fp32" in manifest.conversion.notes[1]


def test_int8_ends_can_stay(run: Convert, digits: Path, files: dict[str, str]) -> None:
    version = run(str(digits / "1" / "model.onnx"), precision=Precision.INT8, quantize_ends=False, **files)
    manifest = Manifest.read(version / "manifest.json")
    assert manifest.conversion is not None
    assert manifest.conversion.notes[0] == "3/5 products in int8"


class TestOverflow:
    SOURCE = f"python:{MODULES}:overflowing"

    def test_is_refused(self, run: Convert, store: Path) -> None:
        with pytest.raises(VerificationError, match="NaN or Inf"):
            run(self.SOURCE, precision=Precision.FP16, amp="O3")
        assert not list(store.rglob("model.onnx"))

    def test_nodes_can_be_kept(self, run: Convert) -> None:
        with pytest.raises(ConversionError, match="lowers nothing"):
            run(self.SOURCE, precision=Precision.FP16, amp="O3", keep_fp32=["Gemm"])

    def test_a_level_that_lowers_nothing_is_refused(self, run: Convert) -> None:
        with pytest.raises(ConversionError, match="lowers nothing"):
            run(self.SOURCE, precision=Precision.FP16, amp="O0")

    def test_the_fewest_nodes_are_found(self, run: Convert) -> None:
        version = run(self.SOURCE, precision=Precision.FP16, amp="O3", search_keep=True)
        manifest = Manifest.read(version / "manifest.json")
        assert manifest.conversion is not None
        kept = manifest.conversion.notes[0].removeprefix("kept in fp32 by search: ").split(", ")
        assert len(kept) == 2, "the layer that answers too much, and the one that reads it"
        assert manifest.conversion.passes[-1].note == "1/3 products in fp16"

    def test_bf16_has_the_range(self, run: Convert) -> None:
        run(self.SOURCE, precision=Precision.BF16, amp="O3")


class TestPass:
    def model(self) -> onnx_ir.Model:
        """A product, a large constant, and a branch that reads what was computed outside of it."""
        then = helper.make_graph([helper.make_node("Neg", ["p"], ["t"])], "then", [], [zoo.value("t", ("batch", 4))])
        other = helper.make_graph([helper.make_node("Abs", ["p"], ["e"])], "else", [], [zoo.value("e", ("batch", 4))])
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["p"], name="product"),
            helper.make_node("If", ["flag"], ["b"], then_branch=then, else_branch=other),
            helper.make_node("Add", ["b", "huge"], ["y"], name="huge_add"),
        ]
        constants = {"w": np.eye(4, dtype=np.float32), "flag": np.bool_(1), "huge": np.full((4,), 1e6, np.float32)}
        proto = zoo.model(nodes, [zoo.value("x", ("batch", 4))], [zoo.value("y", ("batch", 4))], constants)
        return onnx_ir.from_proto(proto)

    @pytest.mark.parametrize("target", [Precision.FP16, Precision.BF16])
    def test_branches_and_large_constants_stay_fp32(self, tmp_path: Path, target: Precision) -> None:
        model = self.model()
        (report,) = run_passes(model, [LowerPrecision(target, "O3")]).reports
        assert report.note == f"1/1 products in {target}"
        emulate(model, target)
        onnx_ir.save(model, tmp_path / "m.onnx")
        x = np.array([[1, 2, 3, 4]], np.float32)
        with OnnxRuntimeEngine().build_reference(tmp_path / "m.onnx") as session:
            np.testing.assert_allclose(session.run({"x": x})["y"], 1e6 - x, rtol=1e-2 if target == "bf16" else 1e-6)

    def test_o0_does_nothing(self) -> None:
        model = self.model()
        assert run_passes(model, [LowerPrecision(Precision.FP16, "O0")]).reports[0].note == "nothing may be lowered"


class TestDecision:
    def test_flips_below_the_noise_do_not_count(self) -> None:
        reference = np.array([[0.0, 1.0], [0.5, 0.5001], [1.0, 0.0]])
        flipped = np.array([[0.0, 1.0], [0.5001, 0.5], [1.0, 0.0]])
        assert decide(reference, flipped, BF16, noise=1e-3).agreeing == 3
        assert decide(reference, flipped, BF16, noise=1e-6).agreeing == 2

    def test_close_calls_decide_nothing(self) -> None:
        reference = np.random.default_rng(0).normal(size=(50, 10)) * 1e-3 + 5
        decision = decide(reference, reference, INT8, noise=0)
        assert "give samples and weights that decide" in str(decision)
        assert decision.within(INT8)

    def test_one_answer_to_everything_decides_nothing(self) -> None:
        reference = np.tile([0.0, 9.0], (5, 1))
        assert "same top-1 class" in decide(reference, reference, BF16, noise=0).inconclusive

    def test_the_bound_is_that_of_clopper_and_pearson(self) -> None:
        assert lower_bound(256, 256) == pytest.approx(0.025 ** (1 / 256), abs=1e-6)
        assert lower_bound(8, 10) == pytest.approx(0.4439, abs=1e-4)  # from a printed table
        assert lower_bound(0, 10) == 0

    def test_too_many_flips_fail(self) -> None:
        reference = np.eye(10)[np.arange(50) % 10]
        scores = reference.copy()
        scores[:3] = np.roll(reference[:3], 1, axis=1)
        assert not decide(reference, scores, BF16, noise=0).within(BF16)
