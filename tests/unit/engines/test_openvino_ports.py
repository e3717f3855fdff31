"""Inputs and outputs of a compiled graph, by the names of the saved one."""

from __future__ import annotations

import openvino
import pytest
from openvino import opset13

from graphkiln_backend.engines.openvino import first_specs, match, spec_of
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.signature import ANY_RANK, TensorSpec


def parameter(name: str, shape: openvino.PartialShape) -> openvino.Node:
    found = opset13.parameter(shape, openvino.Type.i64, name=name)
    found.output(0).get_tensor().set_names({name, f"{name}:0"})
    return found


@pytest.fixture
def model() -> openvino.Model:
    first, second = parameter("a", openvino.PartialShape([-1, 3])), parameter("b", openvino.PartialShape.dynamic())
    return openvino.Model([opset13.add(first, second)], [first, second])


def test_shapes_and_types_are_read(model: openvino.Model) -> None:
    spec = spec_of(model.inputs[0], "a")
    assert (spec.dtype, spec.shape[1]) == (DType.INT64, 3)
    assert not isinstance(spec.shape[0], int)
    assert spec_of(model.inputs[1], "b").shape == (ANY_RANK,)
    assert [spec.name in {"a", "a:0"} for spec in first_specs(model.inputs[:1])] == [True]


def test_ports_are_found_by_any_of_their_names(model: openvino.Model) -> None:
    b, a = (TensorSpec(name=name, dtype=DType.INT64, shape=(3,)) for name in ("b:0", "a"))
    assert match(model.inputs, [b, a]) == {"b:0": 1, "a": 0}


def test_an_input_that_was_dropped_has_no_port(model: openvino.Model) -> None:
    a, gone = (TensorSpec(name=name, dtype=DType.INT64, shape=(3,)) for name in ("a", "gone"))
    assert match(model.inputs[:1], [a, gone]) == {"a": 0}
