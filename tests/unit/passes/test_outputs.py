"""Graphs that compute some of their outputs only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import zoo
from graphs import compute, draw, graph, operators

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edge_passes import PruneOutputs, keep_outputs

THREE = """(float[b,3] x) => (float[b,3] scores, float[b,3] loss, float[b,3] features) {
    features = Relu(x)
    scores = Mul(features, w)
    e = Exp(scores)
    loss = Log(e)
}"""


def three() -> onnx_ir.Model:
    return graph(THREE, w=draw(3))


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (("scores",), ["Relu", "Mul"]),
        (("features",), ["Relu"]),
        (("loss", "features"), ["Relu", "Mul", "Exp", "Log"]),
    ],
)
def test_what_only_the_others_need_goes(kept: tuple[str, ...], left: list[str]) -> None:
    model, x = three(), draw(2, 3, seed=1)
    edge = run_passes(model, [PruneOutputs(kept)]).edge
    assert operators(model) == left
    found, expected = compute(model, x=x), edge.to_graph_outputs(compute(three(), x=x))
    assert list(found) == list(expected), "in the graph's order, not in that of the request"
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    assert edge.kept == set(kept)


def test_inputs_that_no_output_needs_stay() -> None:
    """A client that feeds them must not fail because an output was dropped."""
    model = graph("(float[b,3] x, float[b,3] z) => (float[b,3] y, float[b,3] w) { y = Relu(x) w = Relu(z) }")
    run_passes(model, [PruneOutputs(("y",))])
    assert [value.name for value in model.graph.inputs] == ["x", "z"]


def test_all_of_them_is_nothing_to_do() -> None:
    (report,) = run_passes(three(), [PruneOutputs(("loss", "features", "scores"))]).reports
    assert (report.ran, report.note) == (False, "all outputs are kept")


def test_an_unknown_output_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConversionError, match="the graph has no output 'score'") as caught:
        run_passes(three(), [PruneOutputs(("score",))])
    assert "'scores'" in caught.value.hint


class TestFiles:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        onnx_ir.save(three(), tmp_path / "model.onnx")
        return tmp_path / "model.onnx"

    def test_a_part_is_written_and_the_share_that_was_dropped_is_told(self, path: Path, tmp_path: Path) -> None:
        target = tmp_path / "part.onnx"
        assert keep_outputs(path, ["scores"], target) == 0.5
        part, x = onnx_ir.load(target), draw(2, 3)
        np.testing.assert_array_equal(compute(part, x=x)["scores"], compute(three(), x=x)["scores"])
        assert operators(onnx_ir.load(path)) == operators(three()), "the original is not changed"

    def test_external_weights_are_found(self, tmp_path: Path) -> None:
        folder = zoo.add_external(tmp_path, "external")
        target = tmp_path / "part" / "model.onnx"
        target.parent.mkdir()
        keep_outputs(folder / "model.onnx", ["y"], target)
        onnx.checker.check_model(onnx.load(target), full_check=True)
