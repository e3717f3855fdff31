"""Adopting graphs of other tools: golden samples from references, refusals, and what is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from graphs import draw, graph
from ir_files import save_ir
from recipes import recipe

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import (
    ConversionError,
    RepositoryError,
    SignatureError,
    UndecidedError,
    VerificationError,
)
from graphkiln_backend.graph.manifest import Adoption, Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.version import read_version
from graphkiln_converters.adopt import adopt

TEXT = "(float[batch,4] x) => (float[batch,3] y) { p = MatMul(x, w) y = Add(p, b) }"
W, B = draw(4, 3), draw(3, seed=1)
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }
"""
MORE = 'input { name: "z" data_type: TYPE_FP32 dims: [ 4 ] }'
CODE = """
import torch
from torch import nn

class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(12.0).reshape(3, 4) / 10)

    def forward(self, image):
        return self.layer(image)

def make():
    return Linear(), torch.zeros(2, 4)
"""


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    onnx_ir.save(graph(TEXT, w=W, b=B), tmp_path / "reference.onnx")
    return tmp_path / "reference.onnx"


def store(folder: Path, file: str, content: bytes = b"opaque", *, config: str = "", **beside: bytes) -> Path:
    """A version folder with a graph and a configuration; return it."""
    version = folder / "store" / "m" / "1"
    version.mkdir(parents=True)
    (version / file).write_bytes(content)
    for name, more in beside.items():
        (version / name).write_bytes(more)
    (version.parent / "config.pbtxt").write_text(config)
    return version


def plan(folder: Path, config: str = f"max_batch_size: 8 {TENSORS}") -> Path:
    return store(folder, "model.plan", config=f'platform: "tensorrt_plan" {config}')


def run(version: Path, reference: object, **options: Any) -> Manifest:
    return adopt(version, recipe(str(reference), **options), command="graphkiln adopt")


def record(path: Path, **arrays: AnyArray) -> Path:
    np.savez(path, **arrays)
    return path


def files(version: Path) -> set[str]:
    return {path.name for path in version.iterdir()}


