"""A lowered graph with fp32 kernels: every value rounded, every sum in fp32."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir
import pytest
from graphs import draw, graph, operators

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.precision import LowerPrecision
from graphkiln_backend.passes.rounding import emulate

DTYPES = {Precision.FP16: np.float16, Precision.BF16: ml_dtypes.bfloat16}


def run(model: onnx_ir.Model, folder: Path, **feeds: AnyArray) -> dict[str, AnyArray]:
    onnx_ir.save(model, folder / "model.onnx")
    with OnnxRuntimeEngine().build_reference(folder / "model.onnx") as session:
        return session.run(feeds)


@pytest.mark.parametrize("target", DTYPES)
def test_each_value_is_rounded_and_each_sum_is_not(tmp_path: Path, target: Precision) -> None:
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


def test_an_overflow_is_seen(tmp_path: Path) -> None:
    """A product above 65504 is infinite in fp16, even where the next one would bring it back."""
    large, small = np.full((1, 1), 6e4, np.float32), np.full((1, 1), 1e-4, np.float32)
    text = "(float[b,1] x) => (float[b,1] y) { a = MatMul(x, large) y = MatMul(a, small) }"
    model = graph(text, large=large, small=small)
    run_passes(model, [LowerPrecision(Precision.FP16, "O3")])
    emulate(model, Precision.FP16)
    found = run(model, tmp_path, x=np.array([[1], [2]], np.float32))["y"]
    assert np.isfinite(found).tolist() == [[True], [False]]


def test_outputs_of_the_type_keep_it_and_their_names(tmp_path: Path) -> None:
    model = graph("(float[b,4] x) => (float[b,4] y) { y = MatMul(x, w) }", w=np.eye(4, dtype=np.float32))
    run_passes(model, [LowerPrecision(Precision.FP16, "O3", edges=True)])
    emulate(model, Precision.FP16)
    x = draw(2, 4).astype(np.float16)
    found = run(model, tmp_path, x=x)
    assert found["y"].dtype == np.float16
    np.testing.assert_array_equal(found["y"], x)


def test_a_graph_that_is_not_lowered_stays_as_it_is() -> None:
    model = graph("(float[b,4] x) => (float[b,4] y) { a = MatMul(x, w) y = Relu(a) }", w=draw(4, 4))
    emulate(model, Precision.FP16)
    assert operators(model) == ["MatMul", "Relu"]


def test_casts_that_the_graph_has_already_keep_their_names(tmp_path: Path) -> None:
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
