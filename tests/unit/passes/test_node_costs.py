"""What each node of a graph costs, counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from graphs import draw, graph

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.graph_costs import GraphCosts
from graphkiln_backend.lowering.parallel.speed import CPU_CORE
from graphkiln_backend.lowering.parallel.stages import find_cuts, find_stages
from graphkiln_backend.passes.node_costs import bind_sizes, count_costs, load_for_splitting

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


def test_a_sequence_that_nothing_calls_one(tmp_path: Path) -> None:
    """Most graphs do not say it, and inference takes it for a tensor; also where a branch or an alias hands it on."""
    model = graph(
        """(float[b,4] x, bool c) => (float[b,8] y) {
            s = SequenceConstruct(x, x)
            r = Identity(s)
            t = If (c) <then_branch = t () => (seq(float[b,4]) u) { u = SequenceConstruct(x, x) },
                        else_branch = e () => (seq(float[b,4]) v) { v = Identity(r) }>
            y = ConcatFromSequence<axis=1>(t)
        }"""
    )
    for node in model.graph:
        if node.outputs[0].name != "y":
            node.outputs[0].type = None
    onnx_ir.save(model, tmp_path / "model.onnx")
    assert count_costs(load_for_splitting(tmp_path / "model.onnx")).local == {"s", "r", "t"}


VARYING = """(float[batch,tokens,4] x) => (float[batch,tokens,4] y) {
    flat = Reshape(x, rows)
    h = MatMul(flat, w)
    shape = Shape(x)
    y = Reshape(h, shape)
}"""


def test_sizes_of_samples_are_counted(tmp_path: Path) -> None:
    """Where nothing says it, a sentence is one token long, and costs next to nothing."""
    onnx_ir.save(graph(VARYING, w=draw(4, 4), rows=np.array([-1, 4])), tmp_path / "model.onnx")
    model = load_for_splitting(tmp_path / "model.onnx")
    unknown = count_costs(model)
    bind_sizes(model, {"x": (1, 128, 4)})
    known = count_costs(model)
    assert (unknown.flops, known.flops) == (2 * 4 * 4, 128 * 2 * 4 * 4)
    assert unknown.inputs == {"x": 16}
    assert known.inputs == {"x": 128 * 16}
    assert [sum(node.writes.values()) for node in known.nodes] == [2048, 2048, 24, 2048]
    assert [node.name for node in known.nodes] == [node.name for node in unknown.nodes]


def test_sizes_that_contradict_the_graph_leave_what_is_known(tmp_path: Path) -> None:
    onnx_ir.save(graph(VARYING, w=draw(4, 4), rows=np.array([-1, 4])), tmp_path / "model.onnx")
    model = load_for_splitting(tmp_path / "model.onnx")
    bind_sizes(model, {"x": (1, 3, 5), "of_another_graph": (7,)})
    assert count_costs(model).flops == 2 * 4 * 4


def test_what_has_no_known_type_stays_in_its_stage(tmp_path: Path) -> None:
    model = graph("(float[b,4] x) => (float[b,4] y) { h = Neg(x) y = Abs(h) }")
    next(iter(model.graph)).domain = "of.somebody"
    next(iter(model.graph)).outputs[0].type = None
    next(iter(model.graph)).outputs[0].shape = None
    model.graph.opset_imports["of.somebody"] = 1
    onnx_ir.save(model, tmp_path / "model.onnx")
    costs = count_costs(load_for_splitting(tmp_path / "model.onnx"))
    assert costs.local == {"h"}
    with pytest.raises(LoweringError, match="it can be cut at 0 places"):
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


def test_what_no_array_holds_stays_in_its_stage(tmp_path: Path) -> None:
    """An 8-bit float between two nodes: the runtime would refuse the part that ends with it."""
    text = "(float[b,4] x) => (float[b,4] y) { a = Exp(x) e = Cast<to=17>(a) c = Cast<to=1>(e) y = MatMul(c, w) }"
    onnx_ir.save(graph(text, opset=19, w=draw(4, 4)), tmp_path / "model.onnx")
    costs = count_costs(load_for_splitting(tmp_path / "model.onnx"))
    assert costs.local == {"e"}
    assert 2 not in find_cuts(costs, 3)