class TestRoundTrips:
    def test_onnx_is_run_and_proven(self, tmp_path: Path, reference: Path) -> None:
        version = store(tmp_path, "model.onnx", reference.read_bytes())
        manifest = run(version, reference)
        assert read_version(version).manifest == manifest
        assert files(version) == {"model.onnx", "manifest.json", "golden.npz"}
        assert (version / "model.onnx").read_bytes() == reference.read_bytes()
        assert manifest.adoption == Adoption(reference=str(reference), precision=Precision.FP32)
        (verification,) = manifest.verification
        assert verification.step == "adopted fp32"
        assert verification.batch_sizes == (1, 3)
        golden = read_version(version).golden
        assert golden is not None
        assert golden.count == 4
        assert not golden.whole
        np.testing.assert_allclose(golden.graph_outputs["y"], golden.inputs["x"] @ W + B, rtol=1e-5)

    @pytest.mark.parametrize(
        ("backend", "file", "beside"),
        [
            ("pytorch", "model.pt", ""),
            ("tensorrt", "model.plan", ""),
            ("python", "model.py", "weights.bin"),
        ],
    )
    def test_opaque_graph(self, tmp_path: Path, reference: Path, backend: str, file: str, beside: str) -> None:
        config = f'backend: "{backend}" max_batch_size: 8 {TENSORS}'
        version = store(tmp_path, file, config=config, **({beside: b"1"} if beside else {"other": b""}))
        weights = {beside} - {""}
        before = files(version)
        manifest = run(version, reference)
        assert (manifest.graph_file, set(manifest.weights)) == (file, weights)
        assert manifest.verification == ()  # nothing has run it
        assert files(version) - before == {"manifest.json", "golden.npz"}
        assert read_version(version).golden
        assert str(manifest.signature.inputs[0]) == "x FP32[batch,4]"
        (version / file).write_bytes(b"another")
        with pytest.raises(RepositoryError, match=r"does not match manifest\.json"):
            read_version(version)

    @pytest.mark.parametrize("names", [("x", "y"), ("INPUT_0", "OUTPUT_0")])
    def test_recorded_inputs_and_outputs(self, tmp_path: Path, names: tuple[str, str]) -> None:
        x = draw(9, 4, seed=5)
        recorded = record(tmp_path / "recorded.npz", **{names[0]: x, names[1]: x @ W})
        version = plan(tmp_path)
        manifest = run(version, recorded, precision="fp16")
        assert manifest.adoption == Adoption(reference=str(recorded), precision=Precision.FP16)
        golden = read_version(version).golden
        assert golden is not None
        chosen = [0, 3, 5, 8]  # evenly spread
        np.testing.assert_array_equal(golden.inputs["x"], x[chosen])
        np.testing.assert_array_equal(golden.graph_outputs["y"], (x @ W)[chosen])

    def test_code_has_other_names_and_an_fp64_opinion(self, tmp_path: Path) -> None:
        """A single parameter is the single input; `INPUT__0` of PyTorch's backend has its position in its name."""
        (tmp_path / "code.py").write_text(CODE)
        config = TENSORS.replace('"x"', '"INPUT__0"').replace('"y"', '"OUTPUT__0"')
        version = store(tmp_path, "model.pt", config=f'backend: "pytorch" max_batch_size: 4 {config}')
        manifest = run(version, f"python:{tmp_path / 'code.py'}:make")
        golden = read_version(version).golden
        assert golden is not None
        assert (set(golden.inputs), set(golden.graph_outputs)) == ({"INPUT__0"}, {"OUTPUT__0"})
        assert 0 < manifest.provenance.metrics["reference_fp64_error"] < 1e-6

    TWO = "(float[batch,4] a, float[batch,4] b) => (float[batch,3] y) { c = Sub(a, b) y = MatMul(c, w) }"

    @pytest.mark.parametrize("names", [("INPUT__1", "INPUT__0"), ("b", "a")])
    def test_several_inputs_by_number_or_name(self, tmp_path: Path, names: tuple[str, str]) -> None:
        """Their order in config.pbtxt does not matter."""
        onnx_ir.save(graph(self.TWO, w=W), tmp_path / "reference.onnx")
        inputs = "".join(f'input {{ name: "{name}" data_type: TYPE_FP32 dims: [ 4 ] }}' for name in names)
        version = plan(tmp_path, f'max_batch_size: 8 {inputs} output {{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] }}')
        run(version, tmp_path / "reference.onnx")
        golden = read_version(version).golden
        assert golden is not None
        second, first = (golden.inputs[name] for name in names)
        np.testing.assert_allclose(golden.graph_outputs["y"], (first - second) @ W, rtol=1e-4, atol=1e-5)

    def test_sizes_of_the_graph_apply_to_dynamic_dimensions(self, tmp_path: Path) -> None:
        onnx_ir.save(graph("(float[batch,n] x) => (float[batch,n] y) { y = Tanh(x) }"), tmp_path / "reference.onnx")
        version = plan(tmp_path, f"max_batch_size: 8 {TENSORS.replace('[ 4 ]', '[ 7 ]').replace('[ 3 ]', '[ 7 ]')}")
        run(version, tmp_path / "reference.onnx")
        golden = read_version(version).golden
        assert golden is not None
        assert golden.inputs["x"].shape == (4, 7)

    def test_text(self, tmp_path: Path) -> None:
        text = np.array([["a"], ["b"], ["größe"]], np.object_)
        found = record(tmp_path / "recorded.npz", x=text.astype(str), y=np.array([[1], [2], [3]], np.int64))
        config = (
            'max_batch_size: 8 input { name: "x" data_type: TYPE_STRING dims: [ 1 ] } '
            'output { name: "y" data_type: TYPE_INT64 dims: [ 1 ] }'
        )
        version = plan(tmp_path, config)
        run(version, found)
        golden = read_version(version).golden
        assert golden is not None
        assert golden.inputs["x"].tolist() == text.tolist()

    def test_half_precision_tensors(self, tmp_path: Path, reference: Path) -> None:
        """An engine built in fp16 may have fp16 at its border."""
        version = plan(tmp_path, f"max_batch_size: 8 {TENSORS.replace('FP32', 'FP16')}")
        with pytest.raises(SignatureError, match=r"expected x FP16\[batch,4\], got x FP32\[batch,4\]"):
            run(version, reference)
        run(version, reference, precision="fp16")
        golden = read_version(version).golden
        assert golden is not None
        x, y = golden.inputs["x"], golden.graph_outputs["y"]
        assert (x.dtype, y.dtype) == (np.float16, np.float16)
        np.testing.assert_allclose(y, x.astype(np.float32) @ W + B, rtol=2e-3, atol=2e-3)

    def test_users_samples_and_labels(self, tmp_path: Path, reference: Path) -> None:
        samples = record(tmp_path / "samples.npz", x=draw(3, 4, seed=8))
        (tmp_path / "names.txt").write_text("a\nb\nc\n")
        version = plan(tmp_path)
        run(version, reference, samples=samples, labels=tmp_path / "names.txt")
        read = read_version(version)
        assert read.contract.labels == ("a", "b", "c")
        assert read.golden is not None
        np.testing.assert_array_equal(read.golden.inputs["x"], draw(3, 4, seed=8))

    def test_weights_in_other_files(self, tmp_path: Path, reference: Path) -> None:
        version = store(tmp_path, "model.onnx")
        model = onnx.load(reference)
        onnx.save(model, version / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
        assert set(run(version, reference).weights) == {"w.data"}


class TestOpenVino:
    """A graph in OpenVINO IR is read and run, so its outputs can be recorded where there is no reference."""

    @pytest.fixture
    def version(self, tmp_path: Path, reference: Path) -> Path:
        version = tmp_path / "store" / "m" / "1"
        save_ir(reference, version / "model.xml")
        return version

    def test_reference(self, version: Path, reference: Path) -> None:
        manifest = run(version, reference)
        assert (manifest.graph_file, set(manifest.weights)) == ("model.xml", {"model.bin"})
        assert manifest.verification[0].step == "adopted fp32"
        assert str(manifest.signature.inputs[0]).startswith("x FP32[")
        (version / "model.bin").write_bytes(b"")
        with pytest.raises(RepositoryError, match=r"model\.bin does not match"):
            read_version(version)

    def test_wrong_graph(self, tmp_path: Path, reference: Path) -> None:
        onnx_ir.save(graph(TEXT, w=W * np.float32(1.01), b=B), tmp_path / "wrong.onnx")
        version = save_ir(tmp_path / "wrong.onnx", tmp_path / "store" / "m" / "1" / "model.xml").parent
        with pytest.raises(VerificationError, match="does not compute what"):
            run(version, reference)

    def test_weights_stored_in_fp16(self, tmp_path: Path, reference: Path) -> None:
        """OpenVINO's own default; the error of the weights is more than that of another engine."""
        version = save_ir(reference, tmp_path / "store" / "m" / "1" / "model.xml", compress=True).parent
        with pytest.raises(VerificationError, match=r"its weights are fp16: --precision fp16"):
            run(version, reference)
        run(version, reference, precision="fp16")

    def test_outputs_are_recorded_without_a_reference(self, version: Path) -> None:
        manifest = run(version, "")
        assert manifest.adoption == Adoption(
            reference="model.xml itself, on this machine", precision=Precision.FP32, recorded=True
        )
        assert manifest.verification == ()
        golden = read_version(version).golden
        assert golden is not None
        assert golden.count == 4
        np.testing.assert_allclose(golden.graph_outputs["y"], golden.inputs["x"] @ W + B, rtol=1e-5)

    def test_outputs_of_whole_inputs_are_recorded(self, version: Path, tmp_path: Path) -> None:
        config = TENSORS.replace("dims: [ ", "dims: [ 2, ")
        (version.parent / "config.pbtxt").write_text(config)
        samples = record(tmp_path / "samples.npz", x=draw(2, 2, 4))
        run(version, "", samples=samples)
        golden = read_version(version).golden
        assert golden is not None
        assert (golden.whole, golden.inputs["x"].shape) == (True, (2, 4))

    def test_recorded_samples_decide(self, tmp_path: Path) -> None:
        onnx_ir.save(graph(TEXT, w=0 * W, b=B), tmp_path / "constant.onnx")
        version = save_ir(tmp_path / "constant.onnx", tmp_path / "store" / "m" / "1" / "model.xml").parent
        with pytest.raises(UndecidedError, match="all samples have the same outputs"):
            run(version, "")


class TestWholeGraphs:
    """Without batches (max_batch_size 0), the golden samples are one whole request."""

    @pytest.mark.parametrize(("dims", "rows"), [("2", 2), ("-1", 4)])
    def test_rows_of_a_reference_become_a_request(self, tmp_path: Path, reference: Path, dims: str, rows: int) -> None:
        config = TENSORS.replace("dims: [ ", f"dims: [ {dims}, ")
        version = plan(tmp_path, config)
        manifest = run(version, reference)
        golden = read_version(version).golden
        assert golden is not None
        assert golden.whole
        assert golden.inputs["x"].shape == (rows, 4)
        assert manifest.signature.inputs[0].shape[0] == (2 if dims == "2" else "x.0")

    def test_reference_without_batches(self, tmp_path: Path) -> None:
        """The same for recorded requests."""
        text = "(float[4] x) => (float[3] y) { y = MatMul(x, w) }"
        onnx_ir.save(graph(text, w=W), tmp_path / "reference.onnx")
        content = (tmp_path / "reference.onnx").read_bytes()
        version = store(tmp_path, "model.onnx", content, config=f'backend: "onnxruntime" {TENSORS}')
        assert run(version, tmp_path / "reference.onnx").verification[0].batch_sizes == ()
        shutil.rmtree(tmp_path / "store")
        x = draw(3, 4)
        version = plan(tmp_path, TENSORS)
        run(version, record(tmp_path / "recorded.npz", x=x, y=x @ W))
        golden = read_version(version).golden
        assert golden is not None
        assert (golden.whole, golden.inputs["x"].shape) == (True, (4,))

    @pytest.mark.parametrize("name", ["model.onnx", "model.xml"])
    @pytest.mark.parametrize("largest", [1, 8])
    def test_a_graph_that_mixes_the_rows_of_its_batches(self, tmp_path: Path, name: str, largest: int) -> None:
        x = draw(6, 4)
        recorded = record(tmp_path / "recorded.npz", x=x, y=np.exp(x) / np.exp(x).sum(axis=0))
        onnx_ir.save(graph("(float[n, 4] x) => (float[n, 4] y) { y = Softmax<axis = 0>(x) }"), tmp_path / "mixes.onnx")
        config = f"max_batch_size: {largest}"
        if name == "model.onnx":
            version = store(tmp_path, name, (tmp_path / "mixes.onnx").read_bytes(), config=config)
        else:
            version = save_ir(tmp_path / "mixes.onnx", tmp_path / "store" / "m" / "1" / name).parent
            (version.parent / "config.pbtxt").write_text(config)
        with pytest.raises(VerificationError, match="max_batch_size: 0"):
            run(version, recorded)

    def test_reference_without_batches_for_a_graph_with_them(self, tmp_path: Path) -> None:
        onnx_ir.save(graph("(float[4] x) => (float[3] y) { y = MatMul(x, w) }", w=W), tmp_path / "reference.onnx")
        with pytest.raises(ConversionError, match="takes no batches, but max_batch_size is 8"):
            run(plan(tmp_path), tmp_path / "reference.onnx")


class TestReferenceDiffers:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (TENSORS.replace('"x"', '"image"'), r"inputs .* expected image FP32\[batch,4\], got x FP32\[batch,4\]"),
            (TENSORS.replace('"y"', '"scores"'), r"outputs .* expected scores FP32\[batch,3\], got y FP32\[6,3\]"),
            (TENSORS.replace("[ 4 ]", "[ 5 ]"), r"expected x FP32\[batch,5\], got x FP32\[batch,4\]"),
            (TENSORS.replace("[ 3 ]", "[ 2 ]"), r"expected y FP32\[batch,2\], got y FP32\[6,3\]"),
            (TENSORS.replace("[ 3 ]", "[ 3, 1 ]"), r"expected y FP32\[batch,3,1\], got y FP32\[6,3\]"),
            (MORE + TENSORS, r"expected z FP32\[batch,4\], x FP32\[batch,4\], got x FP32\[batch,4\]"),
            (TENSORS.replace("FP32", "INT64"), r"expected x INT64\[batch,4\], got x FP32"),
        ],
    )
    def test_tensors_of_a_model(self, tmp_path: Path, reference: Path, config: str, message: str) -> None:
        version = plan(tmp_path, f"max_batch_size: 8 {config}")
        with pytest.raises(SignatureError, match=message):
            run(version, reference)
        assert files(version) == {"model.plan"}

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"a": draw(3, 4), "y": draw(3, 3)}, r"lacks 'x' \(it has a, y"),
            ({"x": draw(3, 5), "y": draw(3, 3)}, r"expected x FP32\[batch,4\], got x FP32\[3,5\]"),
            ({"x": draw(3, 4), "y": draw(3, 2)}, r"expected y FP32\[batch,3\], got y FP32\[3,2\]"),
            ({"x": draw(3, 4), "y": np.zeros((3, 3), np.int64)}, r"expected y FP32\[batch,3\], got y INT64\[3,3\]"),
            ({"x": draw(3, 4), "y": draw(4, 3)}, "the same number of samples"),
        ],
    )
    def test_recorded_arrays(self, tmp_path: Path, arrays: dict[str, AnyArray], message: str) -> None:
        with pytest.raises((SignatureError, ConversionError), match=message):
            run(plan(tmp_path), record(tmp_path / "recorded.npz", **arrays))

    def test_wrong_graph(self, tmp_path: Path, reference: Path) -> None:
        """An ONNX file is run, and nothing is written if it differs."""
        onnx_ir.save(graph(TEXT, w=W * np.float32(1.01), b=B), tmp_path / "wrong.onnx")
        version = store(tmp_path, "model.onnx", (tmp_path / "wrong.onnx").read_bytes())
        with pytest.raises(VerificationError, match=r"does not compute what .* adopted fp32: .* FAIL"):
            run(version, reference)
        assert files(version) == {"model.onnx"}
        run(version, reference, precision="int8")  # within that row


