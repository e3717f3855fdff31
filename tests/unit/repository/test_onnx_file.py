"""Signature, precision and external files of ONNX graphs, read without a runtime."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import zoo
from onnx import TensorProto, helper, numpy_helper

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.files import stamp_of
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.repository import onnx_file as graph_facts
from graphkiln_backend.repository import onnx_file as onnx_reading
from graphkiln_backend.repository.onnx_file import (
    GraphFacts,
    count_products,
    external_files,
    graph_sha256,
    keep_inputs,
    read_graph,
    read_precision,
    read_replaced_outputs,
    read_signature,
    read_whole_graph,
    remember_facts,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def write(path: Path, proto: onnx.ModelProto) -> Path:
    path.write_bytes(proto.SerializeToString())
    return path


def with_weights(*weights: Any, nodes: int = 0) -> onnx.ModelProto:
    """A graph that holds arrays, and this many products."""
    products = [helper.make_node("MatMul", ["x", "w"], [f"y{number}"]) for number in range(nodes)]
    proto = zoo.model([*products, helper.make_node("Identity", ["x"], ["y"])], [zoo.value("x", (2,))], [])
    proto.graph.output.append(zoo.value("y", (2,)))
    for number, array in enumerate(weights):
        proto.graph.initializer.append(numpy_helper.from_array(array, f"w{number}"))
    return proto


class TestSignature:
    def test_signature_equals_the_manifest(self, digits: Path) -> None:
        manifest = Manifest.read(digits / "1" / "manifest.json")
        assert read_signature(digits / "1" / "model.onnx") == manifest.signature

    @pytest.mark.parametrize(("name", "dtype"), zoo.DTYPES.items())
    def test_all_element_types(self, path: Path, name: str, dtype: int) -> None:
        read = read_signature(write(path, zoo.identity(("batch", "n"), dtype)))
        assert [spec.dtype for spec in (*read.inputs, *read.outputs)] == [DType(name)] * 2

    def test_order_of_inputs_and_outputs(self, path: Path) -> None:
        read = read_signature(write(path, zoo.sum_and_difference()))
        assert [spec.name for spec in read.inputs] == ["b", "a"]
        assert [str(spec) for spec in read.outputs] == ["sum FP32[batch,2]", "difference FP32[batch,2]"]

    def test_unnamed_dimensions_are_distinct(self, path: Path) -> None:
        read = read_signature(write(path, zoo.unnamed()))
        shapes = [spec.shape for spec in (*read.inputs, *read.outputs)]
        assert len(set(shapes)) == 3
        assert all(spec.batchable for spec in (*read.inputs, *read.outputs))

    def test_inputs_with_default_are_optional(self, path: Path) -> None:
        read = read_signature(write(path, zoo.with_optional_bias()))
        assert [spec.name for spec in read.inputs] == ["x"]
        assert [str(spec) for spec in read.optional_inputs] == ["bias FP32[1]"]

    def test_sequence_output_is_refused(self, path: Path) -> None:
        with pytest.raises(RepositoryError, match=r"'y' is a sequence of tensors, and .* tensors only"):
            read_signature(write(path, zoo.with_sequence_output()))

    def test_output_without_type_is_refused(self, path: Path) -> None:
        proto = zoo.identity(("batch", 2))
        proto.graph.output[0].ClearField("type")
        with pytest.raises(RepositoryError, match="'y' is a value without a type"):
            read_signature(write(path, proto))

    def test_unsupported_element_type(self, path: Path) -> None:
        with pytest.raises(ManifestError, match="'x': the ONNX element type COMPLEX64 is not one that Triton"):
            read_signature(write(path, zoo.identity(("batch", 2), TensorProto.COMPLEX64)))


class TestDamage:
    @pytest.mark.parametrize("content", [b"", b"nonsense", b"\x08\x09"])
    def test_invalid_file(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(RepositoryError, match="the file is damaged or cut short: copy it again"):
            read_signature(path)

    def test_truncated_file(self, path: Path) -> None:
        content = zoo.scale(("batch", 3)).SerializeToString()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(RepositoryError, match="cut short"):
            read_signature(path)


class TestExternalWeights:
    def test_external_weights_are_not_read(self, tmp_path: Path) -> None:
        folder = zoo.add_external(tmp_path, "m")
        (folder / "weights.bin").write_bytes(b"")  # a runtime would refuse it
        assert [spec.name for spec in read_signature(folder / "model.onnx").inputs] == ["x"]

    def test_missing_external_weights(self, tmp_path: Path) -> None:
        folder = zoo.add_external(tmp_path, "m")
        (folder / "weights.bin").unlink()
        with pytest.raises(RepositoryError, match=r"weights in 'weights\.bin', which is missing \(copy it into .*m/1"):
            read_signature(folder / "model.onnx")

    @pytest.mark.parametrize("location", ["../secret.bin", "inner/../../secret.bin", "/etc/passwd"])
    def test_external_weights_outside_the_folder(self, tmp_path: Path, location: str) -> None:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "secret.bin").write_bytes(bytes(16))
        folder = zoo.add_external(tmp_path, "m")
        proto = onnx.load_model(folder / "model.onnx", load_external_data=False)
        proto.graph.initializer[0].external_data[0].value = location
        write(folder / "model.onnx", proto)
        with pytest.raises(RepositoryError, match=f"'{location}', which leads out of the version folder"):
            read_signature(folder / "model.onnx")


class TestPrecision:
    @pytest.mark.parametrize(
        ("arrays", "expected"),
        [
            ((), Precision.FP32),
            ((np.ones(4, np.float16),), Precision.FP16),
            ((np.ones(4, ml_dtypes.bfloat16),), Precision.BF16),
            ((np.ones((3, 3), np.float16), np.ones(8, np.float32)), Precision.FP16),
            ((np.ones(4, np.float16), np.ones(99, np.int64)), Precision.FP16),  # shapes and indices do not count
            ((np.ones(4, np.float64),), Precision.FP32),
        ],
    )
    def test_precision_of_most_weights(self, path: Path, arrays: tuple[Any, ...], expected: Precision) -> None:
        assert read_precision(write(path, with_weights(*arrays))) is expected

    @pytest.mark.parametrize("operator", ["QuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger"])
    def test_quantized_graph_is_int8(self, path: Path, operator: str) -> None:
        proto = with_weights(np.ones(99, np.float32))
        proto.graph.node.append(helper.make_node(operator, ["x"], ["q"]))
        assert read_precision(write(path, proto)) is Precision.INT8


class TestProducts:
    @pytest.mark.parametrize(
        ("operator", "count"), [("Conv", 1), ("ConvTranspose", 1), ("Gemm", 1), ("MatMul", 1), ("Mul", 0), ("Add", 0)]
    )
    def test_count_products(self, path: Path, operator: str, count: int) -> None:
        proto = with_weights()
        proto.graph.node.append(helper.make_node(operator, ["x", "x"], ["p"]))
        assert count_products(write(path, proto)) == count


def outside(location: str) -> onnx.TensorProto:
    """Weights in another file."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


