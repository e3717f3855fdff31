"""Costs of nodes and whole graphs, counted by hand; constants that move to their readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import split_graphs
from graphs import compute, draw, graph, operators

from graphkiln_backend.graph.errors import LoweringError, RepositoryError
from graphkiln_backend.graph.graph_costs import GraphCosts
from graphkiln_backend.lowering.parallel.parts import count_costs as count_costs_of
from graphkiln_backend.lowering.parallel.parts import graph_of, write_parts
from graphkiln_backend.lowering.parallel.speed import CPU_CORE
from graphkiln_backend.lowering.parallel.stages import find_cuts, find_stages
from graphkiln_backend.passes.constants import bring_to_readers, find_constant_nodes
from graphkiln_backend.passes.node_costs import Census, bind_sizes, census, count_costs, load_for_splitting

MLP = """(float[b,4] x, bool c) => (float[b,3] y, float[b,5] r) {
    h = MatMul(x, w)
    r = Relu(h)
    y = MatMul(r, v)
}"""


def counted(folder: Path, text: str, **weights: Any) -> GraphCosts:
    onnx_ir.save(graph(text, **weights), folder / "model.onnx")
    return count_costs(load_for_splitting(folder / "model.onnx"))


def test_costs_of_a_chain(tmp_path: Path) -> None:
    costs = counted(tmp_path, MLP, w=draw(4, 5), v=draw(5, 3))
    first, relu, last = costs.nodes
    assert (first.flops, relu.flops, last.flops) == (2 * 4 * 5, 0, 2 * 5 * 3)
    assert (first.weights, relu.weights, last.weights) == ({"w": 80}, {}, {"v": 60})
    assert (first.reads, relu.reads, last.reads) == (("x",), ("h",), ("r",))
    assert (first.writes, relu.writes, last.writes) == ({"h": 20}, {"r": 20}, {"y": 12})
    assert [node.fuses for node in costs.nodes] == [False, True, False]
    assert (costs.inputs, costs.outputs) == ({"x": 16, "c": 1}, {"y", "r"})
    assert (costs.weight_bytes, costs.flops) == (140, 70)


def test_reads_of_subgraphs(tmp_path: Path) -> None:
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


def test_names_are_unique(tmp_path: Path) -> None:
    model = graph("(float[b,4] x) => (float[b,4] y) { a = Neg(x) b = Abs(a) c = Neg(b) y = Neg(c) }")
    for node, name in zip(model.graph, ("same", None, "same", "other"), strict=True):
        node.name = name
    onnx_ir.save(model, tmp_path / "model.onnx")
    costs = count_costs(load_for_splitting(tmp_path / "model.onnx"))
    assert [node.name for node in costs.nodes] == ["same", "Abs#1", "same#2", "other"]


def test_sequences_are_local(tmp_path: Path) -> None:
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


def test_sequences_without_declared_type_are_local(tmp_path: Path) -> None:
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


def test_sample_shapes(tmp_path: Path) -> None:
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


def test_contradicting_sample_shapes_are_ignored(tmp_path: Path) -> None:
    onnx_ir.save(graph(VARYING, w=draw(4, 4), rows=np.array([-1, 4])), tmp_path / "model.onnx")
    model = load_for_splitting(tmp_path / "model.onnx")
    bind_sizes(model, {"x": (1, 3, 5), "of_another_graph": (7,)})
    assert count_costs(model).flops == 2 * 4 * 4


def test_values_of_unknown_type_are_local(tmp_path: Path) -> None:
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


def test_replaceable_weight_is_refused(tmp_path: Path) -> None:
    model = graph("(float[b,4] x, float[4] w) => (float[b,4] y) { y = Add(x, w) }")
    weight = next(value for value in model.graph.inputs if value.name == "w")
    weight.const_value = onnx_ir.tensor(draw(4), name="w")
    model.graph.register_initializer(weight)
    onnx_ir.save(model, tmp_path / "model.onnx")
    with pytest.raises(LoweringError, match="a request may replace the weight 'w'"):
        load_for_splitting(tmp_path / "model.onnx")


def test_costs_of_no_graph(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(LoweringError, match="cannot split"):
        load_for_splitting(tmp_path / "model.onnx")


def test_8_bit_floats_are_local(tmp_path: Path) -> None:
    """An 8-bit float between two nodes: the runtime would refuse the part that ends with it."""
    text = "(float[b,4] x) => (float[b,4] y) { a = Exp(x) e = Cast<to=17>(a) c = Cast<to=1>(e) y = MatMul(c, w) }"
    onnx_ir.save(graph(text, opset=19, w=draw(4, 4)), tmp_path / "model.onnx")
    costs = count_costs(load_for_splitting(tmp_path / "model.onnx"))
    assert costs.local == {"e"}
    assert 2 not in find_cuts(costs, 3)


def census_of(folder: Path, text: str, **weights: Any) -> Census:
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
    def test_operations_of_products(self, tmp_path: Path, text: str, weights: dict[str, Any], flops: int) -> None:
        assert census_of(tmp_path, text, **weights).flops == flops

    def test_operations_are_unknown_without_shapes(self, tmp_path: Path) -> None:
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
    def test_weights_by_type(self, tmp_path: Path) -> None:
        text = "(float[b,4] x) => (float[b,4] y) { a = Mul(x, v) c = Cast<to=1>(h) b = Add(a, c) y = Reshape(b, s) }"
        found = census_of(tmp_path, text, v=draw(4), h=draw(4).astype(np.float16), s=np.array([-1, 4]))
        assert found.precisions == {"FP32": 4, "FP16": 4, "INT64": 2}
        assert (found.parameters, found.weight_bytes) == (10, 4 * 4 + 4 * 2 + 2 * 8)


def test_operators_by_frequency(tmp_path: Path) -> None:
    found = census_of(tmp_path, "(float[b,4] x) => (float[b,4] y) { a = Exp(x) b = Relu(a) c = Exp(b) y = Exp(c) }")
    assert list(found.operators.items()) == [("Exp", 3), ("Relu", 1)]
    assert (found.opset, found.ir_version) == (18, 9)


@pytest.mark.parametrize("content", [b"\x00\x01 no graph", None])
def test_census_of_no_graph(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(RepositoryError, match=r"model\.onnx is not an ONNX graph"):
        census(tmp_path / "model.onnx")


def moved(text: str, **weights: Any) -> onnx_ir.Model:
    model = graph(text, **weights)
    bring_to_readers(model)
    onnx.checker.check_model(onnx_ir.to_proto(model), full_check=True)
    return model


def test_each_reader_has_its_own_constants() -> None:
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


def test_one_copy_per_reader() -> None:
    model = moved("(float[4] x) => (float[4] y, float[4] z) { d = Neg(w) y = Add(x, x) z = Add(d, d) }", w=draw(4))
    assert operators(model) == ["Add", "Neg", "Add"]


def test_nodes_that_are_not_copied() -> None:
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
    """An int8 graph, whose quantizer dequantizes the weights first."""

    def test_dequantized_weights_stay_in_their_stage(self, tmp_path: Path) -> None:
        path = split_graphs.save(split_graphs.quantized(), tmp_path / "whole")
        costs = count_costs_of(path, 1)
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

    def test_dequantized_weight_of_two_stages(self, tmp_path: Path) -> None:
        text = """(float[b,4] x) => (float[b,4] y) {
            d = DequantizeLinear(q, s)
            h = MatMul(x, d)
            k = Exp(h)
            y = MatMul(k, d)
        }"""
        model = graph(text, q=np.arange(16, dtype=np.int8).reshape(4, 4), s=np.float32(0.1))
        costs = count_costs_of(split_graphs.save(model, tmp_path), 1)
        assert [stage.weight_bytes for stage in find_stages(costs, 2, CPU_CORE)] == [20, 20]
        assert costs.weight_bytes == 20

    def test_no_cut_between_a_weight_and_its_reader(self, tmp_path: Path) -> None:
        text = "(float[b,4] x) => (float[b,4] y) { c = Cast<to=1>(w) h = Exp(x) y = MatMul(h, c) }"
        path = split_graphs.save(graph(text, w=draw(4, 4).astype(np.float16)), tmp_path)
        costs = count_costs_of(path, 1)
        assert [node.op_type for node in costs.nodes] == ["Exp", "Cast", "MatMul"]
        assert (costs.local, find_cuts(costs)) == ({"c"}, [0, 1, 3])
        assert costs.nodes[1].writes == {"c": 0}, "computed once, and not for each sample"
        assert operators(load_for_splitting(path)) == ["Exp", "Cast", "MatMul"]