class TestUndecided:
    """Samples that a wrong graph would pass as well."""

    X = draw(4, 4)

    @pytest.mark.parametrize(
        ("y", "reason"),
        [
            (np.full((4, 3), np.nan, np.float32), "no finite number"),
            (np.full((4, 3), np.inf, np.float32), "no finite number"),
            (np.zeros((4, 3), np.float32), "all samples have the same outputs"),
            (np.tile(draw(1, 3), (4, 1)), "all samples have the same outputs"),
            (1 + 1e-6 * draw(4, 3), "all samples have the same outputs"),
            (np.ones((1, 3), np.float32), "all elements of the outputs are equal"),
        ],
    )
    def test_outputs_that_decide_nothing(self, tmp_path: Path, y: AnyArray, reason: str) -> None:
        version = plan(tmp_path)
        with pytest.raises(UndecidedError, match=f"the samples prove nothing: .*{reason}"):
            run(version, record(tmp_path / "recorded.npz", x=self.X[: len(y)], y=y))
        assert files(version) == {"model.plan"}

    def test_precision_decides(self, tmp_path: Path) -> None:
        """Differences of 10% show an fp32 graph, and are the noise of int8."""
        recorded = record(tmp_path / "recorded.npz", x=self.X, y=1 + 0.05 * draw(4, 3))
        with pytest.raises(UndecidedError, match="within the limits of adopted int8"):
            run(plan(tmp_path), recorded, precision="int8")
        run(tmp_path / "store" / "m" / "1", recorded)

    def test_reference_without_trained_weights(self, tmp_path: Path) -> None:
        pytest.importorskip("torchvision")
        config = (
            'input { name: "x" data_type: TYPE_FP32 dims: [ 3, 64, 64 ] } '
            'output { name: "y" data_type: TYPE_FP32 dims: [ 1000 ] }'
        )
        with pytest.raises(ConversionError, match=r"random weights.*--pretrained"):
            run(plan(tmp_path, f"max_batch_size: 8 {config}"), "torchvision:squeezenet1_1", shapes={"": (3, 64, 64)})

    def test_reference_that_is_uncertain(self, tmp_path: Path) -> None:
        """Its own fp32 differs from its fp64 by more than half of what is allowed."""
        code = CODE.replace("self.layer(image)", "self.layer((image + 3e4) - 3e4)")
        (tmp_path / "code.py").write_text(code)
        with pytest.raises(UndecidedError, match=r"in fp32 is .* off its own fp64, and 1e-04 is allowed"):
            run(plan(tmp_path), f"python:{tmp_path / 'code.py'}:make")