class TestUntrustedFiles:
    def test_pipe_does_not_block(self, path: Path) -> None:
        os.mkfifo(path)
        with pytest.raises(RepositoryError, match="it is a pipe"):
            read_signature(path)

    @pytest.mark.parametrize("where", ["attribute", "subgraph"])
    def test_external_weights_in_attributes_and_subgraphs(self, path: Path, where: str) -> None:
        constant = helper.make_node("Constant", [], ["w"], value=outside("../../etc/passwd"))
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
        branch = helper.make_graph([constant, helper.make_node("Identity", ["w"], ["b"])], "b", [], [values[1]])
        node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
        nodes = [constant, helper.make_node("Add", ["x", "w"], ["y"])] if where == "attribute" else [node]
        write(path, helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:])))
        with pytest.raises(RepositoryError, match="which leads out of the version folder"):
            read_signature(path)

    def test_too_many_dimensions(self, path: Path) -> None:
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1] * 33) for name in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
        with pytest.raises(RepositoryError, match="'x' has 33 dimensions, and arrays have 32 at most"):
            read_signature(write(path, helper.make_model(graph)))

    def test_deeply_nested_graphs(self, path: Path) -> None:
        content = b""
        for _ in range(2000):
            for field in (6, 5, 1):  # a graph in an attribute in a node
                content = bytes([field << 3 | 2]) + varint(len(content)) + content
        path.write_bytes(b"\x3a" + varint(len(content)) + content)
        with pytest.raises(RepositoryError, match="is not an ONNX graph"):
            read_signature(path)


def varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80]) + varint(number >> 7) if number > 0x7F else bytes([number])


