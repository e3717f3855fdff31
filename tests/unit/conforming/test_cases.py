"""The cases of the suite, as the installed `onnx` has them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from conforming import cases
from conforming.cases import Case


def case(outputs: dict[str, np.ndarray], *, sequence: str = "") -> Case:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    values = [helper.make_value_info(each.name, kind) if each.name == sequence else each for each in values]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "weight")]
    held = [numpy_helper.from_array(np.ones(1, np.float32), "weight")]
    graph = helper.make_graph([], "g", inputs, values, held)
    samples = (([np.ones(1, np.float32)], list(outputs.values())),)
    return Case(kind="node", name="test_a", model=helper.make_model(graph), samples=samples, rtol=1e-3, atol=0)


def test_initializers_need_no_values() -> None:
    assert list(case({"y": np.ones(1)}).feeds(0)) == ["x"]


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


def test_names_match_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (case({}),)
    monkeypatch.setattr(cases, "all_cases", lambda: found)
    assert cases.select("^node_a$") == list(found)
    assert cases.select("light") == []


def test_values_are_read_as_what_they_are() -> None:
    assert cases._as_value(numpy_helper.from_array(np.ones(2))).tolist() == [1, 1]
    assert cases._as_value([np.float32(1), None]) == [1, None]
