"""A graph in numbers, counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from graphs import draw, graph

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.passes.node_costs import Census, census


def counted(folder: Path, text: str, **weights: Any) -> Census:
    onnx_ir.save(graph(text, **weights), folder / "model.onnx")
    return census(folder / "model.onnx")


class TestArithmetic:
    """A multiply and an add are two operations, of one sample."""

    @pytest.mark.parametrize(
        ("text", "weights", "flops"),
        [
            ("(float[b,4] x) => (float[b,5] y) { y = MatMul(x, w) }", {"w": draw(4, 5)}, 2 * 4 * 5),
            ("(float[b,7,4] x) => (float[b,7,5] y) { y = MatMul(x, w) }", {"w": draw(4, 5)}, 2 * 7 * 4 * 5),
            ("(float[b,4] x) => (float[b,5] y) { y = Gemm<transB=1>(x, w) }", {"w": draw(5, 4)}, 2 * 4 * 5),
            ("(float[4,6] x) => (float[6,5] y) { y = Gemm<transA=1>(x, w) }", {"w": draw(4, 5)}, 2 * 6 * 4 * 5),
            (
                "(float[b,3,8,8] x) => (float[b,16,8,8] y) { y = Conv<pads=[1,1,1,1]>(x, w) }",
                {"w": draw(16, 3, 3, 3)},
                2 * 16 * 8 * 8 * 3 * 3 * 3,
            ),
            (
                "(float[b,4,8,8] x) => (float[b,8,4,4] y) { y = Conv<group=4, strides=[2,2]>(x, w) }",
                {"w": draw(8, 1, 2, 2)},
                2 * 8 * 4 * 4 * 2 * 2,
            ),
            (
                "(float[b,4,5,5] x) => (float[b,3,6,6] y) { y = ConvTranspose(x, w) }",
                {"w": draw(4, 3, 2, 2)},
                2 * 4 * 5 * 5 * 3 * 2 * 2,
            ),
            ("(float[b,4] x) => (float[b,4] y) { y = Exp(x) }", {}, 0),
        ],
        ids=["product", "of rows", "transposed", "both", "convolution", "grouped", "upwards", "none"],
    )
    def test_of_products(self, tmp_path: Path, text: str, weights: dict[str, Any], flops: int) -> None:
        assert counted(tmp_path, text, **weights).flops == flops

    def test_is_not_known_where_a_shape_is_not(self, tmp_path: Path) -> None:
        model = graph("(float[b,4] x) => (float[b,5] y) { y = MatMul(x, w) }", w=draw(4, 5))
        model.graph[0].op_type = "Unheard"
        model.graph[0].domain = "own"
        product = onnx_ir.node("MatMul", [model.graph[0].outputs[0], model.graph.initializers["w"]])
        product.outputs[0].name = "z"
        model.graph[0].outputs[0].shape = None
        model.graph.append(product)
        model.graph.outputs[0] = product.outputs[0]
        product.outputs[0].type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
        model.opset_imports["own"] = 1
        onnx_ir.save(model, tmp_path / "model.onnx")
        found = census(tmp_path / "model.onnx")
        assert found.flops is None
        assert found.operators == {"own.Unheard": 1, "MatMul": 1}


class TestWeights:
    def test_are_counted_by_type(self, tmp_path: Path) -> None:
        text = "(float[b,4] x) => (float[b,4] y) { a = Mul(x, v) c = Cast<to=1>(h) b = Add(a, c) y = Reshape(b, s) }"
        found = counted(tmp_path, text, v=draw(4), h=draw(4).astype(np.float16), s=np.array([-1, 4]))
        assert found.precisions == {"FP32": 4, "FP16": 4, "INT64": 2}
        assert (found.parameters, found.weight_bytes) == (10, 4 * 4 + 4 * 2 + 2 * 8)


def test_operators_are_listed_by_frequency(tmp_path: Path) -> None:
    found = counted(tmp_path, "(float[b,4] x) => (float[b,4] y) { a = Exp(x) b = Relu(a) c = Exp(b) y = Exp(c) }")
    assert list(found.operators.items()) == [("Exp", 3), ("Relu", 1)]
    assert (found.opset, found.ir_version) == (18, 9)


def test_the_file_is_not_changed(tmp_path: Path) -> None:
    counted(tmp_path, "(float[b,4] x) => (float[b,4] y) { y = Relu(x) }")
    before = (tmp_path / "model.onnx").read_bytes()
    census(tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == before


@pytest.mark.parametrize("content", [b"\x00\x01 no graph", None])
def test_what_is_no_graph(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(RepositoryError, match=r"model\.onnx is not an ONNX graph"):
        census(tmp_path / "model.onnx")
