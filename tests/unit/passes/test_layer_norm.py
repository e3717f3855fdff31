"""Layer norms that are written out become one node, and only those."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.passes.base import count, run_passes
from graphkiln_backend.passes.pipeline import CleanUp, FuseLayerNorm

WIDTH = 8
BY_MEAN = "m = ReduceMean<keepdims=1>(x, last) c = Sub(x, m)"
BY_SUM = "s = ReduceSum<keepdims=1>(x, last) m = Mul(s, share) c = Sub(x, m)"
PRODUCT = "q = Mul(c, c)"
POWER = "q = Pow(c, two)"
VARIANCE = "v = ReduceMean<keepdims=1>(q, last) e = Add(v, epsilon) d = Sqrt(e)"
RECIPROCAL = "r = Reciprocal(d) n = Mul(c, r)"
DIVISION = "n = Div(c, d)"
SCALED = "g = Mul(n, scale) y = Add(g, shift)"


def model(body: str, **weights: AnyArray) -> onnx_ir.Model:
    parsed = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g (float[b,5,{WIDTH}] x) => (float[b,5,{WIDTH}] y) {{ {body} }}'
    )
    draw = np.random.default_rng(0)
    usual = {
        "last": np.array([-1]), "share": np.float32(1 / WIDTH), "two": np.float32(2), "epsilon": np.float32(1e-3),
        "scale": draw.standard_normal(WIDTH).astype("f4"), "shift": draw.standard_normal(WIDTH).astype("f4"),
    }  # fmt: skip
    for name, array in {**usual, **weights}.items():
        if f"{name}" in body.replace("(", " ").replace(")", " ").replace(",", " ").split():
            parsed.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return onnx_ir.from_proto(onnx.shape_inference.infer_shapes(parsed))


def answer(graph: onnx_ir.Model) -> AnyArray:
    x = np.random.default_rng(1).standard_normal((3, 5, WIDTH)).astype(np.float32)
    found: AnyArray = onnxruntime.InferenceSession(onnx_ir.to_proto(graph).SerializeToString()).run(None, {"x": x})[0]
    return found


@pytest.mark.parametrize("mean", [BY_MEAN, BY_SUM])
@pytest.mark.parametrize("square", [PRODUCT, POWER])
@pytest.mark.parametrize("quotient", [RECIPROCAL, DIVISION])
def test_every_way_to_write_it(mean: str, square: str, quotient: str) -> None:
    graph = model(" ".join([mean, square, VARIANCE, quotient, SCALED]))
    before = answer(graph)
    run_passes(graph, (CleanUp(), FuseLayerNorm()))
    assert [node.op_type for node in graph.graph] == ["LayerNormalization"]
    np.testing.assert_allclose(answer(graph), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        # a gate, not a scale: of the whole shape
        (f"{BY_MEAN} {PRODUCT} {VARIANCE} {DIVISION} y = Mul(n, scale)", {"scale": np.ones((5, WIDTH), "f4")}),
        (f"{BY_MEAN} {PRODUCT} {VARIANCE} {DIVISION} y = Mul(n, x)", {}),
        # a sum that is not divided by its number
        (f"{BY_SUM} {PRODUCT} {VARIANCE} {DIVISION} {SCALED}", {"share": np.float32(0.3)}),
        # another axis
        (f"{BY_MEAN} {PRODUCT} {VARIANCE} {DIVISION} {SCALED}", {"last": np.array([1])}),
    ],
)
def test_what_is_none_stays(body: str, weights: dict[str, AnyArray]) -> None:
    graph = model(body, **weights)
    before = answer(graph)
    run_passes(graph, (CleanUp(), FuseLayerNorm()))
    assert count(graph, "LayerNormalization") == 0
    np.testing.assert_allclose(answer(graph), before, rtol=1e-6)


def test_a_shift_of_another_shape_stays_an_addition() -> None:
    graph = model(f"{BY_MEAN} {PRODUCT} {VARIANCE} {DIVISION} {SCALED}", shift=np.ones((5, 1), "f4"))
    before = answer(graph)
    run_passes(graph, (CleanUp(), FuseLayerNorm()))
    assert [node.op_type for node in graph.graph] == ["LayerNormalization", "Add"]
    np.testing.assert_allclose(answer(graph), before, rtol=1e-5, atol=1e-6)
