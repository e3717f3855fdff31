"""What each node of a graph costs, counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir
import pytest
from graphs import draw, graph

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.graph_costs import GraphCosts
from graphkiln_backend.lowering.parallel.cuts import find_cuts, find_stages
from graphkiln_backend.lowering.parallel.speed import CPU_CORE
from graphkiln_backend.passes.node_costs import count_costs, load_for_splitting

MLP = """(float[b,4] x, bool c) => (float[b,3] y, float[b,5] r) {
    h = MatMul(x, w)
    r = Relu(h)
    y = MatMul(r, v)
}"""


def counted(folder: Path, text: str, **weights: Any) -> GraphCosts:
    onnx_ir.save(graph(text, **weights), folder / "model.onnx")
    return count_costs(load_for_splitting(folder / "model.onnx"))


def test_a_chain(tmp_path: Path) -> None:
    costs = counted(tmp_path, MLP, w=draw(4, 5), v=draw(5, 3))
    first, relu, last = costs.nodes
    assert (first.flops, relu.flops, last.flops) == (2 * 4 * 5, 0, 2 * 5 * 3)
    assert (first.weights, relu.weights, last.weights) == ({"w": 80}, {}, {"v": 60})
    assert (first.reads, relu.reads, last.reads) == (("x",), ("h",), ("r",))
    assert (first.writes, relu.writes, last.writes) == ({"h": 20}, {"r": 20}, {"y": 12})
    assert [node.fuses for node in costs.nodes] == [False, True, False]
    assert (costs.inputs, costs.outputs) == ({"x": 16, "c": 1}, {"y", "r"})
    assert (costs.weight_bytes, costs.flops) == (140, 70)


def test_a_weight_of_two_nodes_counts_once(tmp_path: Path) -> None:
    costs = counted(tmp_path, "(float[b,4] x) => (float[b,4] y) { h = MatMul(x, w) y = MatMul(h, w) }", w=draw(4, 4))
    assert [node.weights for node in costs.nodes] == [{"w": 64}, {"w": 64}]
    assert costs.weight_bytes == 64


def test_what_a_graph_inside_a_node_reads_is_read_by_the_node(tmp_path: Path) -> None:
    costs = counted(
        tmp_path,
        """(float[b,4] x, bool c) => (float[b,4] y) {
            h = Neg(x)
            y = If (c) <then_branch = t () => (float[b,4] u) { u = Add(h, w) },
                        else_branch = e () => (float[b,4] v) { v = Abs(h) }>
        }""",
        w=draw(4),
    )
    assert set(costs.nodes[1].reads) == {"c", "h"}
    assert costs.nodes[1].weights == {"w": 16}


def test_every_node_has_a_name_of_its_own(tmp_path: Path) -> None:
    model = graph("(float[b,4] x) => (float[b,4] y) { a = Neg(x) b = Abs(a) c = Neg(b) y = Neg(c) }")
    for node, name in zip(model.graph, ("same", None, "same", "other"), strict=True):
        node.name = name
    onnx_ir.save(model, tmp_path / "model.onnx")
    costs = count_costs(load_for_splitting(tmp_path / "model.onnx"))
    assert [node.name for node in costs.nodes] == ["same", "Abs#1", "same#2", "other"]


def test_what_is_no_tensor_stays_in_its_stage(tmp_path: Path) -> None:
    """A sequence between two nodes: a cut there would be refused by the runtime, although nothing seems to cross."""
    costs = counted(
        tmp_path,
        """(float[b,4] x) => (float[b,4] y) {
            a = Neg(x)
            s = SequenceConstruct(a, x)
            z = ConcatFromSequence<axis=1>(s)
            y = MatMul(z, w)
        }""",
        w=draw(8, 4),
    )
    assert costs.local == {"s"}
    assert find_cuts(costs, 2) == [0, 1, 3, 4]


def test_what_has_no_known_type_stays_in_its_stage(tmp_path: Path) -> None:
    model = graph("(float[b,4] x) => (float[b,4] y) { h = Neg(x) y = Abs(h) }")
    next(iter(model.graph)).domain = "of.somebody"
    next(iter(model.graph)).outputs[0].type = None
    next(iter(model.graph)).outputs[0].shape = None
    model.graph.opset_imports["of.somebody"] = 1
    onnx_ir.save(model, tmp_path / "model.onnx")
    costs = count_costs(load_for_splitting(tmp_path / "model.onnx"))
    assert costs.local == {"h"}
    with pytest.raises(LoweringError, match="it has 0 places where it can be cut"):
        find_stages(costs, 2, CPU_CORE)


def test_a_weight_that_a_request_may_replace_is_refused(tmp_path: Path) -> None:
    model = graph("(float[b,4] x, float[4] w) => (float[b,4] y) { y = Add(x, w) }")
    weight = next(value for value in model.graph.inputs if value.name == "w")
    weight.const_value = onnx_ir.tensor(draw(4), name="w")
    model.graph.register_initializer(weight)
    onnx_ir.save(model, tmp_path / "model.onnx")
    with pytest.raises(LoweringError, match="a request may replace the weight 'w'"):
        load_for_splitting(tmp_path / "model.onnx")


def test_a_file_that_is_no_graph(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(LoweringError, match="cannot split"):
        load_for_splitting(tmp_path / "model.onnx")
