"""Cases as models of a store, and their tensors as Triton's protocol has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from conforming.bare import ask_bare
from conforming.cases import Case
from conforming.instance import ask_openvino
from conforming.models import ranks_of, to_tensors, to_values, write_model
from conforming.outcome import PASSED, Verdict
from graphkiln_backend.graph.errors import GraphkilnError

TWO = np.float32(2.0)


def add(expected: object = TWO, dims: tuple[int, ...] = (), dtype: int = TensorProto.FLOAT) -> Case:
    """A graph that doubles a scalar."""
    values = [helper.make_tensor_value_info(name, dtype, dims) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", values[:1], values[1:])
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 18)])
    samples = (([np.array(1.0, np.float32).reshape(dims)], [expected]),)
    return Case(kind="node", name="test_add", model=model, samples=samples, rtol=1e-3, atol=1e-7)


def test_a_case_is_a_model_of_a_store(tmp_path: Path) -> None:
    folder = write_model(add(), tmp_path, engine="openvino")
    assert folder.name == "node_add"
    assert onnx.load(folder / "1" / "model.onnx").graph.node[0].op_type == "Add"
    text = (folder / "config.pbtxt").read_text()
    assert "openvino" in text
    assert 'name: "y"' in text  # completed from the graph


def test_one_that_nobody_can_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphkilnError, match="FLOAT8E4M3FN is not one that Triton can carry"):
        write_model(add(dtype=TensorProto.FLOAT8E4M3FN), tmp_path)


@pytest.mark.parametrize(("published", "shape"), [([1], (1,)), ([], ())])
def test_scalars_are_sent_as_the_server_publishes_them(published: list[int], shape: tuple[int, ...]) -> None:
    ranks = ranks_of([{"name": "x", "shape": published}])
    assert to_tensors(add().feeds(0), ranks)["x"].shape == shape


@pytest.mark.parametrize("dims", [(), (1,)])
def test_what_the_graph_computes_as_a_scalar_is_one_again(dims: tuple[int, ...]) -> None:
    assert to_values(add(dims=dims), {"y": np.ones(1, np.float32)})["y"].shape == dims


class TestAsking:
    @pytest.mark.parametrize("ask", [ask_bare, ask_openvino])
    def test_what_is_right_passes(self, ask: Any) -> None:
        assert [outcome for _, outcome in ask([add()])] == [PASSED]

    @pytest.mark.parametrize("ask", [ask_bare, ask_openvino])
    def test_what_is_not_differs(self, ask: Any) -> None:
        ((_, outcome),) = ask([add(expected=TWO + np.float32(1))])
        assert (outcome.verdict, outcome.reason[:12]) == (Verdict.DIFFERS, "y: Not equal")

    @pytest.mark.parametrize("ask", [ask_bare, ask_openvino])
    def test_what_cannot_be_loaded_is_refused(self, ask: Any) -> None:
        case = add()
        case.model.graph.node[0].op_type = "NoSuchOperator"
        assert [outcome.verdict for _, outcome in ask([case])] == [Verdict.REFUSED]
