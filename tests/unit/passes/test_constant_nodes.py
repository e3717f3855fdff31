"""What is computed from weights alone stands right before each node that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import split_graphs
from graphs import compute, draw, graph, operators

from graphkiln_backend.lowering.parallel.parts import count_costs, graph_of, write_parts
from graphkiln_backend.lowering.parallel.speed import CPU_CORE
from graphkiln_backend.lowering.parallel.stages import find_cuts, find_stages
from graphkiln_backend.passes.constants import bring_to_readers, find_constant_nodes
from graphkiln_backend.passes.node_costs import load_for_splitting


def moved(text: str, **weights: Any) -> onnx_ir.Model:
    model = graph(text, **weights)
    bring_to_readers(model)
    onnx.checker.check_model(onnx_ir.to_proto(model), full_check=True)
    return model


def test_each_reader_has_a_chain_of_its_own() -> None:
    text = """(float[b,4] x) => (float[b,4] y) {
        t = Transpose(w)
        d = Neg(t)
        h = MatMul(x, d)
        r = Relu(h)
        k = MatMul(r, d)
        y = Add(k, t)
    }"""
    w = draw(4, 4)
    model = moved(text, w=w)
    assert operators(model) == [
        *("Transpose", "Neg", "MatMul", "Relu"),
        *("Transpose", "Neg", "MatMul", "Transpose", "Add"),
    ]
    names = [value.name for node in model.graph for value in node.outputs]
    assert len(set(names)) == len(names)
    x = draw(4, 4, seed=1)
    np.testing.assert_array_equal(compute(model, x=x)["y"], compute(graph(text, w=w), x=x)["y"])


def test_copies_do_not_multiply() -> None:
    """Each of twenty steps reads the one before on two ways, which are two million ways in all."""
    steps = "\n".join(f"a{n} = Neg(s{n}) b{n} = Abs(s{n}) s{n + 1} = Add(a{n}, b{n})" for n in range(20))
    text = f"(float[4] x) => (float[4] y) {{ s0 = Exp(w) {steps} h = Add(x, s20) y = Mul(h, s20) }}"
    assert len(moved(text, w=draw(4)).graph) == 2 * (1 + 3 * 20) + 2


def test_a_node_that_reads_twice_has_one_copy() -> None:
    model = moved("(float[4] x) => (float[4] y, float[4] z) { d = Neg(w) y = Add(x, x) z = Add(d, d) }", w=draw(4))
    assert operators(model) == ["Add", "Neg", "Add"]


def test_what_may_differ_or_is_read_elsewhere_stays_where_it_is() -> None:
    """Random numbers are drawn once; an output of the graph is computed once; graphs inside read it from around."""
    text = """(float[b,4] x, bool c) => (float[b,4] y, float[4] e) {
        n = RandomNormalLike(w)
        e = Neg(w)
        d = Abs(w)
        a = Add(x, n)
        z = If (c) <then_branch = t () => (float[b,4] u) { u = Add(a, d) },
                    else_branch = f () => (float[b,4] v) { v = Sub(a, d) }>
        y = Add(z, e)
    }"""
    assert operators(moved(text, w=draw(4))) == ["RandomNormalLike", "Neg", "Abs", "Add", "If", "Add"]
    assert find_constant_nodes(graph(text, w=draw(4))) == []


class TestStages:
    """Of an int8 graph, whose quantizer writes what dequantizes its weights in front."""

    def test_no_weights_pass_from_stage_to_stage(self, tmp_path: Path) -> None:
        path = split_graphs.save(split_graphs.quantized(), tmp_path / "whole")
        costs = count_costs(path, 1)
        first, second = find_stages(costs, 2, CPU_CORE)
        assert [node.op_type for node in costs.nodes].index("DequantizeLinear") > 0, "not in front any more"
        assert first.weight_bytes < 0.6 * costs.weight_bytes
        assert second.handed_bytes == 48 + 4 * 24, "an activation in int8, and the input"
        (tmp_path / "parts").mkdir()
        write_parts(path, (second.begin,), 1, tmp_path / "parts")
        held = [
            {each.name for each in onnx.load(graph_of(tmp_path / "parts", number, 0)).graph.initializer}
            for number in (0, 1)
        ]
        assert not held[0] & {"q2", "s2", "qb"}
        assert not held[1] & {"q1", "s1"}

    def test_a_weight_that_is_dequantized_for_two_is_held_by_both_stages(self, tmp_path: Path) -> None:
        text = """(float[b,4] x) => (float[b,4] y) {
            d = DequantizeLinear(q, s)
            h = MatMul(x, d)
            k = Exp(h)
            y = MatMul(k, d)
        }"""
        model = graph(text, q=np.arange(16, dtype=np.int8).reshape(4, 4), s=np.float32(0.1))
        costs = count_costs(split_graphs.save(model, tmp_path), 1)
        assert [stage.weight_bytes for stage in find_stages(costs, 2, CPU_CORE)] == [20, 20]
        assert costs.weight_bytes == 20

    def test_nothing_is_cut_between_a_weight_and_its_reader(self, tmp_path: Path) -> None:
        text = "(float[b,4] x) => (float[b,4] y) { c = Cast<to=1>(w) h = Exp(x) y = MatMul(h, c) }"
        path = split_graphs.save(graph(text, w=draw(4, 4).astype(np.float16)), tmp_path)
        costs = count_costs(path, 1)
        assert [node.op_type for node in costs.nodes] == ["Exp", "Cast", "MatMul"]
        assert (costs.local, find_cuts(costs)) == ({"c"}, [0, 1, 3])
        assert costs.nodes[1].writes == {"c": 0}, "computed once, and not for each sample"
        assert operators(load_for_splitting(path)) == ["Exp", "Cast", "MatMul"]
