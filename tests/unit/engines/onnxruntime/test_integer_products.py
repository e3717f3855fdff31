"""Graphs whose products stand in the file as integers are told from others."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir
import pytest
from graphs import draw, graph

from graphkiln_backend.engines.onnxruntime.exact_products import has_integer_products

_INTEGERS = """(float[N, 3] x) => (int32[N, 3] y) {
    q, scale, zero = DynamicQuantizeLinear(x)
    y = MatMulInteger(q, w, zero)
}"""
_FLOATS = "(float[N, 3] x) => (float[N, 3] y) { y = MatMul(x, w) }"


@pytest.mark.parametrize(("text", "found"), [(_INTEGERS, True), (_FLOATS, False)])
def test_they_are_found_by_their_operators(text: str, found: bool, tmp_path: Path) -> None:
    weight = draw(3, 3)
    model = onnx_ir.to_proto(graph(text, w=weight.astype("int8") if found else weight))
    onnx.save(model, tmp_path / "model.onnx")
    assert has_integer_products(tmp_path / "model.onnx") == found
