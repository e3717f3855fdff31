"""The cases of the suite, as the installed `onnx` has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from conforming import cases
from conforming.cases import Case, difference, ranks_of, to_tensors, to_values, write_model
from conforming.outcome import PASSED, Verdict
from conforming.ways import ask_bare, ask_openvino
from graphkiln_backend.graph.errors import GraphkilnError


def case(outputs: dict[str, np.ndarray], *, sequence: str = "") -> Case:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    values = [helper.make_value_info(each.name, kind) if each.name == sequence else each for each in values]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "weight")]
    held = [numpy_helper.from_array(np.ones(1, np.float32), "weight")]
    graph = helper.make_graph([], "g", inputs, values, held)
    samples = (([np.ones(1, np.float32)], list(outputs.values())),)
    return Case(kind="node", name="test_a", model=helper.make_model(graph), samples=samples, rtol=1e-3, atol=0)


def test_what_is_no_tensor_may_be_left_out() -> None:
    both = case({"y": np.ones(1), "all": np.ones(1)}, sequence="all")
    assert both.difference(0, {"y": np.ones(1)}) == ""
    assert both.difference(0, {"all": np.ones(1)}) == "no output y"
    assert both.difference(0, {"y": np.zeros(1)}).startswith("y: Not equal")


def test_the_architectures_come_with_their_inputs_and_outputs() -> None:
    found = {each.served_name: each for each in cases._light_cases()}
    assert len(found) == 9
    resnet = found["light_light_resnet50"]
    (feeds,) = resnet.feeds(0).values()
    assert feeds.shape == (1, 3, 224, 224)
    assert next(iter(resnet.expected(0).values())).shape == (1, 1000)


# When an answer is the expected one, by the suite's own rules.

ONE = np.array([1.0], np.float32)
BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        pytest.param(ONE, ONE * np.float32(1.0005), id="within the tolerance"),
        pytest.param(np.array([np.nan, np.inf]), np.array([np.nan, np.inf]), id="no numbers"),
        pytest.param(np.array(["a", "b"], object), np.array([b"a", b"b"], object), id="text comes as bytes"),
        pytest.param(ONE.astype(BF16), (ONE * np.float32(1.01)).astype(BF16), id="two roundings of bf16"),
        pytest.param([ONE, [ONE]], [ONE, [ONE]], id="sequences"),
        pytest.param(None, None, id="nothing"),
        pytest.param(np.empty(0), np.empty(0), id="empty"),
    ],
)
def test_the_same(expected: Any, got: Any) -> None:
    assert not difference(expected, got, 1e-3, 1e-7)


@pytest.mark.parametrize(
    ("expected", "got", "how"),
    [
        (ONE, ONE * 2, "Mismatched elements: 1 / 1"),
        (ONE, ONE.reshape(1, 1), r"the shape \[1, 1\] instead of \[1\]"),
        (ONE, ONE.astype(np.float64), "float64 instead of float32"),
        (np.array(["a"], object), np.array([b"b"], object), r"\[b'b'\] instead of \['a'\]"),
        (ONE.astype(BF16), (ONE * np.float32(1.1)).astype(BF16), "Mismatched"),
        ([ONE], [ONE, ONE], "another sequence"),
        ([ONE], [ONE * 2], "Mismatched"),
        ([ONE], ONE, "another sequence"),
        (None, ONE, "a value in the place of none"),
    ],
)
def test_another(expected: Any, got: Any, how: str) -> None:
    with pytest.raises(AssertionError, match=how):
        raise AssertionError(difference(expected, got, 1e-3, 1e-7))


# Cases as models of a store, and their tensors as Triton's protocol has them.

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
