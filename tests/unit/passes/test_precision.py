"""Lowering to fp16 or bf16, its emulation with fp32 kernels, and where graphs round to 16 bits."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir
import pytest
import zoo
from graphs import compute, draw, graph, operators
from half_graphs import classifier
from onnx import TensorProto, helper

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.precision import Amp, LowerPrecision, lowered_products, matches, name_nodes
from graphkiln_backend.passes.rounding import (
    Rounding,
    compute_in_fp32,
    computed_precision,
    emulate,
    infer_types,
    rounding_depth,
)

HALF = onnx_ir.DataType.FLOAT16
TEXT = """(float[b,6] x) => (float[b,4] y) {
    hidden = MatMul(x, first)
    active = Relu(hidden)
    normed = Softmax(active)
    product = MatMul(normed, second)
    y = Add(product, bias)
}"""


def network() -> onnx_ir.Model:
    return graph(TEXT, first=draw(6, 5), second=draw(5, 4, seed=1), bias=draw(4, seed=2))


def lowered_types(model: onnx_ir.Model, dtype: onnx_ir.DataType = HALF) -> list[str]:
    """Types of the nodes that compute in a type."""
    return [node.op_type for node in model.graph if node.op_type != "Cast" and node.outputs[0].dtype == dtype]


def run(model: onnx_ir.Model, folder: Path, **feeds: AnyArray) -> dict[str, AnyArray]:
    onnx_ir.save(model, folder / "model.onnx")
    with OnnxRuntimeEngine().build_reference(folder / "model.onnx") as session:
        return session.run(feeds)


class TestLevels:
    @pytest.mark.parametrize(
        ("amp", "lowered"),
        [
            ("O1", ["MatMul", "MatMul"]),
            ("O2", ["MatMul", "Relu", "MatMul", "Add"]),
            ("O3", ["MatMul", "Relu", "Softmax", "MatMul", "Add"]),
        ],
    )
    def test_levels(self, amp: Amp, lowered: list[str]) -> None:
        model = network()
        (report,) = run_passes(model, [LowerPrecision(Precision.FP16, amp)]).reports
        assert lowered_types(model) == lowered
        assert report.note == "2/2 products in fp16"


class TestExceptions:
    @pytest.mark.parametrize("pattern", ["MatMul", "Mat*", "node0", "node?"])
    def test_patterns_of_name_or_type(self, pattern: str) -> None:
        model = network()
        run_passes(model, [LowerPrecision(Precision.FP16, "O3", (pattern,))])
        assert operators(network())[0] == "MatMul"
        assert model.graph.initializers["first"].dtype == onnx_ir.DataType.FLOAT

    def test_exact_names(self) -> None:
        model = network()
        run_passes(model, [LowerPrecision(Precision.FP16, "O1", keep_nodes={"node3"})])
        assert lowered_products(model, Precision.FP16) == (1, 2)

    @pytest.mark.parametrize(("target", "kept"), [(Precision.FP16, True), (Precision.BF16, False)])
    def test_weights_beyond_the_range(self, target: Precision, kept: bool) -> None:
        model = graph("(float[b,4] x) => (float[b,4] y) { y = MatMul(x, w) }", w=draw(4, 4) * 1e6)
        (report,) = run_passes(model, [LowerPrecision(target, "O3")]).reports
        assert report.ran is not kept

    def test_operators_that_make_indices(self) -> None:
        model = graph(
            "(float[b,4] x) => (float[b,2] y, int64[b,2] i) { p = MatMul(x, w) y, i = TopK(p, k) }",
            w=draw(4, 4), k=np.array([2]),
        )  # fmt: skip
        run_passes(model, [LowerPrecision(Precision.FP16, "O3")])
        assert lowered_types(model) == ["MatMul"]
        assert model.graph.outputs[1].dtype == onnx_ir.DataType.INT64


class TestNumbers:
    @pytest.mark.parametrize(("target", "error"), [(Precision.FP16, 2e-3), (Precision.BF16, 2e-2)])
    @pytest.mark.parametrize("amp", ["O1", "O2", "O3"])
    def test_rounding_errors(self, tmp_path: Path, target: Precision, amp: Amp, error: float) -> None:
        model, x = network(), draw(32, 6, seed=3)
        expected = compute(network(), x=x)["y"]
        run_passes(model, [LowerPrecision(target, amp)])
        emulate(model, target)
        found = run(model, tmp_path, x=x)["y"]
        assert found.dtype == np.float32
        difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 0 < difference < error, "rounded, and not more than that"

    def test_edges_keep_fp32(self) -> None:
        model = network()
        run_passes(model, [LowerPrecision(Precision.FP16, "O3")])
        values = (*model.graph.inputs, *model.graph.outputs)
        assert [(value.name, str(value.dtype)) for value in values] == [("x", "FLOAT"), ("y", "FLOAT")]

    @pytest.mark.parametrize(("target", "dtype"), [(Precision.FP16, "FLOAT16"), (Precision.BF16, "BFLOAT16")])
    def test_edges_take_the_type(self, target: Precision, dtype: str) -> None:
        model = network()
        run_passes(model, [LowerPrecision(target, "O3", edges=True)])
        values = (*model.graph.inputs, *model.graph.outputs)
        assert [(value.name, str(value.dtype)) for value in values] == [("x", dtype), ("y", dtype)]
        assert "Cast" not in operators(model), "nothing is left to be cast"

    def test_integer_edges_stay(self) -> None:
        inputs, outputs = "(int64[b,2] i, float[b,2] x)", "(float[b,2] y, int64[b,2] j)"
        model = graph(f"{inputs} => {outputs} {{ c = Cast<to=1>(i) y = Mul(c, x) j = Neg(i) }}")
        edge = run_passes(model, [LowerPrecision(Precision.FP16, "O3", edges=True)]).edge
        feeds = edge.to_graph_feeds({"i": np.array([[1, 2]]), "x": draw(1, 2)})
        assert [array.dtype.name for array in feeds.values()] == ["int64", "float16"]
        assert str(model.graph.outputs[1].dtype) == "INT64"

    def test_operator_set_of_bf16(self) -> None:
        model = network()
        run_passes(model, [LowerPrecision(Precision.BF16, "O1")])
        assert model.opset_imports[""] >= 22
        fp16 = network()
        run_passes(fp16, [LowerPrecision(Precision.FP16, "O1")])
        assert fp16.opset_imports[""] == 18

    def test_partly_lowered_graph(self, tmp_path: Path) -> None:
        text = """(float16[b,4] h, float[b,4] x) => (float16[b,4] low, float[b,4] y) {
            low = Neg(h)
            y = MatMul(x, w)
        }"""
        model, h, x = graph(text, w=draw(4, 4)), draw(2, 4).astype(np.float16), draw(2, 4)
        run_passes(model, [LowerPrecision(Precision.FP16, "O2")])
        assert [str(value.dtype) for value in (*model.graph.inputs, *model.graph.outputs)] == [
            "FLOAT16", "FLOAT", "FLOAT16", "FLOAT",
        ]  # fmt: skip
        found = run(model, tmp_path, h=h, x=x)
        np.testing.assert_array_equal(found["low"], -h)
        np.testing.assert_allclose(found["y"], x @ draw(4, 4), rtol=1e-2, atol=1e-2)


class TestWeights:
    def test_weight_shared_with_an_fp32_node(self) -> None:
        model = graph("(float[b,4] x) => (float[b,4] y) { a = MatMul(x, w) y = MatMul(a, w) }", w=draw(4, 4))
        run_passes(model, [LowerPrecision(Precision.FP16, "O3", keep_nodes={"node1"})])
        assert set(model.graph.initializers) == {"w", "w_float16"}


class TestNames:
    def test_unnamed_nodes_are_named(self) -> None:
        model = network()
        for node in model.graph:
            node.name = ""
        model.graph[1].name = "MatMul_0"
        name_nodes(model)
        names = [str(node.name) for node in model.graph]
        assert len(set(names)) == 5
        assert names[1:3] == ["MatMul_0", "Softmax_2"]
        name_nodes(model)
        assert [str(node.name) for node in model.graph] == names

    @pytest.mark.parametrize(
        ("patterns", "expected"),
        [((), False), (("Conv",), False), (("Conv", "node0"), True), (("[MN]at*",), True), (("matmul",), False)],
    )
    def test_patterns(self, patterns: tuple[str, ...], expected: bool) -> None:
        assert matches(network().graph[0], patterns) is expected


def test_products_are_counted_by_input_type() -> None:
    model = network()
    assert lowered_products(model, Precision.FP16) == (0, 2)
    run_passes(model, [LowerPrecision(Precision.FP16, "O1")])
    assert lowered_products(model, Precision.FP16) == (2, 2)
    assert lowered_products(model, Precision.BF16) == (0, 2)


DTYPES = {Precision.FP16: np.float16, Precision.BF16: ml_dtypes.bfloat16}


@pytest.mark.parametrize("target", DTYPES)
def test_emulation_equals_numpy(tmp_path: Path, target: Precision) -> None:
    """The same in numpy, step by step."""
    w, v, x = draw(6, 6), draw(6, 6, seed=1), draw(5, 6, seed=2)

    def rounded(array: AnyArray) -> AnyArray:
        return array.astype(DTYPES[target]).astype(np.float32)  # type: ignore[no-any-return]

    model = graph("(float[b,6] x) => (float[b,6] y) { a = MatMul(x, w) r = Relu(a) y = MatMul(r, v) }", w=w, v=v)
    run_passes(model, [LowerPrecision(target, "O3")])
    emulate(model, target)
    hidden = rounded(np.maximum(rounded(rounded(x) @ rounded(w)), 0))
    expected = rounded(hidden @ rounded(v))
    np.testing.assert_allclose(run(model, tmp_path, x=x)["y"], expected, rtol=1e-2 if target == "bf16" else 2e-3)


def test_emulated_overflow(tmp_path: Path) -> None:
    """A product above 65504 is infinite in fp16, even where the next one would bring it back."""
    large, small = np.full((1, 1), 6e4, np.float32), np.full((1, 1), 1e-4, np.float32)
    text = "(float[b,1] x) => (float[b,1] y) { a = MatMul(x, large) y = MatMul(a, small) }"
    model = graph(text, large=large, small=small)
    run_passes(model, [LowerPrecision(Precision.FP16, "O3")])
    emulate(model, Precision.FP16)
    found = run(model, tmp_path, x=np.array([[1], [2]], np.float32))["y"]
    assert np.isfinite(found).tolist() == [[True], [False]]


def test_emulated_outputs_keep_type_and_name(tmp_path: Path) -> None:
    model = graph("(float[b,4] x) => (float[b,4] y) { y = MatMul(x, w) }", w=np.eye(4, dtype=np.float32))
    run_passes(model, [LowerPrecision(Precision.FP16, "O3", edges=True)])
    emulate(model, Precision.FP16)
    x = draw(2, 4).astype(np.float16)
    found = run(model, tmp_path, x=x)
    assert found["y"].dtype == np.float16
    np.testing.assert_array_equal(found["y"], x)


def test_emulation_of_an_fp32_graph_changes_nothing() -> None:
    model = graph("(float[b,4] x) => (float[b,4] y) { a = MatMul(x, w) y = Relu(a) }", w=draw(4, 4))
    emulate(model, Precision.FP16)
    assert operators(model) == ["MatMul", "Relu"]


def test_existing_casts_keep_their_names(tmp_path: Path) -> None:
    """A detector in bf16, whose last nodes stay fp32: two values had one name, and no runtime loaded the graph."""
    text = """(float16[b,4] x) => (float[b,4] y, float16[b,4] z) {
        x_float = Cast<to=1>(x)
        y = Relu(x_float)
        z = Neg(x)
    }"""
    model, x = graph(text), draw(3, 4).astype(np.float16)
    emulate(model, Precision.FP16)
    found = run(model, tmp_path, x=x)
    np.testing.assert_array_equal(found["y"], np.maximum(x, 0).astype(np.float32))
    np.testing.assert_array_equal(found["z"], -x)


F32, F16, BF16, F64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE


@pytest.mark.parametrize(
    ("inside", "border", "precision"),
    [
        (F32, F32, Precision.FP32),
        (F64, F32, Precision.FP32),
        (F16, F16, Precision.FP16),
        (F16, F32, Precision.FP16),
        (BF16, BF16, Precision.BF16),
        (BF16, F16, Precision.BF16),
        (F32, F16, Precision.FP32),
        (F32, BF16, Precision.FP32),
    ],
)
def test_precision_of_computed_nodes(inside: int, border: int, precision: Precision) -> None:
    model = onnx_ir.from_proto(classifier(inside, border))
    infer_types(model)
    assert computed_precision(model) is precision


def test_16_bit_weights_computed_in_fp32() -> None:
    model = graph("(float16[4,4] w, float[n,4] x) => (float[n,4] y) { v = Cast<to=1>(w) y = MatMul(x, v) }")
    assert computed_precision(model) is Precision.FP32
    assert rounding_depth(model) == 0


def test_depth_of_the_longest_path() -> None:
    text = """(float16[n,4] x) => (float16[n,4] y) {
        a = Sigmoid(x) b = Transpose<perm=[0,1]>(a) c = Tanh(b) d = Exp(x) y = Add(c, d)
    }"""
    assert rounding_depth(graph(text)) == 3


def test_depth_with_casts_around_fp32_kernels() -> None:
    model = onnx_ir.from_proto(classifier(BF16, BF16))
    infer_types(model)
    depth = rounding_depth(model)
    compute_in_fp32(model, onnx_ir.DataType.BFLOAT16)
    assert depth <= rounding_depth(model) <= depth + 2  # a Relu rounded nothing; the cast behind it does not know
    assert computed_precision(model) is Precision.BF16


def test_inferred_types_are_not_kept() -> None:
    """ONNX knows nothing of ONNX Runtime's own operators; what a quantized one returns is no float."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("QLinearSigmoid", ["q", "scale", "zero", "scale", "zero"], ["s"], domain="com.microsoft"),
        helper.make_node("DequantizeLinear", ["s", "scale", "zero"], ["y"]),
    ]
    shape = ("n", 4)
    constants = {"scale": np.float32(0.1), "zero": np.uint8(3)}
    proto = zoo.model(nodes, [zoo.value("x", shape)], [zoo.value("y", shape)], constants)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model = onnx_ir.from_proto(proto)
    assert Rounding.of(model).precision is Precision.FP32
    assert {value.name: value.dtype for node in model.graph for value in node.outputs}["s"] is None
