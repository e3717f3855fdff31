"""Lowering a graph to fp16 or bf16: which nodes, with which weights, and that the numbers stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph, operators

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.precision import Amp, LowerPrecision, lowered_products, matches, name_nodes
from graphkiln_backend.passes.rounding import emulate

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
    def test_say_which_operators(self, amp: Amp, lowered: list[str]) -> None:
        model = network()
        (report,) = run_passes(model, [LowerPrecision(Precision.FP16, amp)]).reports
        assert lowered_types(model) == lowered
        assert report.note == "2/2 products in fp16"


class TestWhatStays:
    @pytest.mark.parametrize("pattern", ["MatMul", "Mat*", "node0", "node?"])
    def test_by_pattern_of_name_or_type(self, pattern: str) -> None:
        model = network()
        run_passes(model, [LowerPrecision(Precision.FP16, "O3", (pattern,))])
        assert operators(network())[0] == "MatMul"
        assert model.graph.initializers["first"].dtype == onnx_ir.DataType.FLOAT

    def test_by_exact_name(self) -> None:
        model = network()
        run_passes(model, [LowerPrecision(Precision.FP16, "O1", keep_nodes={"node3"})])
        assert lowered_products(model, Precision.FP16) == (1, 2)

    @pytest.mark.parametrize(("target", "kept"), [(Precision.FP16, True), (Precision.BF16, False)])
    def test_a_weight_beyond_the_range_of_the_type(self, target: Precision, kept: bool) -> None:
        model = graph("(float[b,4] x) => (float[b,4] y) { y = MatMul(x, w) }", w=draw(4, 4) * 1e6)
        (report,) = run_passes(model, [LowerPrecision(target, "O3")]).reports
        assert report.ran is not kept

    def test_weights_that_are_empty_or_integers_are_no_obstacle(self) -> None:
        model = graph(
            "(float[b,4] x) => (float[b,4] y) { a = Relu(x) r = Reshape(a, s) y = MatMul(r, w) }",
            s=np.array([-1, 4]), w=draw(4, 4),
        )  # fmt: skip
        run_passes(model, [LowerPrecision(Precision.FP16, "O3")])
        assert model.graph.initializers["s"].dtype == onnx_ir.DataType.INT64
        assert lowered_types(model) == ["Relu", "Reshape", "MatMul"]

    def test_what_makes_indices_and_shapes(self) -> None:
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
    def test_stay_within_the_rounding_of_the_type(
        self, tmp_path: Path, target: Precision, amp: Amp, error: float
    ) -> None:
        model, x = network(), draw(32, 6, seed=3)
        expected = compute(network(), x=x)["y"]
        run_passes(model, [LowerPrecision(target, amp)])
        emulate(model, target)
        found = run(model, tmp_path, x=x)["y"]
        assert found.dtype == np.float32
        difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 0 < difference < error, "rounded, and not more than that"

    def test_inputs_and_outputs_keep_their_types(self) -> None:
        model = network()
        run_passes(model, [LowerPrecision(Precision.FP16, "O3")])
        values = (*model.graph.inputs, *model.graph.outputs)
        assert [(value.name, str(value.dtype)) for value in values] == [("x", "FLOAT"), ("y", "FLOAT")]

    @pytest.mark.parametrize(("target", "dtype"), [(Precision.FP16, "FLOAT16"), (Precision.BF16, "BFLOAT16")])
    def test_or_take_the_type(self, target: Precision, dtype: str) -> None:
        model = network()
        run_passes(model, [LowerPrecision(target, "O3", edges=True)])
        values = (*model.graph.inputs, *model.graph.outputs)
        assert [(value.name, str(value.dtype)) for value in values] == [("x", dtype), ("y", dtype)]
        assert "Cast" not in operators(model), "nothing is left to be cast"

    def test_integers_at_the_edge_stay(self) -> None:
        inputs, outputs = "(int64[b,2] i, float[b,2] x)", "(float[b,2] y, int64[b,2] j)"
        model = graph(f"{inputs} => {outputs} {{ c = Cast<to=1>(i) y = Mul(c, x) j = Neg(i) }}")
        edge = run_passes(model, [LowerPrecision(Precision.FP16, "O3", edges=True)]).edge
        feeds = edge.to_graph_feeds({"i": np.array([[1, 2]]), "x": draw(1, 2)})
        assert [array.dtype.name for array in feeds.values()] == ["int64", "float16"]
        assert str(model.graph.outputs[1].dtype) == "INT64"

    def test_bf16_needs_an_operator_set_that_has_it(self) -> None:
        model = network()
        run_passes(model, [LowerPrecision(Precision.BF16, "O1")])
        assert model.opset_imports[""] >= 22
        fp16 = network()
        run_passes(fp16, [LowerPrecision(Precision.FP16, "O1")])
        assert fp16.opset_imports[""] == 18

    def test_a_graph_that_is_half_lowered_already(self, tmp_path: Path) -> None:
        """What is fp16 before stays as it is: its nodes, and its inputs and outputs."""
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
    def test_stay_fp32_for_those_that_do(self) -> None:
        model = graph("(float[b,4] x) => (float[b,4] y) { a = MatMul(x, w) y = MatMul(a, w) }", w=draw(4, 4))
        run_passes(model, [LowerPrecision(Precision.FP16, "O3", keep_nodes={"node1"})])
        assert set(model.graph.initializers) == {"w", "w_float16"}


class TestNames:
    def test_nodes_without_one_get_it_and_keep_it(self) -> None:
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


def test_products_are_counted_by_what_they_read() -> None:
    model = network()
    assert lowered_products(model, Precision.FP16) == (0, 2)
    run_passes(model, [LowerPrecision(Precision.FP16, "O1")])
    assert lowered_products(model, Precision.FP16) == (2, 2)
    assert lowered_products(model, Precision.BF16) == (0, 2)
