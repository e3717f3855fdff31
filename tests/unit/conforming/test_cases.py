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
from conforming.cases import Case, difference
from conforming.outcome import PASSED, Verdict
from conforming.ways import as_published, restore_scalars, run_bare, run_openvino, write_model
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


def test_only_outputs_that_are_not_tensors_may_be_missing() -> None:
    both = case({"y": np.ones(1), "all": np.ones(1)}, sequence="all")
    assert both.difference(0, {"y": np.ones(1)}) == ""
    assert both.difference(0, {"all": np.ones(1)}) == "no output y"
    assert both.difference(0, {"y": np.zeros(1)}).startswith("y: Not equal")


def test_architectures_have_inputs_and_outputs() -> None:
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
def test_equal_by_the_suites_rules(expected: Any, got: Any) -> None:
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
        (None, ONE, "a value instead of none"),
    ],
)
def test_different_by_the_suites_rules(expected: Any, got: Any, how: str) -> None:
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


def test_an_element_type_without_a_counterpart_in_triton_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphkilnError, match="FLOAT8E4M3FN is not one that Triton can carry"):
        write_model(add(dtype=TensorProto.FLOAT8E4M3FN), tmp_path)


def test_scalars_are_sent_as_published_and_restored() -> None:
    assert as_published(add().feeds(0), {"x": 1})["x"].shape == (1,)
    assert as_published(add().feeds(0), {"x": 0})["x"].shape == ()
    assert restore_scalars(add(), {"y": np.ones(1, np.float32)})["y"].shape == ()
    assert restore_scalars(add(dims=(1,)), {"y": np.ones(1, np.float32)})["y"].shape == (1,)


@pytest.mark.parametrize("run", [run_bare, run_openvino])
def test_verdicts(run: Any) -> None:
    unknown = add()
    unknown.model.graph.node[0].op_type = "NoSuchOperator"
    right, wrong, refused = (outcome for _, outcome in run([add(), add(expected=TWO + np.float32(1)), unknown]))
    assert right == PASSED
    assert (wrong.verdict, wrong.reason[:12]) == (Verdict.DIFFERS, "y: Not equal")
    assert refused.verdict == Verdict.REFUSED
