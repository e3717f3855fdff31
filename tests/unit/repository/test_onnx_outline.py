"""Outlines of ONNX files, compared with what onnx reads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
import zoo
from onnx import TensorProto, helper, numpy_helper

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.onnx_file import opset_of, read_graph, read_precision
from graphkiln_backend.repository.onnx_outline import GraphOutline, read_outline


def outline(tmp_path: Path, proto: onnx.ModelProto) -> GraphOutline:
    return read_outline(zoo.add(tmp_path, f"m{len(list(tmp_path.iterdir()))}", proto) / "model.onnx")


def one_node(operator: str, *weights: onnx.TensorProto, **attributes: object) -> onnx.ModelProto:
    node = helper.make_node(operator, ["x", *(tensor.name for tensor in weights)], ["y"], **attributes)
    proto = zoo.model([node], [zoo.value("x", ("n", 3))], [zoo.value("y", ("n", 3))])
    proto.graph.initializer.extend(weights)
    return proto


def in_branch(proto: onnx.ModelProto, name: str = "if") -> onnx.ModelProto:
    """Put the nodes of a graph into a branch."""
    body = helper.make_graph(list(proto.graph.node), "body", [], [zoo.value("y", ("n", 3))], proto.graph.initializer)
    node = helper.make_node("If", ["c"], ["z"], name=name, then_branch=body, else_branch=body)
    return zoo.model([node], [zoo.value("x", ("n", 3)), zoo.value("c", (), TensorProto.BOOL)], [zoo.value("z", ())])


LARGE = numpy_helper.from_array(np.ones((300, 300), np.float32), "large")


@pytest.mark.parametrize("model", ["digits", "scenes-detector"])
def test_agrees_with_onnx(repository: Path, model: str) -> None:
    path = repository / "model_repository" / model / "1" / "model.onnx"
    graph = read_graph(path)
    expected = GraphOutline(opset=opset_of(graph), ir_version=graph.ir_version, precision=read_precision(path))
    assert read_outline(path) == expected


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(np.float32, Precision.FP32), (np.float16, Precision.FP16), (np.int64, Precision.FP32)],
)
@pytest.mark.parametrize("packed", [False, True])
def test_precision_is_that_of_most_weights(tmp_path: Path, dtype: type, precision: Precision, packed: bool) -> None:
    small = numpy_helper.from_array(np.ones(2, np.float32), "small")
    proto = one_node("Sum", small, numpy_helper.from_array(np.ones((20, 20), dtype), "w"))
    content = proto.SerializeToString()
    dims = b"\x08\x14\x08\x14"
    assert dims in content
    if packed:  # as other writers serialize dims; as long as two numbers
        content = content.replace(dims, b"\x0a\x02\x14\x14")
    folder = zoo.add(tmp_path, "m", proto)
    (folder / "model.onnx").write_bytes(content)
    assert read_outline(folder / "model.onnx").precision == precision


def test_versions(tmp_path: Path) -> None:
    proto = zoo.model([], [], [], opset=21, ir=10)
    proto.opset_import.add(domain="ai.onnx.ml", version=3)
    proto.opset_import.add(domain="com.example", version=99)
    found = outline(tmp_path, proto)
    assert (found.opset, found.ml_opset, found.ir_version) == (21, 3, 10)


@pytest.mark.parametrize(
    "operator", ["QuantizeLinear", "QLinearConv", "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "QGemm"]
)
def test_products_of_integers(tmp_path: Path, operator: str) -> None:
    found = outline(tmp_path, one_node(operator))
    assert (found.quantized, found.precision) == (True, Precision.INT8)


def test_weights_that_are_only_stored_as_integers(tmp_path: Path) -> None:
    found = outline(tmp_path, one_node("DequantizeLinear", numpy_helper.from_array(np.ones(3, np.int8), "w")))
    assert (found.quantized, found.blockwise) == (False, False)


@pytest.mark.parametrize(
    "proto",
    [
        one_node("MatMulNBits"),
        one_node("DequantizeLinear", block_size=16),
        one_node("DequantizeLinear", helper.make_tensor("w", TensorProto.INT4, [4], [1, 2, 3, 4])),
    ],
)
def test_blockwise_weights(tmp_path: Path, proto: onnx.ModelProto) -> None:
    assert outline(tmp_path, proto).blockwise


def test_loops(tmp_path: Path) -> None:
    assert outline(tmp_path, one_node("Loop")).loops
    assert outline(tmp_path, in_branch(one_node("Loop"))).loops
    assert not outline(tmp_path, one_node("Scan")).loops


def test_nodes_of_branches_and_functions(tmp_path: Path) -> None:
    product = one_node("MatMulInteger")
    assert outline(tmp_path, in_branch(product)).quantized
    product.graph.initializer.append(LARGE)
    assert outline(tmp_path, in_branch(in_branch(product))).quantized
    plain = one_node("Relu", LARGE)
    assert not outline(tmp_path, in_branch(plain)).quantized
    plain.functions.add(name="f", domain="d").node.extend(product.graph.node)
    assert outline(tmp_path, plain).quantized


def test_weights_of_constants_are_not_searched(tmp_path: Path) -> None:
    words = np.frombuffer(b"MatMulNBits" * 10_000, np.uint8)
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(words, "w"))
    assert not outline(tmp_path, zoo.model([constant], [], [zoo.value("c", ("n",))])).blockwise


@pytest.mark.parametrize(
    ("proto", "expected"), [(zoo.with_sequence_output(), True), (zoo.zipped(), True), (zoo.scale(("n", 3)), False)]
)
def test_outputs_that_are_no_tensors(tmp_path: Path, proto: onnx.ModelProto, expected: bool) -> None:
    assert outline(tmp_path, proto).other_outputs is expected


def test_a_cut_file_raises_no_other_error(tmp_path: Path) -> None:
    content = in_branch(one_node("MatMulInteger")).SerializeToString()
    path = tmp_path / "model.onnx"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        os.utime(path, ns=(size, size))
        with suppress(RepositoryError):
            read_outline(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(RepositoryError, match="it ends too early"):
        read_outline(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 1000, b"\xff" * 1000, b"not a graph", b"\x08\x0a"])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(RepositoryError, match="not an ONNX graph"):
        read_outline(path)
    with pytest.raises(RepositoryError, match="directory"):
        read_outline(tmp_path)
    with pytest.raises(RepositoryError, match="No such file"):
        read_outline(tmp_path / "missing.onnx")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = zoo.add(tmp_path, "m", zoo.scale(("n", 3), opset=17)) / "model.onnx"
    assert read_outline(path) is read_outline(path)
    path.write_bytes(zoo.scale(("n", 3), opset=18).SerializeToString())
    os.utime(path, ns=(1, 1))
    assert read_outline(path).opset == 18