def old_graph() -> onnx.ModelProto:
    """IR version 3: the weight is named among the inputs."""
    inputs = [zoo.value("x", ("n", 2)), zoo.value("w", (2,))]
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    return zoo.model(nodes, inputs, [zoo.value("y", ("n", 2))], {"w": np.ones(2, np.float32)}, opset=8, ir=3)


class TestBorder:
    def test_weights_of_old_graphs_are_not_inputs(self, path: Path) -> None:
        old = read_signature(write(path, old_graph()))
        assert ([spec.name for spec in old.inputs], old.optional_inputs) == (["x"], ())

    def test_keep_inputs_removes_others(self, path: Path) -> None:
        keep_inputs(write(path, old_graph()), {"x"})
        (value,) = onnx.load(path).graph.input
        assert value.name == "x"

    def test_missing_shape_is_inferred(self, path: Path) -> None:
        proto = old_graph()
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        (output,) = read_signature(write(path, proto)).outputs
        assert (len(output.shape), output.shape[1], output.batchable) == (2, 2, False)

    def test_rank_is_unknown_without_inference(self, path: Path) -> None:
        proto = zoo.identity(())
        for value in (*proto.graph.input, *proto.graph.output):
            value.type.tensor_type.ClearField("shape")
        found = read_signature(write(path, proto))
        assert [spec.has_rank for spec in (*found.inputs, *found.outputs)] == [False, False]


class TestCounting:
    def outputs(self, path: Path, *, symbol: str, operator: str = "NonZero") -> Signature:
        nodes = [helper.make_node(operator, ["x"], ["y"])]
        graph = zoo.model(nodes, [zoo.value("x", ("n", 2))], [zoo.value("y", (symbol, 2), TensorProto.INT64)])
        return read_signature(write(path, graph))

    def test_data_dependent_size_is_not_a_batch(self, path: Path) -> None:
        found = self.outputs(path, symbol="found")
        assert (found.batchable, found.varies) == (False, True)

    def test_data_dependent_size_named_like_the_batch(self, path: Path) -> None:
        assert self.outputs(path, symbol="n").batchable


def test_external_files(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.ones(2, np.float32), "w")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weights])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    assert external_files(path) == ["w.bin"]


# Parsed graphs are cached.

WEIGHTS = np.ones((256, 256), np.float32)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Reshape", ["m", "shape"], ["y"])]
    weights = {"w": WEIGHTS, "shape": np.array([-1, 256], np.int64)}
    proto = zoo.model(nodes, [zoo.value("x", ("n", 256))], [zoo.value("y", ("n", 256))], weights)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of reads of each file."""
    counts: Counter[str] = Counter()
    plain = onnx_reading.read_bytes

    def counting(path: Path, limit: int) -> bytes:
        counts[path.name] += 1
        return plain(path, limit)

    monkeypatch.setattr(onnx_reading, "read_bytes", counting)
    return counts


def test_only_small_tensors_are_kept(graph: Path) -> None:
    weights, shape = read_graph(graph).graph.initializer
    assert (weights.dims, weights.raw_data) == ([256, 256], b"")
    assert onnx.numpy_helper.to_array(shape).tolist() == [-1, 256]
    whole = read_whole_graph(graph).graph.initializer[0]
    assert np.array_equal(onnx.numpy_helper.to_array(whole), WEIGHTS)


@pytest.mark.parametrize("how", ["in place", "another file of the same time"])
def test_replaced_file_is_read_again(graph: Path, read: Counter[str], how: str) -> None:
    before, status = read_graph(graph), graph.stat()
    before.doc_string = "other"
    target = graph if how == "in place" else graph.with_name("new.onnx")
    target.write_bytes(before.SerializeToString())
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    target.rename(graph)
    assert read_graph(graph).doc_string == "other"
    assert read["model.onnx"] == 2


# Facts from the artifact cache.

FACTS = GraphFacts(signature=Signature(inputs=(), outputs=()), precision=Precision.BF16)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_facts, "_known", {})


@pytest.fixture
def known(tmp_path: Path) -> Path:
    known = tmp_path / "model.onnx"
    known.write_bytes(b"no graph at all")
    return known


def test_remembered_facts_are_not_read_again(known: Path) -> None:
    remember_facts(known, stamp_of(known), "ab", FACTS)
    assert read_signature(known) is FACTS.signature
    assert read_precision(known) is Precision.BF16
    assert read_replaced_outputs(known) == ()
    assert graph_sha256(known) == "ab"
