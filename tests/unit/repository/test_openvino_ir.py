"""The reader of OpenVINO IR, beside OpenVINO's own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import zoo
from ir_files import graph, parameter, product, save_ir
from onnx import helper
from openvino import opset13

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import GraphkilnError, ManifestError, RepositoryError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import ANY_RANK, Dim
from graphkiln_backend.repository.openvino_ir import read_ir


def scalars() -> openvino.Model:
    a, b = parameter("a", [], np.int64), parameter("b", [2], np.int64)
    return graph({"sum": opset13.add(a, b).output(0)}, [a, b])


def bounded() -> openvino.Model:
    x = parameter("x", [openvino.Dimension(1, 8), openvino.Dimension(0, 4), 3])
    return graph({"y": opset13.relu(x).output(0)}, [x])


def any_rank() -> openvino.Model:
    x = opset13.parameter(openvino.PartialShape.dynamic(), np.float32)
    x.output(0).set_names({"x"})
    return graph({"y": opset13.relu(x).output(0)}, [x])


def parts() -> openvino.Model:
    """Outputs of one layer in another order than its ports."""
    x = parameter("x", [4, -1])
    split = opset13.split(x, 0, 2)
    return graph({"second": split.output(1), "first": split.output(0)}, [x])


def several_names() -> openvino.Model:
    x = parameter("x", [-1, 2])
    x.output(0).set_names({"x", "an input, first"})
    y = opset13.relu(x)
    model = graph({"y": y.output(0)}, [x])
    y.output(0).set_names({"z", "y", "Y"})
    return model


def types(names: dict[str, Any]) -> openvino.Model:
    inputs = [parameter(f"{name}_in", [-1, 2], dtype) for name, dtype in names.items()]
    outputs = {
        name: opset13.reshape(each, [-1], special_zero=False).output(0)
        for name, each in zip(names, inputs, strict=True)
    }
    return graph(outputs, inputs)


def branch() -> openvino.Model:
    """An If whose branches have constants and layers of their own."""
    x, condition = parameter("x", [2]), parameter("c", [], np.bool_)
    bodies = []
    for factor in (2.0, 3.0):
        inner = opset13.parameter([2], np.float32)
        weights = opset13.constant(np.full(2, factor, np.float32))
        bodies.append((inner, openvino.Model([opset13.result(opset13.multiply(inner, weights))], [inner], "body")))
    choice = opset13.if_op(condition)
    choice.set_then_body(bodies[0][1])
    choice.set_else_body(bodies[1][1])
    choice.set_input(x.output(0), bodies[0][0], bodies[1][0])
    chosen = choice.set_output(bodies[0][1].results[0], bodies[1][1].results[0])
    return graph({"y": chosen}, [x, condition])


ALL_TYPES: dict[str, Any] = {
    **{name: getattr(openvino.Type, name) for name in ("f32", "f16", "bf16", "boolean")},
    **{f"{sign}{bits}": getattr(openvino.Type, f"{sign}{bits}") for sign in "iu" for bits in (8, 16, 32, 64)},
}
GRAPHS: dict[str, Callable[[], Any]] = {
    "product": product,
    "fixed": lambda: product((2, 3)),
    "scalars": scalars,
    "bounded": bounded,
    "any rank": any_rank,
    "parts": parts,
    "several names": several_names,
    "types": lambda: types(ALL_TYPES),
    "f64": lambda: types({"f64": openvino.Type.f64}),
    "branch": branch,
    "ONNX": lambda: zoo.scale(("batch", "n", 3)),
    "ONNX, two outputs": zoo.sum_and_difference,
    "ONNX, merged names": lambda: zoo.model(
        [helper.make_node("Relu", ["x"], ["between"]), helper.make_node("Identity", ["between"], ["end"])],
        [zoo.value("x", ("n", 2))],
        [zoo.value("end", ("n", 2))],
    ),
}


def described(port: openvino.Output) -> tuple[str, DType, tuple[int | None, ...] | None]:
    shape = port.get_partial_shape()
    # The file does not say whether an output without dimensions is a scalar.
    is_output = port.get_node().get_type_name() == "Result"
    known = None if shape.rank.is_dynamic or (is_output and not len(shape)) else shape
    dims = None if known is None else tuple(dim.get_length() if dim.is_static else None for dim in known)
    return port.get_any_name(), DType.from_openvino(port.get_element_type().get_type_name()), dims


def plain(shape: tuple[Dim, ...]) -> tuple[int | None, ...] | None:
    return None if shape == (ANY_RANK,) else tuple(dim if isinstance(dim, int) else None for dim in shape)


def check_beside_openvino(path: Path) -> None:
    model = openvino.Core().read_model(path)
    found = read_ir(path).signature
    for ports, specs in ((model.inputs, found.inputs), (model.outputs, found.outputs)):
        assert [(spec.name, spec.dtype, plain(spec.shape)) for spec in specs] == [described(port) for port in ports]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("compress", [False, True])
def test_signature_is_that_of_openvino(tmp_path: Path, name: str, compress: bool) -> None:
    check_beside_openvino(save_ir(GRAPHS[name](), tmp_path / "m.xml", compress=compress))


@pytest.mark.parametrize("name", ["product", "parts", "scalars", "several names"])
def test_version_10(tmp_path: Path, name: str) -> None:
    """Without names of tensors; OpenVINO takes those of layers, and changes element types."""
    path = save_ir(GRAPHS[name](), tmp_path / "m.xml")
    text = re.sub(r' (output_)?names="[^"]*"', "", path.read_text())
    path.write_text(text.replace('version="11"', 'version="10"'))
    check_beside_openvino(path)


def test_order_of_layers_is_that_of_inputs_and_outputs(tmp_path: Path) -> None:
    path = save_ir(parts(), tmp_path / "m.xml")
    text = path.read_text()
    layers = re.findall(r"\t\t<layer .*?</layer>\n", text, re.DOTALL)
    path.write_text(text.replace("".join(layers), "".join(reversed(layers))))
    check_beside_openvino(path)
    assert [spec.name for spec in read_ir(path).signature.outputs] == ["first", "second"]


class TestFacts:
    def test_weights_that_are_only_stored_in_fp16(self, tmp_path: Path) -> None:
        found = read_ir(save_ir(product(), tmp_path / "m.xml", compress=True))
        assert (found.precision, found.weights, found.weight_bytes) == (Precision.FP32, {"f16": 12}, 24)

    def test_products_in_bf16(self, tmp_path: Path) -> None:
        found = read_ir(save_ir(product(dtype=openvino.Type.bf16), tmp_path / "m.xml"))
        assert (found.precision, found.version) == (Precision.BF16, 11)

    def test_quantized_values(self, tmp_path: Path) -> None:
        x = parameter("x", [-1, 4])
        low, high = np.float32(0), np.float32(1)
        y = opset13.fake_quantize(x, low, high, low, high, 256)
        assert read_ir(save_ir(graph({"y": y.output(0)}, [x]), tmp_path / "m.xml")).precision is Precision.INT8

    def test_layers_and_constants_of_branches_count(self, tmp_path: Path) -> None:
        found = read_ir(save_ir(branch(), tmp_path / "m.xml"))
        assert (found.operators["Multiply"], found.weight_bytes) == (2, 16)

    def test_random_numbers(self, tmp_path: Path) -> None:
        x = parameter("x", [-1, 2])
        drawn = opset13.random_uniform(opset13.shape_of(x), np.float32(0), np.float32(1), "f32")
        model = graph({"y": opset13.add(x, drawn).output(0)}, [x])
        assert read_ir(save_ir(model, tmp_path / "m.xml")).draws_numbers

    def test_number_of_rows_that_depends_on_values(self, tmp_path: Path) -> None:
        x = parameter("x", [-1, 4])
        found = opset13.transpose(opset13.non_zero(x), [1, 0])
        signature = read_ir(save_ir(graph({"y": found.output(0)}, [x]), tmp_path / "m.xml")).signature
        assert signature.varies
        assert not signature.batchable

    def test_changed_files_are_read_again(self, tmp_path: Path) -> None:
        path = save_ir(product(), tmp_path / "m.xml")
        assert read_ir(path).signature.outputs[0].shape == ("y.0", 4)
        save_ir(product(columns=5), path)
        assert read_ir(path).signature.outputs[0].shape == ("y.0", 5)
        os.truncate(path.with_suffix(".bin"), 8)
        with pytest.raises(RepositoryError, match="cut short"):
            read_ir(path)


BOMB = '<?xml version="1.0"?><!DOCTYPE net [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><net version="11">&b;</net>'


def damaged(text: str) -> Iterator[tuple[str, str, str]]:
    yield "without a version", text.replace(' version="11"', "", 1), "is not a graph in OpenVINO IR"
    yield "old", text.replace('version="11"', 'version="7"'), "of version 7, and OpenVINO reads 10 and 11"
    yield "another document", "<project/>", "its root is 'project'"
    yield "no XML", "\0\1\2", "is not a graph in OpenVINO IR"
    yield "empty", "", "is not a graph in OpenVINO IR"
    yield "cut short", text[: len(text) // 2], "is not a graph in OpenVINO IR"
    yield "entities", BOMB, "it has a document type"
    yield (
        "no outputs",
        re.sub(r"<layer id=\"\d\" name=\"\w+\" type=\"Result\".*?</layer>", "", text, flags=re.S),
        "no out",
    )
    yield "an edge too few", re.sub(r"<edge from[^>]*to-layer=\"3\"[^>]*>", "", text), "is not a graph in OpenVINO IR"
    yield (
        "another port",
        text.replace('from-port="2" to-layer="3"', 'from-port="9" to-layer="3"'),
        "has no output port 9",
    )
    yield "offset", text.replace('offset="0"', f'offset="{1 << 40}"'), "is cut short"
    yield "size", text.replace('size="48"', 'size="47"'), "12 elements of f32 in 47 bytes"
    yield "negative", text.replace('size="48"', 'size="-48"'), "the size of layer"
    yield "shape", text.replace('shape="3, 4"', 'shape="3, 99999999999"'), "elements of f32 in 48 bytes"
    yield "dynamic constant", text.replace('shape="3, 4"', 'shape="?"'), "has the shape"
    yield "element type", text.replace('shape="?,3" element_type="f32"', 'shape="?,3" element_type="nf4"'), "nf4"
    yield "dimension", text.replace("<dim>-1</dim>", "<dim>many</dim>"), "is not a graph in OpenVINO IR"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ir(product(), tmp_path_factory.mktemp("ir") / "m.xml")


@pytest.mark.parametrize("fault", [name for name, _, _ in damaged("")])
def test_damaged_files(sound: Path, tmp_path: Path, fault: str) -> None:
    text = sound.read_text()
    written, message = next((content, said) for name, content, said in damaged(text) if name == fault)
    assert written != text
    path = tmp_path / "m.xml"
    path.write_text(written)
    path.with_suffix(".bin").write_bytes(sound.with_suffix(".bin").read_bytes())
    with pytest.raises((RepositoryError, ManifestError), match=message):
        read_ir(path)


class TestWeights:
    def test_missing(self, tmp_path: Path) -> None:
        path = save_ir(product(), tmp_path / "m.xml")
        path.with_suffix(".bin").unlink()
        with pytest.raises(RepositoryError, match=r"m\.bin, which is missing"):
            read_ir(path)

    def test_not_needed(self, tmp_path: Path) -> None:
        x = parameter("x", [-1, 4])
        path = save_ir(graph({"y": opset13.relu(x).output(0)}, [x]), tmp_path / "m.xml")
        path.with_suffix(".bin").unlink()
        assert not read_ir(path).weight_bytes


def test_text_is_refused(tmp_path: Path) -> None:
    x = parameter("x", [2], openvino.Type.string)
    path = save_ir(graph({"y": x.output(0)}, [x]), tmp_path / "m.xml")
    with pytest.raises(ManifestError, match="is text, which"):
        read_ir(path)


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.xml")
    with pytest.raises(GraphkilnError, match="a pipe"):
        read_ir(tmp_path / "m.xml")
