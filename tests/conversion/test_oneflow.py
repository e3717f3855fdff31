"""Graphs saved by OneFlow: operations and whole models, compared with OneFlow's recorded outputs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import saved_graphs
from converting import Convert
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import recipe

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, VerificationError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.task import Segmentation
from graphkiln_backend.passes.graph_file import save
from graphkiln_converters.oneflow import translation as registry
from graphkiln_converters.oneflow.mlir import parse
from graphkiln_converters.oneflow.translation import translate
from graphkiln_converters.sources.oneflow_graph import OneflowGraph, open_source

OPERATORS = saved_graphs.names("operators.zip")
LIMIT = 1e-5


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_graphs.unpack("operators.zip", tmp_path_factory.mktemp("operators"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_graphs.unpack("models.zip", tmp_path_factory.mktemp("models"))


def opened(folder: Path) -> OneflowGraph:
    return open_source(str(folder), recipe())


def relative_l2(found: AnyArray, expected: AnyArray) -> float:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    difference = np.subtract(found, expected, dtype=np.float64)
    return float(np.linalg.norm(difference) / (np.linalg.norm(expected.astype(np.float64)) or 1.0))


class TestOperators:
    @pytest.mark.parametrize("name", OPERATORS)
    def test_an_operation_computes_the_same_as_oneflow(self, operators: Path, name: str, tmp_path: Path) -> None:
        """With the saved batch compared with OneFlow, with others compared with the graph of the saved batch."""
        inputs, expected = saved_graphs.reference(operators / name)
        source = opened(operators / name)
        try:
            for key, array in source.run(inputs).items():
                assert relative_l2(array, expected[key]) <= LIMIT, key
            save(source.export(), tmp_path / "varying.onnx")
            with OnnxRuntimeEngine().build_reference(tmp_path / "varying.onnx") as varying:
                for rows in (1, 2, 5):
                    feeds = {key: np.concatenate([array, array[::-1], array])[:rows] for key, array in inputs.items()}
                    found, saved = varying.run(feeds), source.run(feeds)
                    for key, array in saved.items():
                        assert relative_l2(found[key], array) <= LIMIT, (key, rows)
        finally:
            source.close()


class TestModels:
    @pytest.mark.parametrize(
        ("name", "batch_sizes"),
        [
            ("cnn", (1, 3)),  # saved with 2
            ("several_ends", (1, 3)),
            ("tokens", (1, 3)),
            ("tokens_batch_1", (3, 5)),
            ("swin", (1, 3)),
            ("swin_batch_1", (3, 5)),
            ("segmenter", (1, 5)),
        ],
    )
    def test_a_model_is_proven_by_outputs_of_oneflow(
        self, models: Path, name: str, batch_sizes: tuple[int, ...], run: Convert
    ) -> None:
        inputs, expected = saved_graphs.reference(models / name)
        version = run(f"oneflow:{models / name}", reference=str(models / name / "reference.npz"))
        manifest = Manifest.read(version / "manifest.json")
        assert manifest.provenance.source == f"oneflow:{models / name / 'model'}"
        assert "lark" in manifest.provenance.versions
        (verdict,) = manifest.verification
        assert verdict.verdict.endswith("PASS")
        assert verdict.relative_l2 <= LIMIT
        assert verdict.batch_sizes == batch_sizes, "none of them is the saved one"
        assert [spec.name for spec in manifest.signature.inputs] == [f"INPUT_{i}" for i in range(len(inputs))]
        assert [spec.name for spec in manifest.signature.outputs] == [f"OUTPUT_{i}" for i in range(len(expected))]
        assert all(spec.shape[0] == "batch" for spec in (*manifest.signature.inputs, *manifest.signature.outputs))
        golden = GoldenSamples.read(version / "golden.npz")
        for key, array in golden.source_outputs.items():
            np.testing.assert_array_equal(array, expected[key][: len(array)])  # the recorded ones
        with OnnxRuntimeEngine().build_reference(version / "model.onnx") as session:
            for key, array in session.run(inputs).items():
                assert relative_l2(array, expected[key]) <= LIMIT
        kinds = {node.op_type for node in onnx.load(version / "model.onnx").graph.node}
        assert not kinds & {"BatchNormalization", "Pad", "Reciprocal"}, "norms and biases are fused"

    def test_a_segmenter(self, models: Path, run: Convert) -> None:
        version = run(f"oneflow:{models / 'segmenter'}", task="segmentation", outputs=["OUTPUT_0"])
        manifest = Manifest.read(version / "manifest.json")
        assert isinstance(manifest.task, Segmentation)
        (scores,) = manifest.signature.outputs
        assert manifest.task.scores == scores.name
        assert scores.shape[1:] == (6, 16, 16)
        assert "pixels" in manifest.verification[0].verdict, "the task is not in the proof"

    def test_an_output_without_the_batch_can_be_left_out(self, tmp_path: Path, run: Convert) -> None:
        text = """module {
  oneflow.job @G(%arg0: tensor<2x3xf32>) -> (tensor<2x3xf32>, tensor<3x2xf32>) {
    %0 = "oneflow.relu"(%arg0) {op_name = "r"} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    %1 = "oneflow.transpose"(%0) {op_name = "t", perm = [1 : si32, 0 : si32]} : (tensor<2x3xf32>) -> tensor<3x2xf32>
    oneflow.return %0, %1 : tensor<2x3xf32>, tensor<3x2xf32>
  }
}"""
        (tmp_path / "model.mlir").write_text(text)
        with pytest.raises(ConversionError, match=r"'OUTPUT_1' has the shape .*leave the output out"):
            run(f"oneflow:{tmp_path}")
        version = run(f"oneflow:{tmp_path}", outputs=["OUTPUT_0"])
        signature = Manifest.read(version / "manifest.json").signature
        assert list(map(str, signature.outputs)) == ["OUTPUT_0 FP32[batch,3]"]

    def test_raw_pixels_and_top_k(self, models: Path, run: Convert) -> None:
        preprocess = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "crop": [16, 16], "resize": 16}
        version = run(f"oneflow:{models / 'cnn'}", input="uint8-nhwc", preprocess=preprocess, top_k=3)
        signature = Manifest.read(version / "manifest.json").signature
        assert str(signature.inputs[0]) == "INPUT_0 UINT8[batch,16,16,3]"
        assert len(signature.outputs) == 2

    def test_a_graph_in_training_mode_is_refused(self, models: Path) -> None:
        with pytest.raises(ConversionError, match=r"line \d+: normalization .*saved in training mode.*model\.eval\(\)"):
            opened(models / "training")

    def test_a_model_that_mixes_samples_is_refused(self, models: Path, run: Convert) -> None:
        with pytest.raises(ConversionError, match=r"reduces over the batch"):
            run(f"oneflow:{models / 'mixes_samples'}")


class TestReference:
    def test_other_recorded_outputs_are_refused(self, models: Path, tmp_path: Path, run: Convert, store: Path) -> None:
        inputs, expected = saved_graphs.reference(models / "cnn")
        np.savez(tmp_path / "other.npz", **inputs, OUTPUT_0=expected["OUTPUT_0"] * 1.001)
        with pytest.raises(VerificationError, match="FAIL"):
            run(f"oneflow:{models / 'cnn'}", reference=str(tmp_path / "other.npz"))
        assert not (store / "m" / "1").exists()

    def test_recorded_outputs_prove_any_source(self, small: str, run: Convert, tmp_path: Path) -> None:
        first = run(small, name="first")
        golden = GoldenSamples.read(first / "golden.npz")
        np.savez(tmp_path / "recorded.npz", **golden.inputs, **golden.source_outputs)
        second = run(small, name="second", reference=str(tmp_path / "recorded.npz"))
        again = GoldenSamples.read(second / "golden.npz")
        for key, array in golden.source_outputs.items():
            np.testing.assert_array_equal(again.source_outputs[key], array)


NUMBER = re.compile(r"(?<=[ \[x<])-?\d+(?=[ \]x:,])")


class TestFuzz:
    """Any changed graph is translated or refused with a ConversionError."""

    @pytest.mark.slow
    @settings(max_examples=80, deadline=None)
    @given(place=st.integers(0, 10_000), number=st.sampled_from([-1, 0, 1, 2, 3, 5, 7, 64, 2**31, 2**63]))
    def test_a_number_changed(self, models: Path, place: int, number: int) -> None:
        text = (models / "tokens" / "model" / "model.mlir").read_text()
        found = list(NUMBER.finditer(text))
        match = found[place % len(found)]
        self.translated(text[: match.start()] + str(number) + text[match.end() :], models / "tokens" / "model")

    @settings(max_examples=12, deadline=None)
    @given(st.integers(0, 10_000), st.sampled_from(["conv2d", "matmul", "concat", "slice", "variable", "input", "pad"]))
    def test_an_operation_replaced(self, models: Path, place: int, other: str) -> None:
        text = (models / "tokens" / "model" / "model.mlir").read_text()
        found = list(re.finditer(r'"oneflow\.(\w+)"', text))
        match = found[place % len(found)]
        self.translated(text[: match.start(1)] + other + text[match.end(1) :], models / "tokens" / "model")

    def translated(self, text: str, folder: Path) -> None:
        try:
            translate(parse(text), folder)
        except ConversionError:
            return


def test_every_translator_is_compared_with_oneflow(operators: Path, models: Path) -> None:
    saved = [*operators.glob("*/model/model.mlir"), *models.glob("*/model/model.mlir")]
    used = {operation.kind for path in saved for operation in parse(path.read_text()).operations}
    assert sorted(set(registry.built_in_translators()) - used) == []