class TestRefusals:
    def test_converted_version(self, digits: Path, tmp_path: Path, reference: Path) -> None:
        shutil.copytree(digits, tmp_path / "digits")
        with pytest.raises(ConversionError, match="is proven already"):
            run(tmp_path / "digits" / "1", reference)

    def test_adopted_version(self, tmp_path: Path, reference: Path) -> None:
        version = plan(tmp_path)
        run(version, reference)
        with pytest.raises(ConversionError, match=r"adopted already \(remove manifest\.json, golden\.npz to"):
            run(version, reference)
        for name in ("manifest.json", "golden.npz"):
            (version / name).unlink()
        run(version, reference)

    def test_no_reference(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match=r"model\.plan has no reference \(--reference"):
            run(plan(tmp_path), "")

    def test_no_graph(self, tmp_path: Path, reference: Path) -> None:
        version = plan(tmp_path)
        (version / "model.plan").unlink()
        with pytest.raises(RepositoryError, match=r"there is no model\.plan"):
            run(version, reference)

    def test_unknown_tensors(self, tmp_path: Path, reference: Path) -> None:
        with pytest.raises(ConversionError, match=r"the tensors of .*model\.plan are not known.*config\.pbtxt"):
            run(plan(tmp_path, "max_batch_size: 8"), reference)

    def test_onnx_graph_that_contradicts_its_configuration(self, tmp_path: Path, reference: Path) -> None:
        config = f"max_batch_size: 8 {TENSORS.replace('[ 4 ]', '[ 5 ]')}"
        version = store(tmp_path, "model.onnx", reference.read_bytes(), config=config)
        with pytest.raises(RepositoryError, match=r"dims .* of input 'x' do not fit the graph"):
            run(version, reference)

    @pytest.mark.parametrize("block", ["sequence_batching { }", 'batch_input { target_name: "z" }'])
    def test_tensors_that_are_not_in_requests(self, tmp_path: Path, reference: Path, block: str) -> None:
        with pytest.raises(ConversionError, match="gets tensors from the server"):
            run(plan(tmp_path, f"max_batch_size: 8 {block} {TENSORS}"), reference)

    @pytest.mark.parametrize("name", ["sub/model.plan", "../model.plan"])
    def test_graph_outside_of_the_folder(self, tmp_path: Path, reference: Path, name: str) -> None:
        version = plan(tmp_path, f'max_batch_size: 8 default_model_filename: "{name}" {TENSORS}')
        (version / "sub").mkdir()
        (version / name).write_bytes(b"opaque")
        with pytest.raises((ConversionError, RepositoryError), match=r"are in a subfolder|outside the version folder"):
            run(version, reference)

    def test_weights_in_a_subfolder(self, tmp_path: Path, reference: Path) -> None:
        version = store(tmp_path, "model.onnx")
        (version / "sub").mkdir()
        onnx.save(
            onnx.load(reference), version / "model.onnx", save_as_external_data=True, location="sub/w", size_threshold=0
        )
        with pytest.raises(ConversionError, match="are in a subfolder"):
            run(version, reference)

    def test_graph_without_inputs(self, tmp_path: Path, reference: Path) -> None:
        onnx_ir.save(graph("() => (float[3] y) { y = Identity(b) }", b=B), tmp_path / "constant.onnx")
        version = store(tmp_path, "model.onnx", (tmp_path / "constant.onnx").read_bytes())
        with pytest.raises(ConversionError, match="takes no inputs"):
            run(version, reference)

    @pytest.mark.parametrize("option", [{"pretrained": True}, {"shapes": {"": (4,)}}, {"samples": "samples.npz"}])
    def test_options_without_effect(self, tmp_path: Path, option: dict[str, Any]) -> None:
        recorded = record(tmp_path / "recorded.npz", x=draw(3, 4), y=draw(3, 3))
        options = {name: recorded if name == "samples" else value for name, value in option.items()}
        with pytest.raises(ConversionError, match="is for a reference that is a model"):
            run(plan(tmp_path), recorded, **options)

    def test_missing_reference(self, tmp_path: Path) -> None:
        version = plan(tmp_path)
        for name in ("gone.onnx", "gone.npz"):
            with pytest.raises(ConversionError, match=f"there is no file .*{name}"):
                run(version, tmp_path / name)

    def test_folder_that_cannot_be_written(
        self, tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        version = plan(tmp_path)
        monkeypatch.setattr("graphkiln_converters.adopt.os.access", lambda *_: False)  # the tests may be run by root
        with pytest.raises(ConversionError, match="cannot be written"):
            run(version, reference)

    def test_full_disk(self, tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        version = plan(tmp_path)
        monkeypatch.setattr(Manifest, "write", full)
        with pytest.raises(ConversionError, match="No space left on device"):
            run(version, reference)
        assert files(version) == {"model.plan"}

    def test_graph_that_changes_meanwhile(
        self, tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        version = plan(tmp_path)
        monkeypatch.setattr(
            "graphkiln_converters.adopt._check_decides",
            lambda *_: (version / "model.plan").write_bytes(b"the next one"),
        )
        with pytest.raises(ConversionError, match="changed while it was adopted"):
            run(version, reference)
