"""Running passes: reports, checks, and errors that name the pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph, operators

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes import base
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edge import Edge


@dataclass(frozen=True)
class Planted:
    """A pass that a test defines."""

    act: Callable[[onnx_ir.Model], object] = field(default=lambda _: None)
    name: str = "planted"
    summary: str = "planted by a test"
    reason: str = ""
    said: str = ""
    edge: Edge = field(default_factory=Edge)

    def why_skip(self, model: onnx_ir.Model) -> str:  # noqa: ARG002
        return self.reason

    def __call__(self, model: onnx_ir.Model) -> Edge:
        self.act(model)
        return self.edge

    def remark(self, model: onnx_ir.Model) -> str:  # noqa: ARG002
        return self.said


def model() -> onnx_ir.Model:
    return graph("(float[b,3] x) => (float[b,3] y) { a = Mul(x, w) b = Relu(x) y = Add(a, b) }", w=draw(3))


def retype(model: onnx_ir.Model) -> None:
    model.graph[0].op_type = "Convolve"


def reverse(model: onnx_ir.Model) -> None:
    """The last node first: an order that ONNX does not allow."""
    last = model.graph[-1]
    model.graph.remove(last)
    model.graph.insert_before(model.graph[0], last)


def unplug(model: onnx_ir.Model) -> None:
    """The sum no longer reads the product."""
    model.graph[-1].replace_input_with(0, model.graph.inputs[0])


def test_unused_nodes_and_weights_are_removed() -> None:
    rewritten = model()
    (report,) = run_passes(rewritten, [Planted(unplug)]).reports
    assert (report.name, report.nodes_before, report.nodes_after, report.ran, report.note) == (
        "planted",
        3,
        2,
        True,
        "",
    )
    assert operators(rewritten) == ["Relu", "Add"]
    assert not rewritten.graph.initializers


def test_nodes_are_sorted() -> None:
    rewritten, x = model(), draw(2, 3)
    expected = compute(rewritten, x=x)["y"]
    run_passes(rewritten, [Planted(reverse)])
    np.testing.assert_allclose(compute(rewritten, x=x)["y"], expected)


def test_skipped_pass() -> None:
    edge = Edge(inputs={"x": "z"})
    rewritten = run_passes(model(), [Planted(retype, reason="nothing here", said="left", edge=edge)])
    (report,) = rewritten.reports
    assert (report.ran, report.note, report.nodes_after) == (False, "nothing here", 3)
    assert rewritten.edge.inputs == {}


def test_edges_are_composed() -> None:
    first, second = Planted(edge=Edge(outputs={"y": "z"})), Planted(edge=Edge(outputs={"z": "OUTPUT_0"}))
    assert run_passes(model(), [first, second]).edge.outputs == {"y": "OUTPUT_0"}
    joined = run_passes(model(), [first]).then(run_passes(model(), [second]))
    assert joined.edge.outputs == {"y": "OUTPUT_0"}
    assert len(joined.reports) == 2


def test_output_of_unknown_rank() -> None:
    """As that of an `If` whose branches return different ones: runtimes take it, ONNX's checker does not."""

    def forget(model: onnx_ir.Model) -> None:
        model.graph.outputs[0].shape = None

    assert run_passes(model(), [Planted(act=forget)]).reports[0].ran


class TestFaults:
    def test_invalid_graph(self) -> None:
        with pytest.raises(ConversionError, match="'second' produced") as caught:
            run_passes(model(), [Planted(name="first"), Planted(retype, name="second"), Planted(name="third")])
        assert "--skip second" in caught.value.hint

    def test_error_of_a_library(self) -> None:
        def fail(_: onnx_ir.Model) -> None:
            raise KeyError("perm")

        with pytest.raises(ConversionError, match="the pass 'planted' failed: KeyError: 'perm'") as caught:
            run_passes(model(), [Planted(fail)])
        assert "--skip planted" in caught.value.hint
        assert isinstance(caught.value.__cause__, KeyError)

    def test_own_error(self) -> None:
        def refuse(_: onnx_ir.Model) -> None:
            raise ConversionError("the batch is torn", hint="mend it")

        with pytest.raises(ConversionError, match=r"^the batch is torn") as caught:
            run_passes(model(), [Planted(refuse)])
        assert caught.value.hint == "mend it"

    def test_undefined_output(self) -> None:
        def cut(model: onnx_ir.Model) -> None:
            model.graph.outputs[0] = onnx_ir.Value(
                name="ghost", type=onnx_ir.TensorType(onnx_ir.DataType.FLOAT), shape=onnx_ir.Shape([1])
            )

        with pytest.raises(ConversionError, match=r"invalid.*ghost"):
            run_passes(model(), [Planted(cut)])

    def test_operators_of_onnx_runtime(self) -> None:
        def normalize(changed: onnx_ir.Model) -> None:
            changed.graph[0].op_type = "SimplifiedLayerNormalization"

        (report,) = run_passes(model(), [Planted(normalize)]).reports
        assert report.ran

    def test_graphs_above_the_size_limit_are_not_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(base, "_PROTOBUF_LIMIT", 20)
        (report,) = run_passes(model(), [Planted(retype)]).reports
        assert report.ran
