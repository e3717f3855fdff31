"""ONNX files as sources: inputs, old opsets, vocabularies, and refused files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import zoo
from graphs import graph
from odd_files import ODD
from onnx import TensorProto, helper
from recipes import recipe

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes.graph_file import OPSET
from graphkiln_converters.sources.base import synthetic_samples
from graphkiln_converters.sources.onnx_file import ODD_WORDS, ReferenceSession, known_words, open_source

OPTIONS = recipe()


def write(path: Path, shape: list[str | int], *, opset: int = OPSET, dtype: int = TensorProto.FLOAT) -> Path:
    """A graph that adds `x` to itself."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", dtype, shape)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


def test_inputs_are_those_of_the_graph(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", ["n", 3, "height", 5], dtype=TensorProto.INT64)
    model = open_source(str(path), OPTIONS)
    (spec,) = model.inputs
    assert (spec.name, spec.dtype, spec.shape) == ("x", DType.INT64, (3, 8, 5))
    assert spec.dynamic == {1: (1, 16)}
    assert model.description == str(path)
    model.close()


@pytest.mark.parametrize(
    ("text", "declared", "computed"),
    [
        ("(float[n,4] x) => (float[n,2] y) { y = MatMul(x, w) }", ["n", 1], ["n", 2]),
        ("(float[1,4] x) => (float[1,2] y) { y = MatMul(x, w) }", [1, 3], ["batch", 2]),
        ("(float[n,a] x) => (float[n,k] y) { c = Concat<axis=1>(x, x) y = Relu(c) }", ["n", "a"], ["n", "y.1"]),
        ("(float[n,a] x, float[n,b] z) => (float[n,a] y) { y = Concat<axis=1>(x) }", ["n", "b"], ["n", "a"]),
        ("(float[n,a] x) => (float[n,a,1] y) { t = Unsqueeze(x, last) y = Relu(t) }", ["n", "a"], ["n", "a", 1]),
        ("(float[n,4] x) => (float[n,2] y) { y = MatMul(x, w) }", ["n", 2], []),
        ("(float[n,m] x) => (float[n,m] y) { y = Relu(x) }", ["n", "other"], []),
    ],
    ids=["columns", "fixed batch", "symbol", "another input's", "rank", "right", "another symbol"],
)
def test_outputs_have_the_shapes_in_which_they_are_computed(
    tmp_path: Path, text: str, declared: list[str | int], computed: list[str | int]
) -> None:
    made = graph(text, w=np.ones((4, 2), "f4"), last=np.array([2]))
    made.graph.outputs[0].shape = onnx_ir.Shape(declared)
    onnx_ir.save(made, tmp_path / "m.onnx")
    model = open_source(str(tmp_path / "m.onnx"), OPTIONS)
    (value,) = model.export().graph.outputs
    model.close()
    found = [dim if isinstance(dim, int) else dim.value for dim in value.shape or ()]
    assert found == (computed or declared)
    assert [note for note in model.notes if note.startswith("the file declares y")] == [*model.notes[: bool(computed)]]


def test_labels_that_are_declared_with_one_row_have_a_batch(tmp_path: Path) -> None:
    """As LightGBM's by onnxmltools."""
    made = graph("(float[n,4] x) => (int64[n] y) { y = ArgMax<axis=1, keepdims=0>(x) }")
    made.graph.outputs[0].shape = onnx_ir.Shape([1])
    onnx_ir.save(made, tmp_path / "m.onnx")
    model = open_source(str(tmp_path / "m.onnx"), OPTIONS)
    (value,) = model.export().graph.outputs
    model.close()
    assert str(value.shape) == "[n]"
    assert not model.whole


@pytest.mark.parametrize("opset", [13, OPSET])
def test_an_old_opset_is_converted(tmp_path: Path, opset: int) -> None:
    model = open_source(str(write(tmp_path / "m.onnx", ["n", 2], opset=opset)), OPTIONS)
    exported = model.export()
    model.close()
    assert exported.opset_imports[""] == OPSET
    assert [node.op_type for node in exported.graph] == ["Add"]


class TestErrors:
    @pytest.mark.parametrize("kept", [0, 20, 60])
    def test_a_truncated_file_is_refused(self, tmp_path: Path, kept: int) -> None:
        path = write(tmp_path / "m.onnx", ["n", 2])
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(ConversionError, match=r"m\.onnx cannot be loaded"):
            open_source(str(path), OPTIONS)


@pytest.mark.parametrize("kind", ODD)
def test_special_files_are_refused(tmp_path: Path, kind: str) -> None:
    make, reason = ODD[kind]
    make(tmp_path / "m.onnx")
    with pytest.raises(ConversionError, match=f"{reason}|m\\.onnx is a folder|there is no file .*m\\.onnx"):
        open_source(str(tmp_path / "m.onnx"), OPTIONS)


def test_weights_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", ["n", 3])
    model = onnx.load(path)
    weights = model.graph.initializer.add(name="w", data_type=1, dims=[3], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="../../etc/passwd")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ConversionError, match=r"cannot be loaded: .*'\.\./\.\./etc/passwd', which leads out"):
        open_source(str(path), OPTIONS)


