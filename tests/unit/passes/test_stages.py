"""Graphs cut into parts: together they compute what the whole graph does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from graphs import compute, draw, graph

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.passes.node_costs import load_for_splitting
from graphkiln_backend.passes.stages import find_parts, write_part

RESIDUAL = """(float[b,4] x, float[b,4] z) => (float[b,4] y, float[b,4] early) {
    h = MatMul(x, w)
    early = Relu(h)
    k = MatMul(early, w)
    s = Add(k, h)
    y = Sub(s, bias)
}"""


@pytest.fixture
def whole(tmp_path: Path) -> onnx_ir.Model:
    onnx_ir.save(graph(RESIDUAL, w=draw(4, 4), bias=draw(4, seed=1)), tmp_path / "model.onnx")
    return load_for_splitting(tmp_path / "model.onnx")


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (3,), (1, 2, 3, 4)])
def test_parts_equal_the_whole_graph(whole: onnx_ir.Model, tmp_path: Path, cuts: tuple[int, ...]) -> None:
    tensors = {"x": draw(3, 4, seed=2), "z": draw(3, 4, seed=3)}
    expected = compute(whole, **tensors)
    for number, part in enumerate(find_parts(whole, cuts)):
        target = tmp_path / f"{number}.onnx"
        write_part(whole, part, target)
        onnx.checker.check_model(onnx.load(target), full_check=True)
        fed = {name: tensors[name] for name in part.inputs}
        tensors |= compute(onnx_ir.load(target), **fed)
    for name, array in expected.items():
        np.testing.assert_array_equal(tensors[name], array)


def test_weights_of_parts(whole: onnx_ir.Model, tmp_path: Path) -> None:
    held = []
    for number, part in enumerate(find_parts(whole, (2, 4))):
        write_part(whole, part, tmp_path / f"{number}.onnx")
        held.append(sorted(each.name for each in onnx.load(tmp_path / f"{number}.onnx").graph.initializer))
    assert held == [["w"], ["w"], ["bias"]]


def test_subgraph_that_reads_an_earlier_part(tmp_path: Path) -> None:
    model = graph(
        """(float[b,4] x, bool c) => (float[b,4] y) {
            h = Neg(x)
            y = If (c) <then_branch = t () => (float[b,4] u) { u = Add(h, w) },
                        else_branch = e () => (float[b,4] v) { v = Abs(h) }>
        }""",
        w=draw(4),
    )
    onnx_ir.save(model, tmp_path / "model.onnx")
    whole = load_for_splitting(tmp_path / "model.onnx")
    _, second = find_parts(whole, (1,))
    assert set(second.inputs) == {"h", "c"}
    write_part(whole, second, tmp_path / "second.onnx")
    h = draw(2, 4, seed=1)
    found = compute(onnx_ir.load(tmp_path / "second.onnx"), h=h, c=np.array(True))
    np.testing.assert_array_equal(found["y"], h + draw(4))


def test_output_that_no_node_computes() -> None:
    model = graph("(float[b,4] x) => (float[b,4] y) { y = Neg(x) }")
    model.graph.outputs.append(model.graph.inputs[0])
    with pytest.raises(LoweringError, match="its output 'x' is computed by no node"):
        find_parts(model, ())
