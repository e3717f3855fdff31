"""Whole conversions of PyTorch modules: written files, inputs and outputs, planted faults, refusals."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import modules
import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from converting import MODULES, Convert
from safetensors.torch import save_file

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError, VerificationError
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.passes import pipeline
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.passes.edge_passes import EmbedPreprocess
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.version import read_version
from graphkiln_converters import convert as rewriting
from graphkiln_converters.recipe_file import read_recipe
from graphkiln_converters.torch_libraries import import_torchvision

PREPROCESS = {"resize": [16, 16], "mean": [0.1, 0.5, 0.9], "std": [0.2, 0.3, 0.4]}


def images(count: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3), np.uint8)


def outputs(version: Path, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    with OnnxRuntimeEngine().build_reference(version / "model.onnx") as session:
        return session.run(feeds)


def expected(nchw: np.ndarray) -> np.ndarray:
    module = modules.small().eval()
    with torch.inference_mode():
        return module(torch.from_numpy(nchw)).numpy()  # type: ignore[no-any-return]


class TestWrittenFiles:
    def test_a_version_can_be_served(self, once: Convert, small: str) -> None:
        version = once(small)
        assert version.name == "1"
        assert sorted(path.name for path in version.iterdir()) == ["golden.npz", "manifest.json", "model.onnx"]
        assert sorted(path.name for path in version.parent.iterdir()) == ["1", "config.pbtxt"]
        operators = {node.op_type for node in onnx.load(version / "model.onnx").graph.node}
        assert not operators & {"BatchNormalization", "Pad", "Constant", "Identity"}
        read = read_version(version)
        assert read.manifest is not None
        assert read.manifest.conversion is not None
        assert [str(spec) for spec in read.manifest.signature.inputs] == ["INPUT_0 FP32[batch,3,16,16]"]
        assert [str(spec) for spec in read.manifest.signature.outputs] == ["OUTPUT_0 FP32[batch,5]"]
        sample = np.random.default_rng(0).normal(size=(7, 3, 16, 16)).astype(np.float32)
        np.testing.assert_allclose(outputs(version, INPUT_0=sample)["OUTPUT_0"], expected(sample), rtol=1e-4, atol=1e-5)

    def test_passes_can_be_skipped(self, run: Convert, small: str) -> None:
        version = run(small, skip=["fold-batch-norm", "pad-into-conv"])
        operators = {node.op_type for node in onnx.load(version / "model.onnx").graph.node}
        assert {"BatchNormalization", "Pad"} <= operators

    def test_the_manifest_repeats_the_conversion(self, once: Convert, small: str) -> None:
        version = once(small, softmax=True, top_k=2)
        again = read_recipe(version / "manifest.json", {"allow_code": True}, [])  # its source is a module
        assert (again.source, again.softmax, again.top_k, again.version) == (small, True, 2, None)

    def test_large_weights_are_external(self, run: Convert, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("graphkiln_backend.passes.graph_file._EXTERNAL_DATA_FROM_BYTES", 100)
        version = run(small)
        assert (version / "model.onnx.data").exists()
        sample = np.ones((1, 3, 16, 16), np.float32)
        np.testing.assert_allclose(outputs(version, INPUT_0=sample)["OUTPUT_0"], expected(sample), rtol=1e-4, atol=1e-5)
        read_version(version)
        (version / "model.onnx.data").write_bytes(b"other")
        with pytest.raises(GraphkilnError, match="does not match manifest"):
            read_version(version)


class TestInputsAndOutputs:
    def test_raw_image_bytes(self, run: Convert, small: str) -> None:
        version = run(small, input="uint8-nhwc", preprocess=PREPROCESS)
        normal = (images().astype(np.float32) / 255 - PREPROCESS["mean"]) / PREPROCESS["std"]
        nchw = normal.transpose(0, 3, 1, 2).astype(np.float32)
        got = outputs(version, INPUT_0=images())["OUTPUT_0"]
        np.testing.assert_allclose(got, expected(nchw.copy()), rtol=1e-3, atol=1e-4)
        manifest = Manifest.read(version / "manifest.json")
        assert manifest.preprocess is not None
        assert (manifest.preprocess.layout, manifest.preprocess.mean) == ("HWC", ())

    def test_softmax_and_top_k(self, once: Convert, small: str) -> None:
        sample = np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype(np.float32)
        scores = torch.from_numpy(expected(sample)).softmax(dim=1)
        best = scores.topk(2, dim=1)
        got = outputs(once(small, softmax=True, top_k=2), INPUT_0=sample)
        np.testing.assert_allclose(got["OUTPUT_0"], best.values, rtol=1e-4)
        np.testing.assert_array_equal(got["INDEX_0"], best.indices)

    def test_the_ranking_of_top_k_has_labels(self, run: Convert, small: str, tmp_path: Path) -> None:
        (tmp_path / "labels.txt").write_text("a\nb\nc\nd\ne")
        version = run(small, top_k=2, labels=str(tmp_path / "labels.txt"), keep_names=True)
        expected = Ranking(scores="output", indices="INDEX_0", labels=tuple("abcde"))
        assert Manifest.read(version / "manifest.json").ranking == expected
        config = read_config(version.parent / "config.pbtxt")
        assert Ranking.from_json(config.parameters["ranking"].string_value) == expected
        assert not any(output.label_filename for output in config.output)  # ranks have no labels

    def test_top_k_of_int8_may_be_in_another_order(self, run: Convert, small: str, tmp_path: Path) -> None:
        sample = np.random.default_rng(3).normal(size=(32, 3, 16, 16)).astype(np.float32)
        np.savez(tmp_path / "calibration.npz", INPUT_0=sample)
        given = {"calibration": str(tmp_path / "calibration.npz")}
        version = run(small, top_k=4, precision="int8", int8_by="onnxruntime", **given)
        coarse = outputs(version, INPUT_0=sample)
        order = (-expected(sample)).argsort(axis=1, kind="stable")[:, :4]
        assert (coarse["INDEX_0"] != order).any()  # otherwise nothing is tested

    def test_softmax_is_not_added_twice(self, run: Convert, digits: Path) -> None:
        version = run(str(digits / "1" / "model.onnx"), softmax=True)
        sample = np.random.default_rng(0).normal(size=(2, 1, 32, 32)).astype(np.float32)
        np.testing.assert_allclose(
            outputs(version, INPUT_0=sample)["OUTPUT_0"],
            outputs(digits / "1", INPUT_0=sample)["OUTPUT_0"],
            rtol=1e-5,
        )

    def test_nhwc(self, run: Convert, small: str) -> None:
        sample = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
        got = outputs(run(small, layout="nhwc"), INPUT_0=sample)["OUTPUT_0"]
        np.testing.assert_allclose(got, expected(sample.transpose(0, 3, 1, 2).copy()), rtol=1e-4, atol=1e-5)

    def test_names_and_outputs(self, run: Convert) -> None:
        version = run(f"python:{MODULES}:pair", outputs=["product"])
        left, right = np.full((3, 4), 2, np.float32), np.full((3, 4), 5)
        got = outputs(version, left=left, right=right)
        assert list(got) == ["product"]
        np.testing.assert_array_equal(got["product"], left * 5)

    def test_another_dynamic_dimension(self, run: Convert) -> None:
        version = run(f"python:{MODULES}:pair", dynamic=["left:1=2..6", "right:1=2..6"])
        for size in (2, 6, 11):
            feeds = {"left": np.ones((1, size), np.float32), "right": np.ones((1, size), np.int64)}
            assert {array.shape for array in outputs(version, **feeds).values()} == {(1, size)}
        with pytest.raises(ConversionError, match=r"rejects an input of image \[4, 3, 8, 16\]"):
            run(f"python:{MODULES}:baked_height", name="other", dynamic=["image:2=8..32"])


class TestPlantedFaults:
    """Each conversion that changes the outputs is refused."""

    def refuse(self, run: Convert, store: Path, source: str, **options: Any) -> None:
        with pytest.raises(VerificationError, match="the outputs changed"):
            run(source, **options)
        assert not list(store.rglob("model.onnx"))

    def plant(self, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
        monkeypatch.setattr(rewriting, "OPTIMIZATIONS", (fault, *pipeline.OPTIMIZATIONS))

    @pytest.mark.parametrize("fault", ["wrong_epsilon", "fixed_batch", "unknown_operator", "error"])
    def test_an_optimization_at_fault_is_left_out_and_named(
        self, run: Convert, small: str, monkeypatch: pytest.MonkeyPatch, fault: str
    ) -> None:
        self.plant(monkeypatch, Fault(globals()[fault]))
        version = run(small)
        conversion = Manifest.read(version / "manifest.json").conversion
        assert conversion is not None
        assert [note for note in conversion.notes if note.startswith("the pass 'fault' was left out: ")]
        assert [each.name for each in conversion.passes[:7]] == [each.name for each in pipeline.OPTIMIZATIONS]
        sample = np.random.default_rng(0).normal(size=(5, 3, 16, 16)).astype(np.float32)
        np.testing.assert_allclose(outputs(version, INPUT_0=sample)["OUTPUT_0"], expected(sample), rtol=1e-4, atol=1e-5)

    def test_a_swapped_channel_order(
        self, run: Convert, store: Path, small: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = EmbedPreprocess._shift

        def swapped(self: EmbedPreprocess) -> Any:
            return original(self)[::-1].copy()

        monkeypatch.setattr(EmbedPreprocess, "_shift", swapped)
        self.refuse(run, store, small, input="uint8-nhwc", preprocess=PREPROCESS)


def wrong_epsilon(model: onnx_ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "BatchNormalization":
            node.attributes["epsilon"] = onnx_ir.AttrFloat32("epsilon", 1.1e-5)


def fixed_batch(model: onnx_ir.Model) -> None:
    """Compute the first two rows only."""
    value = model.graph.inputs[0]
    rows = onnx_ir.Value(name="rows", const_value=onnx_ir.tensor(np.array([0, 1, 0], np.int64)))
    model.graph.register_initializer(rows)
    node = onnx_ir.node("Gather", [value, rows], {"axis": 0})
    onnx_ir.convenience.replace_all_uses_with(value, node.outputs[0])
    node.replace_input_with(0, value)
    model.graph.insert_before(model.graph[0], node)


def unknown_operator(model: onnx_ir.Model) -> None:
    next(node for node in model.graph if node.op_type == "Conv").op_type = "Convolve"


def error(model: onnx_ir.Model) -> None:
    model.graph.initializers.clear()
    raise KeyError("perm")


@dataclasses.dataclass(frozen=True)
class Fault:
    fault: Any
    name: str = "fault"
    summary: str = "a planted fault"

    def why_skip(self, model: onnx_ir.Model) -> str:  # noqa: ARG002
        return ""

    def __call__(self, model: onnx_ir.Model) -> Edge:
        self.fault(model)
        return Edge()

    def remark(self, model: onnx_ir.Model) -> str:  # noqa: ARG002
        return ""


class TestBadInput:
    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("torchvision:resnet19", "did you mean 'resnet18'"),
            ("missing.onnx", "there is no file missing.onnx"),
            (f"python:{MODULES}:branching", "branches on values"),
            (f"python:{MODULES}:baked", "fixed batch"),
            (f"python:{MODULES}:odd", "bessel_j1"),
        ],
    )
    def test_invalid_sources_are_refused(self, run: Convert, store: Path, source: str, words: str) -> None:
        with pytest.raises(ConversionError, match=words):
            run(source)
        assert not list(store.rglob("*"))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "source",
        [
            "torchvision:mobilenet_v3_small",
            "torchvision:squeezenet1_1",
            "timm:resnet10t",
        ],
    )
    def test_weights_for_other_classes(self, run: Convert, tmp_path: Path, source: str) -> None:
        kind, _, name = source.partition(":")
        torchvision = import_torchvision()
        import timm  # it imports torchvision

        make = timm.create_model if kind == "timm" else torchvision.models.get_model
        save_file(make(name, num_classes=7).state_dict(), tmp_path / "w.safetensors")
        version = run(source, weights=str(tmp_path / "w.safetensors"), shape=["3x64x64"])
        manifest = Manifest.read(version / "manifest.json")
        assert manifest.signature.outputs[0].shape == ("batch", 7)
        assert manifest.labels is None  # not those of ImageNet
        assert manifest.preprocess is not None
        assert manifest.preprocess.crop == (64, 64)

    @pytest.mark.slow
    def test_an_interruption_leaves_nothing(self, small: str, store: Path) -> None:
        command = [sys.executable, "-m", "graphkiln.cli", "convert", small, "--name", "m", "--model-store", str(store)]

        def listen() -> None:  # a shell's background jobs, and so a test run among them, ignore the signal
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listen) as process:  # noqa: PLW1509
            assert process.stderr is not None
            for line in process.stderr:
                if "proving" in line:
                    process.send_signal(signal.SIGINT)
                    break
            process.wait(30)
        assert process.returncode in (130, 1)
        time.sleep(0.1)
        assert not list(store.rglob("*.onnx"))
        assert not list(store.glob("m/.*"))


class TestSources:
    @pytest.mark.slow
    def test_an_exported_program_with_a_fixed_batch(self, run: Convert, tmp_path: Path) -> None:
        torch.export.save(torch.export.export(modules.small().eval(), (torch.zeros(2, 3, 16, 16),)), tmp_path / "m.pt2")
        version = run(str(tmp_path / "m.pt2"), allow_code=True)
        sample = np.random.default_rng(0).normal(size=(3, 3, 16, 16)).astype(np.float32)
        np.testing.assert_allclose(outputs(version, INPUT_0=sample)["OUTPUT_0"], expected(sample), rtol=1e-4, atol=1e-5)
        fixed = read_version(run(str(tmp_path / "m.pt2"), name="fixed", allow_code=True, batch="fixed"))
        assert fixed.manifest
        assert fixed.manifest.signature.inputs[0].shape == (2, 3, 16, 16)

    def test_an_exported_program_runs_no_code_by_default(self, run: Convert, tmp_path: Path) -> None:
        owned = tmp_path / "owned"

        class Payload:
            def __reduce__(self) -> Any:
                return Path.touch, (owned,)

        with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Payload()))
        with pytest.raises(ConversionError, match="can run code"):
            run(str(tmp_path / "m.pt2"))
        assert not owned.exists()

    @pytest.mark.slow
    def test_feature_maps(self, run: Convert) -> None:
        version = run("timm:resnet18", features_only=True, out_indices=[1, 3])
        signature = Manifest.read(version / "manifest.json").signature
        assert [spec.shape[1] for spec in signature.outputs] == [64, 256]

    def test_published_labels_and_preprocess(self, run: Convert, store: Path) -> None:
        version = run("torchvision:squeezenet1_1")
        manifest = Manifest.read(version / "manifest.json")
        assert manifest.preprocess is not None
        assert (manifest.preprocess.resize, manifest.preprocess.crop) == (256, (224, 224))
        assert (version / "labels.txt").read_text().splitlines()[0] == "tench"
        shutil.rmtree(store)
        assert json.dumps(manifest.conversion and manifest.conversion.recipe)