def test_a_sequence_of_maps_becomes_a_tensor(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(zoo.zipped().SerializeToString())
    model = open_source(str(tmp_path / "m.onnx"), OPTIONS)
    outputs = model.run({"X": np.array([[9, 0], [0, 9]], "f4")})
    assert outputs["label"].tolist() == ["no", "né"]
    assert outputs["probability"].argmax(axis=1).tolist() == [0, 1]
    assert "sequence of maps" in model.notes[0]
    onnx.checker.check_model(onnx_ir.to_proto(model.export()))
    model.close()


def test_a_sequence_is_left_out_of_the_export(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(zoo.with_tensor_and_sequence().SerializeToString())
    model = open_source(str(tmp_path / "m.onnx"), OPTIONS)
    assert list(model.run({"x": np.ones((2, 3), "f4")})) == ["y"]
    assert [value.name for value in model.export().graph.outputs] == ["y"]
    assert "'parts' is left out" in model.notes[0]
    model.close()


@pytest.mark.parametrize(
    ("body", "tensors", "dtype", "expected"),
    [
        ("y = Cast<to=1>(x)", "", "uint8", (0, 255)),
        ("y = Cast<to=1>(x)", "", "int8", (-128, 127)),
        ("y = Gather(table, x)", "float[5] table = {1,2,3,4,5}", "int64", (0, 4)),
        ("i = Cast<to=7>(x) y = Gather(table, i)", "float[5] table = {1,2,3,4,5}", "uint8", (0, 1)),
        ("y = Cast<to=1>(x)", "", "int64", (0, 1)),
    ],
)
def test_synthetic_integers_have_the_ends_that_the_graph_accepts(
    tmp_path: Path, body: str, tensors: str, dtype: str, expected: tuple[int, int]
) -> None:
    text = f"<ir_version: 9, opset_import: ['' : 18]> g ({dtype}[n,4] x) => (float[n,4] y) <{tensors}> {{ {body} }}"
    onnx.save(onnx.parser.parse_model(text.replace("'", '"').replace(" <>", "")), tmp_path / "m.onnx")
    with open_source(str(tmp_path / "m.onnx"), OPTIONS) as model:
        made = synthetic_samples(model.inputs, 16, {}, seed=0)["x"]
    assert (made.min(), made.max()) == expected


def one_hot(path: Path, zeros: int) -> str:
    """A graph that knows two colors."""
    colors: dict[str, Any] = {"cats_strings": ["red", "grün"], "zeros": zeros}
    node = helper.make_node("OneHotEncoder", ["color"], ["y"], domain="ai.onnx.ml", **colors)
    color, found = zoo.value("color", ("batch",), TensorProto.STRING), zoo.value("y", ("batch", 2))
    path.write_bytes(zoo.with_ml(zoo.model([node], [color], [found])).SerializeToString())
    return str(path)


def test_synthetic_text_has_known_and_unknown_words(tmp_path: Path) -> None:
    model = open_source(one_hot(tmp_path / "m.onnx", zeros=1), OPTIONS)
    assert model.inputs[0].words == ("red", "grün", *ODD_WORDS)
    model.close()


def test_a_graph_that_rejects_unknown_words_gets_known_ones(tmp_path: Path) -> None:
    model = open_source(one_hot(tmp_path / "m.onnx", zeros=0), OPTIONS)
    assert model.inputs[0].words == ("red", "grün")
    with pytest.raises(ConversionError, match=r"rejects the samples.*--samples FILE\.npz"):
        model.run({"color": np.array(["blue"], np.object_)})
    model.close()


def test_invalid_graphs_that_runtimes_accept_are_repaired(tmp_path: Path) -> None:
    onnx.save(zoo.listed_twice(), tmp_path / "m.onnx")
    model = open_source(str(tmp_path / "m.onnx"), OPTIONS)
    graph = model.export().graph
    model.close()
    assert model.whole == ""
    assert graph.name
    assert [value.name for value in graph.outputs] == ["y"]
    assert graph.inputs[0].shape is not None
    assert not isinstance(graph.inputs[0].shape[0], int)


def test_an_input_of_unknown_rank_is_refused(tmp_path: Path) -> None:
    proto = zoo.scale(("n", 3))
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(ConversionError, match="does not declare the number of dimensions of input 'x'"):
        open_source(str(tmp_path / "m.onnx"), OPTIONS)


def test_a_graph_that_draws_random_numbers_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["r"]), helper.make_node("Add", ["x", "r"], ["y"])]
    model = zoo.model(nodes, [zoo.value("x", ("batch", 3))], [zoo.value("y", ("batch", 3))])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ConversionError, match="draws random numbers"):
        open_source(str(tmp_path / "model.onnx"), OPTIONS)


