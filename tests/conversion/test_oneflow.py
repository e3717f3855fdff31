"""Graphs that OneFlow saved: operations and whole models beside OneFlow's own answers, and every way to be damaged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import saved_graphs
from converting import Convert
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, VerificationError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.task import Segmentation
from graphkiln_backend.passes.graph_file import save
from graphkiln_converters.oneflow import translation as registry
from graphkiln_converters.oneflow.building import BY_PROTO_NAME, Op, Value
from graphkiln_converters.oneflow.mlir import parse
from graphkiln_converters.oneflow.translation import GROUP, read_state, translate
from graphkiln_converters.sources.base import SourceOptions
from graphkiln_converters.sources.oneflow_graph import OneflowGraph, open_source

OPERATORS = saved_graphs.names("operators.zip")
PROVEN = ["cnn", "several_ends", "tokens", "tokens_batch_1", "swin", "swin_batch_1", "segmenter"]
LIMIT = 1e-5


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_graphs.unpack("operators.zip", tmp_path_factory.mktemp("operators"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_graphs.unpack("models.zip", tmp_path_factory.mktemp("models"))


@pytest.fixture
def cnn(models: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(models / "cnn", tmp_path / "cnn")
    return tmp_path / "cnn"


def opened(folder: Path) -> OneflowGraph:
    return open_source(str(folder), SourceOptions())


def relative_l2(found: AnyArray, expected: AnyArray) -> float:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    difference = np.subtract(found, expected, dtype=np.float64)
    return float(np.linalg.norm(difference) / (np.linalg.norm(expected.astype(np.float64)) or 1.0))


def replace_text(graph: Path, old: str, new: str) -> None:
    text = (graph / "model" / "model.mlir").read_text()
    assert old in text
    (graph / "model" / "model.mlir").write_text(text.replace(old, new))


class TestOperators:
    @pytest.mark.parametrize("name", OPERATORS)
    def test_an_operation_answers_as_oneflow_did(self, operators: Path, name: str, tmp_path: Path) -> None:
        """At the saved batch beside OneFlow, at three others beside the graph of the saved batch."""
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

    def test_there_are_many(self) -> None:
        assert len(OPERATORS) > 200


class TestModels:
    @pytest.mark.parametrize("name", PROVEN)
    def test_a_model_is_proven_by_oneflows_answers(self, models: Path, name: str, run: Convert) -> None:
        inputs, expected = saved_graphs.reference(models / name)
        version = run(f"oneflow:{models / name}", reference=str(models / name / "reference.npz"))
        manifest = Manifest.read(version / "manifest.json")
        (verdict,) = manifest.verification
        assert verdict.verdict.endswith("PASS")
        assert verdict.relative_l2 <= LIMIT
        assert [spec.name for spec in manifest.signature.inputs] == [f"INPUT_{i}" for i in range(len(inputs))]
        assert [spec.name for spec in manifest.signature.outputs] == [f"OUTPUT_{i}" for i in range(len(expected))]
        assert all(spec.shape[0] == "batch" for spec in (*manifest.signature.inputs, *manifest.signature.outputs))
        golden = GoldenSamples.read(version / "golden.npz")
        for key, array in golden.source_outputs.items():
            np.testing.assert_array_equal(array, expected[key][: len(array)])  # OneFlow's own, bit by bit
        with OnnxRuntimeEngine().build_reference(version / "model.onnx") as session:
            for key, array in session.run(inputs).items():
                assert relative_l2(array, expected[key]) <= LIMIT

    def test_a_segmenter_says_so(self, models: Path, run: Convert) -> None:
        version = run(f"oneflow:{models / 'segmenter'}", task="segmentation", outputs=["OUTPUT_0"])
        manifest = Manifest.read(version / "manifest.json")
        assert isinstance(manifest.task, Segmentation)
        (scores,) = manifest.signature.outputs
        assert manifest.task.scores == scores.name
        assert scores.shape[1:] == (6, 16, 16)
        assert "pixels" in manifest.verification[0].verdict, "the proof has not heard of the task"

    def test_of_several_outputs_one_holds_the_scores(self, models: Path, run: Convert) -> None:
        with pytest.raises(ConversionError, match="--task segmentation needs scores") as caught:
            run(f"oneflow:{models / 'segmenter'}", task="segmentation")
        assert "--outputs" in caught.value.hint

    def test_outputs_are_in_the_order_of_the_signature(self, models: Path) -> None:
        """The job has them in the order in which they are computed."""
        source = opened(models / "several_ends")
        inputs, expected = saved_graphs.reference(models / "several_ends")
        found = source.run(inputs)
        source.close()
        text = (models / "several_ends" / "model" / "model.mlir").read_text()
        assert "-> (tensor<2x2xsi64>" in text, "the graph has lost what it is for"
        assert [array.dtype.kind for array in found.values()] == ["f", "i", "f"]
        assert all(relative_l2(found[key], array) <= LIMIT for key, array in expected.items())

    def test_batch_sizes_of_the_proof_differ_from_the_saved_one(self, models: Path, run: Convert) -> None:
        sizes = {}
        for name in ("cnn", "tokens_batch_1", "segmenter"):  # saved with 2, 1 and 3
            version = run(f"oneflow:{models / name}", name=name)
            (verdict,) = Manifest.read(version / "manifest.json").verification
            sizes[name] = verdict.verdict
        assert "batch sizes 1, 3" in sizes["cnn"]
        assert "batch sizes 3, 5" in sizes["tokens_batch_1"]
        assert "batch sizes 1, 5" in sizes["segmenter"]

    def test_batch_norm_and_bias_go_into_the_convolution(self, models: Path, run: Convert) -> None:
        graph = onnx.load(run(f"oneflow:{models / 'cnn'}") / "model.onnx").graph
        kinds = {node.op_type for node in graph.node}
        assert "BatchNormalization" not in kinds
        assert "Pad" not in kinds

    def test_layer_norms_are_one_node(self, models: Path, run: Convert) -> None:
        graph = onnx.load(run(f"oneflow:{models / 'tokens'}") / "model.onnx").graph
        kinds = [node.op_type for node in graph.node]
        assert kinds.count("LayerNormalization") == 2
        assert "Reciprocal" not in kinds

    def test_the_folder_above_is_found(self, models: Path) -> None:
        opened(models / "cnn").close()
        opened(models / "cnn" / "model").close()

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

    def test_the_options_of_every_converter(self, models: Path, run: Convert) -> None:
        preprocess = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "crop": [16, 16], "resize": 16}
        version = run(f"oneflow:{models / 'cnn'}", input="uint8-nhwc", preprocess=preprocess, top_k=3)
        signature = Manifest.read(version / "manifest.json").signature
        assert str(signature.inputs[0]) == "INPUT_0 UINT8[batch,16,16,3]"
        assert len(signature.outputs) == 2


class TestReference:
    def test_wrong_answers_are_refused(self, cnn: Path, run: Convert, store: Path) -> None:
        inputs, expected = saved_graphs.reference(cnn)
        np.savez(cnn / "other.npz", **inputs, OUTPUT_0=expected["OUTPUT_0"] * 1.001)
        with pytest.raises(VerificationError, match="FAIL"):
            run(f"oneflow:{cnn}", reference=str(cnn / "other.npz"))
        assert not (store / "m" / "1").exists()

    def test_it_serves_any_source(self, small: str, run: Convert, tmp_path: Path) -> None:
        first = run(small, name="first")
        golden = GoldenSamples.read(first / "golden.npz")
        np.savez(tmp_path / "recorded.npz", **golden.inputs, **golden.source_outputs)
        second = run(small, name="second", reference=str(tmp_path / "recorded.npz"))
        again = GoldenSamples.read(second / "golden.npz")
        for key, array in golden.source_outputs.items():
            np.testing.assert_array_equal(again.source_outputs[key], array)

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"INPUT_0": np.zeros((2, 3, 16, 16), "f4")}, "lacks 'OUTPUT_0'"),
            ({"OUTPUT_0": np.zeros((2, 10), "f4")}, "lacks 'INPUT_0'"),
            ({"INPUT_0": np.zeros((2, 3, 16, 16)), "OUTPUT_0": np.zeros((2, 10), "f4")}, "is float64 .* expected FP32"),
            ({"INPUT_0": np.zeros((2, 3, 16), "f4"), "OUTPUT_0": np.zeros((2, 10), "f4")}, r"expected FP32 \[samples"),
            (
                {"INPUT_0": np.zeros((2, 3, 16, 16), "f4"), "OUTPUT_0": np.zeros((3, 10), "f4")},
                "as many samples of everything.*INPUT_0 2, OUTPUT_0 3",
            ),
        ],
    )
    def test_files_that_do_not_fit(
        self, models: Path, run: Convert, tmp_path: Path, arrays: dict[str, AnyArray], message: str
    ) -> None:
        np.savez(tmp_path / "r.npz", **arrays)
        with pytest.raises(ConversionError, match=message):
            run(f"oneflow:{models / 'cnn'}", reference=str(tmp_path / "r.npz"))

    def test_a_file_that_is_none(self, models: Path, run: Convert, tmp_path: Path) -> None:
        (tmp_path / "r.npz").write_text("no")
        with pytest.raises(ConversionError, match=r"cannot read reference from .*r\.npz"):
            run(f"oneflow:{models / 'cnn'}", reference=str(tmp_path / "r.npz"))

    def test_not_beside_an_input_that_the_source_has_not(self, models: Path, run: Convert) -> None:
        reference = str(models / "cnn" / "reference.npz")
        with pytest.raises(ConversionError, match="--reference holds inputs and outputs of the source as it is"):
            run(f"oneflow:{models / 'cnn'}", reference=reference, input="uint8-nhwc")


class TestState:
    @pytest.mark.parametrize("kind", BY_PROTO_NAME)
    def test_every_dtype(self, tmp_path: Path, kind: str) -> None:
        array = np.array([[0, 1, 2], [3, 0, 5]]).astype(BY_PROTO_NAME[kind].numpy)
        (tmp_path / "t").mkdir()
        (tmp_path / "t" / "out").write_bytes(array.tobytes())
        (tmp_path / "t" / "meta").write_text(f"shape {{\n  dim: 2\n  dim: 3\n}}\ndata_type: {kind}\n")
        tensor = read_state(tmp_path, "t")
        assert tensor.dtype is BY_PROTO_NAME[kind]
        np.testing.assert_array_equal(tensor.load(), array)

    @pytest.mark.parametrize(("dims", "shape"), [("", ()), ("dim: 0", (0,)), ("dim: 1 dim: 1", (1, 1))])
    def test_scalars_and_empty_ones(self, tmp_path: Path, dims: str, shape: tuple[int, ...]) -> None:
        (tmp_path / "t").mkdir()
        (tmp_path / "t" / "out").write_bytes(np.ones(shape, "f4").tobytes())
        (tmp_path / "t" / "meta").write_text(f"shape {{ {dims} }} data_type: kFloat some_later_field: 3")
        assert read_state(tmp_path, "t").load().shape == shape

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (shutil.rmtree, "there is no .*classes.weight/meta"),
            (lambda tensor: (tensor / "out").unlink(), "there is no .*classes.weight/out"),
            (lambda tensor: (tensor / "out").write_bytes(b"1234"), "has 4 bytes, expected 320 .*: it is too short"),
            (lambda tensor: (tensor / "out").write_bytes(bytes(324)), "has 324 bytes, expected 320 .*: it is too long"),
            (lambda tensor: (tensor / "more").write_bytes(b""), "more is unknown"),
            (lambda tensor: (tensor / "meta").write_text("shape { dim: 10 dim: 8 }"), "names no data_type"),
            (lambda tensor: (tensor / "meta").write_text("data_type: kOFRecord"), "kOFRecord"),
            (lambda tensor: (tensor / "meta").write_text("shape {"), "meta cannot be read"),
            (lambda tensor: (tensor / "meta").write_bytes(b"\xff\xfe"), "meta cannot be read"),
            (lambda tensor: (tensor / "meta").write_text("shape { dim: -80 } data_type: kFloat"), r"shape \[-80\]"),
            (
                lambda tensor: (tensor / "meta").write_text("shape { dim: 8 dim: 10 } data_type: kFloat"),
                r"is FP32 \[8, 10\], but line \d+ of the graph expects tensor<10x8xf32>",
            ),
            (
                lambda tensor: (tensor / "meta").write_text("shape { dim: 10 dim: 8 } data_type: kInt32"),
                r"is INT32 \[10, 8\], but line",
            ),
        ],
    )
    def test_damage_names_the_tensor(self, cnn: Path, damage: Callable[[Path], object], message: str) -> None:
        damage(cnn / "model" / "m.classes.weight")
        with pytest.raises(ConversionError, match=r"state tensor 'm\.classes\.weight'.*" + message):
            opened(cnn)

    def test_tensors_that_the_graph_does_not_use_are_no_fault(self, models: Path) -> None:
        assert (models / "cnn" / "model" / "m.norm.num_batches_tracked").is_dir()
        opened(models / "cnn").close()

    def test_what_oneflow_did_not_save_is_told_with_the_fix(self, cnn: Path) -> None:
        replace_text(cnn, '"m.classes.weight"', '"m-FreeEagerTensor-3"')
        with pytest.raises(ConversionError, match=r"m-FreeEagerTensor-3.*register_buffer"):
            opened(cnn)

    @pytest.mark.parametrize("name", ["../cnn", "..", "a/b"])
    def test_no_name_leads_out(self, cnn: Path, name: str) -> None:
        replace_text(cnn, '"m.classes.weight"', f'"{name}"')
        with pytest.raises(ConversionError, match="leads out of"):
            opened(cnn)


class TestErrors:
    def test_all_unknown_operations_at_once(self, cnn: Path) -> None:
        replace_text(cnn, "oneflow.relu", "oneflow.warp")
        replace_text(cnn, "oneflow.sigmoid", "oneflow.bend")
        with pytest.raises(ConversionError, match=r"2 of \d+ kinds .*: bend \(1 times\), warp \(1 times\)") as caught:
            opened(cnn)
        assert GROUP in caught.value.hint

    def test_a_graph_in_training_mode(self, models: Path) -> None:
        with pytest.raises(ConversionError, match=r"line \d+: normalization .*saved in training mode.*model\.eval\(\)"):
            opened(models / "training")

    def test_a_model_that_mixes_samples(self, models: Path, run: Convert) -> None:
        with pytest.raises(ConversionError, match=r"cannot be made to vary: .*reduces over the batch"):
            run(f"oneflow:{models / 'mixes_samples'}")

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (
                "strides = [1 : si32, 1 : si32]",
                "pace = 1 : si32",
                r"conv2d 'm\.first-conv2d-\d': attribute 'strides' is",
            ),
            ('data_format = "channels_first", device', 'data_format = "channels_last", device', "channels_last"),
            ("strides = [1 : si32, 1 : si32]", "strides = [2 : si32, 2 : si32]", r"has the shape .*, OneFlow's has"),
            ("groups = 1 : si32", 'groups = "one"', "attribute 'groups' is 'one', expected int"),
        ],
    )
    def test_attributes_that_are_missing_or_wrong(self, cnn: Path, old: str, new: str, message: str) -> None:
        replace_text(cnn, old, new)
        with pytest.raises(ConversionError, match=r"line \d+: .*" + message):
            opened(cnn)

    def test_damaged_text_names_file_line_and_column(self, cnn: Path) -> None:
        replace_text(cnn, "oneflow.return", "oneflow.return ;")
        with pytest.raises(ConversionError, match=r"model\.mlir: line \d+, column \d+: expected .*found ';"):
            opened(cnn)

    @pytest.mark.parametrize(
        ("location", "message"), [("nowhere", "there is no folder"), (".", "there is no model.mlir in")]
    )
    def test_no_graph_there(self, tmp_path: Path, location: str, message: str) -> None:
        with pytest.raises(ConversionError, match=message):
            opened(tmp_path / location)

    def test_options_that_mean_nothing_here(self, models: Path, run: Convert, tmp_path: Path) -> None:
        weights = tmp_path / "w.pth"
        weights.touch()
        with pytest.raises(ConversionError, match="holds its own weights"):
            run(f"oneflow:{models / 'cnn'}", weights=str(weights))
        with pytest.raises(ConversionError, match="only the batch of a graph of OneFlow can vary"):
            run(f"oneflow:{models / 'cnn'}", dynamic=["INPUT_0:2=8..32"])


NUMBER = re.compile(r"(?<=[ \[x<])-?\d+(?=[ \]x:,])")


class TestFuzz:
    """A graph whose numbers are others is a graph, or an error of ours."""

    @pytest.mark.slow
    @settings(max_examples=80, deadline=None)
    @given(place=st.integers(0, 10_000), number=st.sampled_from([-1, 0, 1, 2, 3, 5, 7, 64, 2**31, 2**63]))
    def test_a_number_changed(self, models: Path, place: int, number: int) -> None:
        text = (models / "tokens" / "model" / "model.mlir").read_text()
        found = list(NUMBER.finditer(text))
        match = found[place % len(found)]
        self.translated(text[: match.start()] + str(number) + text[match.end() :], models / "tokens" / "model")

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 10_000), st.sampled_from(["conv2d", "matmul", "concat", "slice", "variable", "input", "pad"]))
    def test_an_operation_that_is_another(self, models: Path, place: int, other: str) -> None:
        text = (models / "tokens" / "model" / "model.mlir").read_text()
        found = list(re.finditer(r'"oneflow\.(\w+)"', text))
        match = found[place % len(found)]
        self.translated(text[: match.start(1)] + other + text[match.end(1) :], models / "tokens" / "model")

    def translated(self, text: str, folder: Path) -> None:
        try:
            translate(parse(text), folder)
        except ConversionError:
            return


def halved(op: Op) -> Value:
    """A translator as a third party would write it."""
    return op.emit("Mul", op.x, op.scalar(0.5))


class TestThirdParties:
    def test_a_translator_from_an_entry_point(self, cnn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        replace_text(cnn, "oneflow.relu", "theirs.half")
        entry = EntryPoint(name="theirs.half", value=f"{__name__}:halved", group=GROUP)
        monkeypatch.setattr(EntryPoint, "load", lambda _: halved)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == GROUP else [])
        source = opened(cnn)
        model = source.export()
        source.close()
        assert isinstance(model, onnx_ir.Model)
        assert any(node.op_type == "Mul" and str(node.name).startswith("m-relu") for node in model.graph)

    def test_theirs_counts_where_both_have_one(self, cnn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = EntryPoint(name="relu", value=f"{__name__}:halved", group=GROUP)
        monkeypatch.setattr(EntryPoint, "load", lambda _: halved)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry])  # noqa: ARG005
        source = opened(cnn)
        kinds = {node.op_type for node in source.export().graph}
        source.close()
        assert "Relu" not in kinds


def test_the_guide_counts_them(repository: Path) -> None:
    text = " ".join((repository / "docs" / "how-to" / "oneflow.md").read_text().split())
    assert f" {len(registry.built_in_translators())} operations are known" in text


def test_the_manifest_tells_where_it_came_from(models: Path, run: Convert) -> None:
    version = run(f"oneflow:{models / 'cnn'}")
    document = json.loads((version / "manifest.json").read_text())
    assert document["provenance"]["source"] == f"oneflow:{models / 'cnn' / 'model'}"
    assert "lark" in document["provenance"]["versions"]


def test_every_translator_is_held_to_a_graph_of_oneflow(operators: Path, models: Path) -> None:
    saved = [*operators.glob("*/model/model.mlir"), *models.glob("*/model/model.mlir")]
    used = {operation.kind for path in saved for operation in parse(path.read_text()).operations}
    assert sorted(set(registry.built_in_translators()) - used) == []
