"""What no input changes is computed now; equal weights are kept once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir
from graphs import compute, draw, graph, operators

from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.constants import FoldConstants, ShareWeights


class TestFolding:
    def test_what_depends_on_no_input_is_a_weight(self) -> None:
        model, x = (
            graph("(float[b,3] x) => (float[b,3] y) { a = Exp(w) c = Neg(a) y = Mul(x, c) }", w=draw(3)),
            draw(2, 3),
        )
        expected = compute(model, x=x)["y"]
        run_passes(model, [FoldConstants()])
        assert operators(model) == ["Mul"]
        np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-6)

    def test_constant_nodes_become_initializers(self) -> None:
        text = "(float[b,3] x) => (float[b,3] y) { c = Constant<value = float[3] {1.0, 2.0, 3.0}>() y = Mul(x, c) }"
        model = graph(text)
        (report,) = run_passes(model, [FoldConstants()]).reports
        assert (operators(model), report.note) == (["Mul"], "")
        (weight,) = model.graph.initializers.values()
        assert weight.const_value is not None
        np.testing.assert_array_equal(weight.const_value.numpy(), [1, 2, 3])

    def test_shapes_that_are_known_are_constants(self) -> None:
        text = """(float[b,3,4] x) => (float[b,12] y) {
            s = Shape<start=1>(x)
            p = ReduceProd<keepdims=1>(s)
            m = Concat<axis=0>(one, p)
            y = Reshape(x, m)
        }"""
        model, x = graph(text, one=np.array([-1])), draw(2, 3, 4)
        run_passes(model, [FoldConstants()])
        assert operators(model) == ["Reshape"]
        np.testing.assert_array_equal(compute(model, x=x)["y"], x.reshape(2, 12))

    def test_the_batch_is_not_one_of_them(self) -> None:
        text = "(float[b,3] x) => (float[b,3] y) { s = Shape(x) z = ConstantOfShape(s) y = Add(x, z) }"
        model = graph(text)
        run_passes(model, [FoldConstants()])
        for rows in (1, 5):
            assert compute(model, x=draw(rows, 3))["y"].shape == (rows, 3)

    def test_large_results_are_left_to_be_computed(self) -> None:
        text = "(float[1,1024,2048] x) => (float[1,1024,2048] y) { e = Expand(w, s) y = Add(x, e) }"
        model = graph(text, w=np.float32(2), s=np.array([1, 1024, 2048]))
        run_passes(model, [FoldConstants()])
        assert "Expand" in operators(model)

    def test_functions_of_the_model_are_inlined(self) -> None:
        proto = onnx.parser.parse_model(
            """<ir_version: 9, opset_import: ["": 18, "own": 1]>
            g (float[b,3] x) => (float[b,3] y) { y = own.twice(x) }
            <domain: "own", opset_import: ["": 18]> twice (x) => (y) { y = Add(x, x) }"""
        )
        model = onnx_ir.from_proto(proto)
        run_passes(model, [FoldConstants()])
        assert operators(model) == ["Add"]
        assert not model.functions
        x = draw(2, 3)
        np.testing.assert_array_equal(compute(model, x=x)["y"], x + x)


class TestSharing:
    def test_equal_weights_are_kept_once(self) -> None:
        text = "(float[b,3] x) => (float[b,3] y) { a = Mul(x, v) b = Add(a, w) y = Sub(b, u) }"
        model, x = graph(text, v=draw(3), w=draw(3), u=draw(3, seed=1)), draw(2, 3)
        expected = compute(model, x=x)["y"]
        run_passes(model, [ShareWeights()])
        assert len(model.graph.initializers) == 2
        np.testing.assert_array_equal(compute(model, x=x)["y"], expected)

    def test_the_same_bytes_in_another_shape_or_type_are_not_equal(self) -> None:
        text = (
            "(float[2,2] x, int32[2,2] i) => (float[2,2] y, int32[2,2] j) { a = Add(x, v) y = Add(a, w) j = Add(i, u) }"
        )
        model = graph(
            text, v=np.zeros((2, 2), np.float32), w=np.zeros((1, 4), np.float32)[:, :2], u=np.zeros((2, 2), np.int32)
        )
        run_passes(model, [ShareWeights()])
        assert len(model.graph.initializers) == 3