def test_unused_random_numbers_are_accepted(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["r"]),
        helper.make_node("Shape", ["r"], ["s"]),
        helper.make_node("Reshape", ["x", "s"], ["y"]),
    ]
    model = zoo.model(nodes, [zoo.value("x", ("batch", 3))], [zoo.value("y", ("batch", 3))])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    source = open_source(str(tmp_path / "model.onnx"), OPTIONS)
    source.close()
    assert source.outputs == ("y",)


def test_a_graph_without_outputs_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    (tmp_path / "model.onnx").write_bytes(zoo.model(nodes, [zoo.value("x", ("batch", 3))], []).SerializeToString())
    with pytest.raises(ConversionError, match="its graph has no outputs"):
        open_source(str(tmp_path / "model.onnx"), OPTIONS)


def test_custom_operators_are_refused_with_the_way_to_serve_them(tmp_path: Path) -> None:
    node = helper.make_node("Twice", ["x"], ["y"], domain="com.example")
    model = zoo.model([node], [zoo.value("x", ("n", 4))], [zoo.value("y", ("n", 4))])
    model.opset_import.add(domain="com.example", version=1)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ConversionError, match="not a registered function/op") as caught:
        open_source(str(tmp_path / "m.onnx"), recipe())
    assert "convert loads no libraries of custom operators: serve such a graph as it is" in caught.value.hint


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("h, m, v = BatchNormalization<training_mode: int = 1>(x, a, b, c, d) y = Relu(h)", "BatchNormalization 'h'"),
        ("t = Constant<value = bool {1}>() r = Constant<value = float {0.5}>() y = Dropout(x, r, t)", "draws random"),
    ],
)
def test_a_graph_in_training_mode_is_refused(tmp_path: Path, body: str, words: str) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 18]> g (float[n,4] x) => (float[n,4] y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    names = [name for name in "abcd" if name in body.partition("(x")[2].partition(")")[0]]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.ones(4, np.float32), name) for name in names)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ConversionError, match=words) as caught:
        open_source(str(tmp_path / "m.onnx"), OPTIONS)
    assert "model.eval()" in caught.value.hint
    assert "STORE/NAME/1/model.onnx" in caught.value.hint


def test_pytorch_is_not_imported() -> None:
    """It takes seconds, and a conversion of a file does not need it."""
    program = "import sys, graphkiln_converters.convert, graphkiln_converters.sources.onnx_file; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "torch" not in loaded.split()


# The vocabulary of a graph.


def graph_of(*nodes: onnx.NodeProto, **constants: Any) -> onnx.GraphProto:
    inputs = [zoo.value(name, ("batch", 1), TensorProto.STRING) for name in ("color", "size")]
    return zoo.model(list(nodes), inputs, [zoo.value("y", ("batch", 1))], constants).graph


def test_each_input_has_the_words_of_its_readers() -> None:
    graph = graph_of(
        helper.make_node("Identity", ["color"], ["same"]),
        helper.make_node("OneHotEncoder", ["same"], ["a"], cats_strings=["red", "gr\u00fcn"], zeros=1),
        helper.make_node("LabelEncoder", ["size"], ["b"], keys_strings=["S", "L"], values_strings=["small", "large"]),
        helper.make_node("LinearClassifier", ["a"], ["y"], classlabels_strings=["cheap", "dear"]),
    )
    assert known_words(graph, "color") == ("red", "gr\u00fcn")
    assert known_words(graph, "size") == ("S", "L")
    assert known_words(graph, "nonesuch") == ()


# Session of ONNX's reference implementation.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = graph("(double[n,2] x) => (double[n,2] y, double[n,2] z) { y = Erf(x) z = Add(x, x) }")
    onnx_ir.save(model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_the_reference_implementation_computes_in_fp64(path: Path) -> None:
    with ReferenceSession.open(path) as session:
        assert [spec.name for spec in session.signature.outputs] == ["y", "z"]
        x = np.array([[1.0, 1e-9]])
        found = session.run({"x": x}, ["z"])
        assert list(found) == ["z"]
        np.testing.assert_array_equal(found["z"], 2 * x)
        assert session.run({"x": x})["y"][0, 1] == pytest.approx(1e-9 * 2 / np.sqrt(np.pi), rel=1e-12)
        assert not session.placement({"x": x}).nodes
